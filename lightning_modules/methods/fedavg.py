"""FedAvg."""

from __future__ import annotations

from lightning_modules.base import ClientModule


class FedAvg(ClientModule):
    """Plain SGD from the server's mean (McMahan et al. 2017, Algorithm 1). Judged by the server's model."""

    lockstep = True
    reported_model = "global"
