"""The server of FedAMP."""

from pflsim.config.validate import Positive
from pflsim.params import UnitKind
from pflsim.servers.pfedcfr import PFedCFR


class FedAMP(PFedCFR):
    """u_i = (1 − Σ ζ_ij)·w_i + Σ ζ_ij·w_j over the whole model (Huang et al. 2021, eq. 5).

    This is pFedCFR's server with all units mixed and the whole model as one unit. A client that does not report counts
    with its last upload.

    Args:
        alpha: α_k, constant over the rounds.
        sigma: σ; (N−1)·α/σ must not exceed 1 unless `clamp` is set.
        unit: the fusion unit over which distances are computed; the paper: model.
        clamp: set negative self weights to 0 and renormalise the rows, which permits a larger α/σ.
    """

    def __init__(self, *, alpha: Positive = 1e4, sigma: Positive = 1e6, unit: UnitKind = "model", clamp: bool = False):
        super().__init__(alpha=alpha, sigma=sigma, r=1.0, unit=unit, clamp=clamp)
