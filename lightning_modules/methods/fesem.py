"""FeSEM."""

from __future__ import annotations

from lightning_modules.base import ClientModule


class FeSEM(ClientModule):
    """Plain SGD from the centre of the client's cluster (Xie et al. 2020, Algorithm 1, local update).

    Judged by what it is sent: its cluster's model, which is what the paper makes for every client.
    """

    lockstep = True
    judged_phase = "received"
