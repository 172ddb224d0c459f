"""The server of FedGH: trains the head on class means."""

from pflsim.config.settings import Count
from pflsim.config.validate import Positive
from pflsim.servers.fedfcd import FedFCD


class FedGH(FedFCD):
    """θ ← θ − η·∇ℓ(h(θ; C_ij), j) for the pairs (class mean, class) of the round's clients (Yi et al. 2023).

    This is FedFCD's server without global means. The global head replaces the clients' heads.

    Args:
        server_lr: η; the paper: 0.01.
        server_epochs: passes over the pairs per round.
        server_batch: pairs per step; the authors: 1.

    Notes:
        The seed determines the order of the pairs; they are not grouped by client. A client that does not report has no
        pairs in the round. Without pairs the head is unchanged.
    """

    prefix = "net.head."

    def __init__(self, *, server_lr: Positive = 0.01, server_epochs: Count = 1, server_batch: Count = 1):
        super().__init__(
            server_lr=server_lr,
            server_epochs=server_epochs,
            server_batch=server_batch,
            feature_alignment=False,
            decision_fusion=True,
        )
        self.initial_round = False
