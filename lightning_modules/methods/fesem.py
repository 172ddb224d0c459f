"""FeSEM: one model per cluster of clients."""

from collections.abc import Mapping

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.messages import Message, unpacked
from pflsim.servers.fesem import CENTRE
from pflsim.types import Tensors


class FeSEM(ClientModule):
    """Trains the centre of the client's cluster by plain SGD (Xie et al. 2020, Algorithm 1, local update).

    Reported model: as received, the cluster's model.

    Args:
        net: body and head.
        training: the run's local training settings.

    Notes:
        A newcomer receives all centres and starts from the one with the lowest mean cross-entropy on its training
        examples; in a tie, from the first.
    """

    lockstep = True
    reported_phase = "received"
    extra_on_cpu = True

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self._centres: Mapping[int, Tensors] = {}

    def join(self, downlink: Message) -> None:
        """Store the centres for `before_training`, which always follows."""
        self._centres = unpacked(downlink, CENTRE)

    def before_training(self, shard: Shard) -> None:
        """Load, for a newcomer, the centre that fits its training examples best."""
        offered, self._centres = self._centres, {}
        if offered:
            self.load_model(min(offered.values(), key=lambda centre: self.training_loss(centre, shard)), shard)
