"""HeurpFedLA: pFedLA with some units kept by the client."""

from lightning_modules.methods.pfedla import PFedLA


class HeurpFedLA(PFedLA):
    """Trains as pFedLA does and keeps the units that the downlink leaves out (Ma et al. 2022, Algorithm 2, line 13).

    θ_i = {received mixed units, retained units after the client's own training}.
    """
