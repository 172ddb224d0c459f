"""FedGH: private bodies under a head that the server trains on class means."""

from __future__ import annotations

from lightning_modules.base import ClientModule
from lightning_modules.prototypes import reply_means
from pflsim.data.federated import Shard
from pflsim.messages import Uplink
from pflsim.params import HEAD


class FedGH(ClientModule):
    """Plain SGD on the whole net, whose head the server's replaces in every round (Yi et al. 2023, Figure 1).

    Class means of the trained body's features go up, the head comes down; the body never leaves. Judged after local
    training: by the client's body and the head as it has trained it.

    Notes:
        Before round 1 the server's head is the common initial one, so that round 1 is Local's.
        The server does not train running statistics: those of normalisation in a head stay with the client.
    """

    lockstep = True
    shared = HEAD
    compares_features = True

    def shared_buffers(self) -> tuple[str, ...]:
        """None."""
        return ()

    def reply(self, shard: Shard) -> Uplink:
        """The class means of the trained body; the trained head stays here."""
        return reply_means(self.net.body, shard)
