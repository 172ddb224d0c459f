"""FeSEM."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_modules.base import ClientModule
from lightning_modules.losses import mean_loss
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.messages import Message, unpacked
from pflsim.params import load
from pflsim.servers.fesem import CENTRE
from pflsim.types import Tensors


class FeSEM(ClientModule):
    """Plain SGD from the centre of the client's cluster (Xie et al. 2020, Algorithm 1, local update).

    Judged by what it is sent: its cluster's model, which is what the paper makes for every client.

    Args:
        net: body and head.
        training: the run's local training settings.

    Notes:
        A newcomer is sent all centres and starts from the one with the lowest mean cross-entropy on its training
        examples; of equal ones from the first.
    """

    lockstep = True
    reported_phase = "received"
    extra_on_cpu = True

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self._centres: Mapping[int, Tensors] = {}

    def join(self, downlink: Message) -> None:
        """Hold the centres until `adopt`, which always follows."""
        self._centres = unpacked(downlink, CENTRE)

    def before_training(self, shard: Shard) -> None:
        """A newcomer goes to the centre that fits its training examples best."""
        offered, self._centres = self._centres, {}
        if offered:
            self._wear(min(offered.values(), key=lambda centre: self._loss(centre, shard)), shard)

    def _loss(self, centre: Tensors, shard: Shard) -> float:
        """Mean cross-entropy of a centre, which the net then holds; of one that has diverged it is infinite."""
        self._wear(centre, shard)
        loss = mean_loss(self.net, shard.train)
        return loss if math.isfinite(loss) else math.inf

    def _wear(self, centre: Tensors, shard: Shard) -> None:
        """Put a centre into the net."""
        load(self, centre)
        if self.training_settings.buffers == "recalibrate":
            self.recalibrate(shard.train)
