"""FedGH: private bodies, and a head that the server trains on class means."""

from lightning_modules.base import ClientModule
from lightning_modules.prototypes import reply_means
from pflsim.data.federated import Shard
from pflsim.messages import Uplink
from pflsim.params import HEAD


class FedGH(ClientModule):
    """Trains the whole net by plain SGD from the server's head (Yi et al. 2023, Figure 1).

    The client receives the head and sends class means of the trained body's features. The body stays private.
    Reported model: personal, after local training.

    Notes:
        - Before round 1 the server's head is the common initial head, so round 1 equals Local.
        - Running statistics of normalisation layers in a head stay private, since the server does not train them.
    """

    lockstep = True
    needs_classes = True
    shared = HEAD
    compares_features = True

    def shared_buffers(self) -> tuple[str, ...]:
        """Return no buffers."""
        return ()

    def reply(self, shard: Shard) -> Uplink:
        """Return the class means of the trained body."""
        return reply_means(self.net.body, shard)
