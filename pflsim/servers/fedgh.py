"""The server of FedGH: a head trained on class means."""

from __future__ import annotations

from pflsim.servers.fedfcd import FedFCD


class FedGH(FedFCD):
    """θ ← θ − η·∇ℓ(h(θ; C_ij), j) for the pairs (class mean, class) of the round's clients (Yi et al. 2023).

    FedFCD's server with the head as all that is sent; it replaces the clients' own instead of standing beside it.

    Args:
        server_lr: η; the paper: 0.01.
        server_epochs: passes over the pairs a round.
        server_batch: pairs per step; the authors: a step for each.

    Notes:
        The pairs come in an order that the seed decides, not client by client. A client that did not report has no
        pairs in the round; without any the head stays as it is.
    """

    prefix = "net.head."

    def __init__(self, *, server_lr: float = 0.01, server_epochs: int = 1, server_batch: int = 1):
        super().__init__(
            server_lr=server_lr,
            server_epochs=server_epochs,
            server_batch=server_batch,
            feature_alignment=False,
            decision_fusion=True,
        )
        self.initial_round = False
