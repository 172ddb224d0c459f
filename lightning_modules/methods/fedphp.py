"""FedPHP: each client inherits a moving average of its own models, which gives hints to the global one."""

import math
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import adaptive_discrepancy, soft_cross_entropy
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.config.validate import Positive
from pflsim.data.federated import Examples, Shard
from pflsim.messages import Message, Uplink
from pflsim.params import load
from pflsim.tasks.task import in_float32
from pflsim.types import ModelKind


class FedPHP(ClientModule):
    """Trains FedAvg's w on (1 − λ)·CE + λ·R and inherits v ← μ·v + (1 − μ)·w (Li et al., ECML-PKDD 2021).

    R is the hint of the fixed v: the cross-entropy of w's scores with softmax(v(x)/τ) ("kd"), or the maximum mean
    discrepancy of the features of both ("mmd"). After the client's c-th round, counted from 0,
    μ = m·min(1, c / max(1, ⌊fraction·T⌋)) with T rounds. Before its first round, v is the received model. Only w is
    shared. Reported model: v, as received.

    Args:
        net: body and head of w.
        training: the run's local training settings.
        lam: λ in [0, 1]; 0 is FedAvg.
        hint: R.
        most: m, the largest μ; 0: v is the client's last trained model.
        temperature: τ > 0 of v's scores.

    Notes:
        v is in evaluation mode, and has the running statistics of w averaged as its parameters are.
    """

    lockstep = True
    needs_classes = True
    reported_phase = "received"
    taken: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: Probability = 0.1,
        hint: Literal["kd", "mmd"] = "kd",
        most: Probability = 0.9,
        temperature: Positive = 4.0,
    ):
        super().__init__(net, training)
        self.lam, self.hint, self.most, self.temperature = lam, hint, most, temperature
        self.inherited = deepcopy(net).requires_grad_(False)
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def receive(self, downlink: Message) -> None:
        """Load w, and before the client's first round v too."""
        super().receive(downlink)
        self._start()

    def recalibrate(self, examples: Examples, model: ModelKind = "personal", batch_size: int = 256) -> None:
        """Measure the running statistics of w, which v starts with."""
        super().recalibrate(examples, model, batch_size)
        self._start()

    def _start(self) -> None:
        received, own = self.net.state_dict(), self.inherited.state_dict()
        first = self.taken == 0
        load(self.inherited, {name: torch.where(first, received[name], value) for name, value in own.items()})

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of w, and the hint of v."""
        inputs, labels = batch
        features = self.net.body(inputs)
        scores, terms = self.net.head(features), Terms()
        if self.lam < 1:
            terms[self.loss_name] = (1 - self.lam) * self.task_loss(scores, labels)
        if self.lam:
            with torch.no_grad(), evaluating(self.inherited):
                given = self.inherited.body(inputs)
                target = (in_float32(self.inherited.head(given)) / self.temperature).softmax(1)
            if self.hint == "kd":
                terms["kd"] = self.lam * soft_cross_entropy(target, scores).mean()
            else:
                terms["mmd"] = self.lam * adaptive_discrepancy(features.flatten(1), given.flatten(1))
        return terms

    def decided_by_rounds(self) -> int:
        """Return the number of rounds in which a client takes part on average, at least 1, until μ is `most`."""
        training = self.training_settings
        return max(1, math.floor(training.fraction * training.rounds + 1e-9))  # 0.29·100 is 28.999999999999996

    def reply(self, shard: Shard) -> Uplink:
        """Move v towards the trained w, and return w."""
        keep = self.most * min(1.0, int(self.taken) / self.decided_by_rounds())
        trained = self.net.state_dict()
        found = {
            name: torch.lerp(trained[name], value, keep) if value.is_floating_point() else trained[name]
            for name, value in self.inherited.state_dict().items()
        }
        load(self.inherited, found)
        self.taken += 1
        return super().reply(shard)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of v."""
        return self.inherited(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of w."""
        return self.net(inputs)
