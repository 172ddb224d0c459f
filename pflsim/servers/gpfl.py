"""The server of GPFL: the mean of body, valve and embeddings."""

from __future__ import annotations

from pflsim.messages import Message
from pflsim.servers.fedavg import FedAvg, State


class GPFL(FedAvg):
    """FedAvg's server (Zhang et al. 2023, Algorithm 1, lines 15 to 18), which has no model for all to offer.

    The head and the condition of the path that decides are the clients' own. A client that did not report does not
    count.
    """

    def join(self, state: State, client: int) -> Message:
        """What everyone is sent."""
        return self.downlink(state, client)

    def global_weights(self, state: State) -> None:
        """None."""
        del state
