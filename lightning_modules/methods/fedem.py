"""FedEM: every client is a mixture of common models, with weights of its own."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Annotated, Literal, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import example_losses
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.params import Selector
from pflsim.servers.ifca import permuted
from pflsim.tasks.task import in_float32
from pflsim.types import ModelKind, Tensors

MODELS = Selector(("net", "others"))
Few = Annotated[int, Ge(1), Le(100)]


class FedEM(ClientModule):
    """Trains M shared models on the examples that they explain, and mixes them with private weights π_i (Marfoq 2021).

        E: q_bm ∝ π_im · exp(−ℓ(h_m(x_b), y_b)) with Σ_m q_bm = 1,  π_im ← mean of q_bm over the training examples
        M: steps on Σ_m 1/B · Σ_b q_bm · ℓ(h_m(x_b), y_b)

    ℓ is the cross-entropy. The E step runs on the received models, in evaluation mode, and its q holds for the whole
    round. All models are shared and averaged as in FedAvg. Reported model: log Σ_m π_im · softmax(h_m(x)), as received,
    after an E step; the global model has equal weights.

    Args:
        net: body and head of h_1.
        training: the run's local training settings.
        components: M, the number of models; 1 is FedAvg.
        e_steps: E steps at the start of a round, one after another.
        differ: in what the models differ at first: "net", all tensors, or "head", those of the classifier.

    Notes:
        h_1 starts with the run's initial values, and each other model with the same values, permuted within each
        tensor. Equal models would stay equal. q is computed again for each mini-batch from the received models and the
        weights before the last E step, so examples that `augment` varies have the q of their variants. A client that
        joins later starts with equal weights.

    Raises:
        SettingsError: the run's loss is not the plain cross-entropy, or all models are equal at first.
    """

    lockstep = True
    shared = MODELS
    reported_phase = "received"
    needs_classes = True
    mixture: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        components: Few = 3,
        e_steps: Few = 1,
        differ: Literal["net", "head"] = "net",
    ):
        super().__init__(net, training)
        if training.task.name == "classification" and training.task.loss is not None:
            raise SettingsError(
                "method=fedem needs cross-entropy; leave task.loss, its options, label smoothing and class weights out"
            )
        self.e_steps, self.received = e_steps, Anchor()
        self.others = nn.ModuleList(deepcopy(net) for _ in range(components - 1))
        self.register_buffer("mixture", torch.full((components,), 1 / components))
        for other in self.others:
            for parameter in other.get_submodule("head" if differ == "head" else "").parameters():
                parameter.data = permuted(parameter.data)
            pairs = zip(net.parameters(), other.parameters(), strict=True)
            if all(torch.equal(first, second) for first, second in pairs):
                raise SettingsError(f"method.differ={differ}: all models would be equal, and stay so; freeze less")

    def schedule(self) -> Schedule:
        """Return one phase that trains all models."""
        return (Phase(trainable=MODELS),)

    def measured(self, model: ModelKind) -> tuple[nn.Module, ...]:
        """Return all models."""
        return (self.net, *self.others)

    def losses(self, batch: Batch, values: Tensors | None = None) -> Tensor:
        """Return the cross-entropy [M, B] of each model and example, with these values in place of the models' own."""
        inputs, labels = batch
        return torch.stack([example_losses(scores, labels) for scores in self.outputs(inputs, values or {})])

    def outputs(self, inputs: Tensor, values: Tensors) -> Iterator[Tensor]:
        """Yield the scores [B, C] of each model."""
        for name, net in (("net", cast(nn.Module, self.net)), *self.others.named_children()):
            prefix = "net." if net is self.net else f"others.{name}."
            own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            yield functional_call(net, own, (inputs,)) if own else net(inputs)

    @staticmethod
    def shares(losses: Tensor, mixture: Tensor) -> Tensor:
        """Return q [M, B] from the losses [M, B] and π [M]; a model whose weight is 0 has share 0."""
        return torch.softmax(mixture.log()[:, None] - losses, 0)

    def before_training(self, shard: Shard) -> None:
        """Take the E steps with the received models, and keep these and the π of the last one for the objective."""
        self.recalibrate(shard.train)
        before = self.mixture.clone()
        with torch.no_grad(), evaluating(self), self.autocast():
            for _ in range(self.e_steps):
                before.copy_(self.mixture)
                batches = shard.train.in_turn(256)
                sums = [self.shares(self.losses(batch), before).double().sum(1) for batch in batches]
                self.mixture.copy_(torch.stack(sums).sum(0) / shard.num_examples)
        state, names = self.state_dict(keep_vars=True), (*MODELS.parameters(self), *MODELS.buffers(self))
        self.received.store({"mixture": before} | {name: state[name] for name in names})

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of all models, each example weighted by its share of the model."""
        received = self.received.tensors
        with torch.no_grad(), evaluating(self):
            shares = self.shares(self.losses(batch, received), received["mixture"])
        return {self.loss_name: (shares * self.losses(batch)).sum(0).mean()}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the logarithms of the mixture's probabilities."""
        return self.mixed(inputs, self.mixture)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return those of the mixture with equal weights."""
        return self.mixed(inputs, torch.full_like(self.mixture, 1 / len(self.mixture)))

    def mixed(self, inputs: Tensor, mixture: Tensor) -> Tensor:
        """Return log Σ_m π_m · softmax(h_m(x)), [B, C]."""
        found = torch.stack([in_float32(scores).log_softmax(1) for scores in self.outputs(inputs, {})])
        return (mixture.log()[:, None, None] + found).logsumexp(0)
