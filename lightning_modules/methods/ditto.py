"""Ditto: a personal model that stays near the global one."""

from copy import deepcopy

from torch import Tensor

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.training import Training
from pflsim.messages import Message
from pflsim.params import Selector, load


class Ditto(ClientModule):
    """Trains FedAvg's w and a personal model v on F(v) + λ/2·‖v − w^t‖² (Li et al. 2021, eq. 2, Algorithm 1).

    w^t is the received model. On each mini-batch, w takes a FedAvg step and v takes its own step. Only w is shared.
    Reported model: v.

    Args:
        net: body and head of w.
        training: the run's local training settings, for both.
        lam: λ ≥ 0, with lr·λ ≤ 2; with 0, v is Local's model.

    Notes:
        w^t is fixed for the round, so the order of the two steps does not matter.
    """

    lockstep = True
    token_targets = True
    private_steps = True

    def __init__(self, net: Net, training: Training, *, lam: float = 1.0):
        super().__init__(net, training)
        self.personal = deepcopy(net)
        self.lam = training.penalty("method.lam", lam)
        self.received = Anchor({"personal" + name.removeprefix("net"): name for name in self.shared_parameters()})

    def schedule(self) -> Schedule:
        """Return one stage in which w and v train on the same mini-batches."""
        personal = Phase("personal", objective="personal_objective", trainable=Selector(("personal",)))
        return (Alternate((Phase("global"), personal), every="batch"),)

    def join(self, downlink: Message) -> None:
        """Initialise w and v of a newcomer with the server's model."""
        self.receive(downlink)
        load(self.personal, self.net.state_dict())

    def personal_objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of v and its penalty towards w^t."""
        inputs, labels = batch
        loss = self.task_loss(self.personal(inputs), labels)
        return {self.loss_name: loss, "prox": proximal(self.received.pairs(self), self.lam)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of the personal model v."""
        return self.personal(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of the global model w."""
        return self.net(inputs)
