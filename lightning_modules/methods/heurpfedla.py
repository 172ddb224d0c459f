"""HeurpFedLA."""

from __future__ import annotations

from lightning_modules.methods.pfedla import PFedLA


class HeurpFedLA(PFedLA):
    """pFedLA whose clients keep the units that they are not sent (Ma et al. 2022, Algorithm 2, line 13).

    θ_i = {mixed units as received, retained units as they are after the client's own training}: what a downlink leaves
    out stays as it is.
    """
