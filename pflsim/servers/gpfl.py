"""The server of GPFL: averages body, valve and embeddings."""

from pflsim.servers.fedavg import FedAvg, State


class GPFL(FedAvg):
    """FedAvg's server (Zhang et al. 2023, Algorithm 1, lines 15 to 18) without a global model.

    The head and the conditional input of the personal path stay on the clients. A client that does not report does not
    count.
    """

    def global_weights(self, state: State) -> None:
        """Return None."""
