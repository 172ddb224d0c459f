"""IFCA: each client trains the one of several models that fits its data best."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink, unpacked
from pflsim.servers.ifca import CLUSTER, MODEL
from pflsim.types import Tensors


class IFCA(ClientModule):
    """Trains the received model with the least loss, ĵ = argmin_j F_i(θ_j), by plain SGD (Ghosh et al. 2020, Alg. 1).

    F_i is the mean cross-entropy on all training examples of the client. The client sends the trained model and ĵ.
    Reported model: personal, as received, the model with the least training loss.

    Args:
        net: body and head.
        training: the run's local training settings.

    Notes:
        In a tie the first model is chosen. A model whose loss is not finite is chosen only if no other is left. Models
        move to the device one at a time, so memory there does not grow with their number.
    """

    lockstep = True
    reported_phase = "received"
    extra_on_cpu = True
    cluster: Tensor

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self.register_buffer("cluster", torch.zeros((), dtype=torch.int64))
        self._models: Mapping[int, Tensors] = {}

    def receive(self, downlink: Message) -> None:
        """Store the models for `before_training`, which always follows."""
        self._models = unpacked(downlink, MODEL)

    def before_training(self, shard: Shard) -> None:
        """Load the model with the least loss on the training examples."""
        models, self._models = self._models, {}
        best = min(models, key=lambda number: self.training_loss(models[number], shard))
        self.load_model(models[best], shard)
        self.cluster.fill_(best)

    def reply(self, shard: Shard) -> Uplink:
        """Return the trained model and the number of its cluster."""
        return replace(super().reply(shard), numbers={CLUSTER: float(self.cluster)})
