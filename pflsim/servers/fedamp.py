"""The attentive server of FedAMP."""

from __future__ import annotations

from pflsim.params import UnitKind
from pflsim.servers.pfedcfr import PFedCFR


class FedAMP(PFedCFR):
    """u_i = (1 − Σ ζ_ij)·w_i + Σ ζ_ij·w_j over the whole model (Huang et al. 2021, eq. 5).

    It is the cross-fusion rule with every unit mixed, and the whole model as one unit. A client that did not report
    counts with its former upload, as there.

    Args:
        alpha: α_k, constant over the rounds.
        sigma: σ; (N−1)·α/σ must not exceed 1 unless `clamp`.
        unit: what distances are taken over; the paper's is the whole model.
        clamp: allow larger α/σ by clipping negative self weights at 0 and renormalising the rows.
    """

    def __init__(self, *, alpha: float = 1e4, sigma: float = 1e6, unit: UnitKind = "model", clamp: bool = False):
        super().__init__(alpha=alpha, sigma=sigma, r=1.0, unit=unit, clamp=clamp)
