"""Ditto."""

from __future__ import annotations

from copy import deepcopy
from typing import Literal

from torch import Tensor

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy, proximal
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.training import Training
from pflsim.messages import Message
from pflsim.params import Selector, load


class Ditto(ClientModule):
    """Beside FedAvg's w a personal model v with F(v) + λ/2·‖v − w^t‖² (Li et al. 2021, eq. 2, Algorithm 1).

    w^t is the model as received. On every mini-batch w takes FedAvg's step and v its own; w travels, v never does.
    Judged by v.

    Args:
        net: body and head of w.
        training: the run's local training settings, for both.
        lam: λ ≥ 0, with lr·λ ≤ 2; 0 makes v Local.

    Notes:
        As w^t is held fixed for the round, the order of the two steps changes nothing.
    """

    lockstep = True

    def __init__(self, net: Net, training: Training, *, lam: float = 1.0):
        super().__init__(net, training)
        self.personal = deepcopy(net)
        self.lam = training.penalty("method.lam", lam)
        self.received = Anchor({"personal" + name.removeprefix("net"): name for name in self.shared_parameters()})

    def schedule(self) -> Schedule:
        """Both models, on the same mini-batches."""
        personal = Phase("personal", objective="personal_objective", trainable=Selector(("personal",)))
        return (Alternate((Phase("global"), personal), every="batch"),)

    def join(self, downlink: Message) -> None:
        """A newcomer's v starts from the server's model."""
        self.receive(downlink)
        load(self.personal, self.net.state_dict())

    def personal_objective(self, batch: Batch) -> Terms:
        """Cross-entropy of v and its pull towards w^t."""
        inputs, labels = batch
        ce = cross_entropy(self.personal(inputs), labels)
        return {"ce": ce, "prox": proximal(self.received.pairs(self), self.lam)}

    def predict(self, inputs: Tensor) -> Tensor:
        """The personal model v."""
        return self.personal(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """The common model w."""
        return self.net(inputs)

    def plain_net(self, model: Literal["personal", "global"]) -> Net:
        """The personal model v, or w."""
        return self.personal if model == "personal" else self.net
