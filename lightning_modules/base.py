"""The client: a LightningModule that says what it shares, how it trains, what it replies and what it is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import update_bn

from lightning_modules.anchor import Anchor
from lightning_modules.losses import cross_entropy
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule, Stage, stages
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Shard
from pflsim.messages import Message, Uplink
from pflsim.params import NET, Selector, UnitKind, load, snapshot, units
from pflsim.types import Tensors, Unit

Batch = tuple[Tensor, Tensor]
"""Inputs [B, ...] and labels [B]."""
Terms = dict[str, Tensor]
"""Named scalar loss terms; their sum is what is minimised."""


@dataclass(frozen=True, slots=True)
class Step:
    """A phase made ready: the parameters that move and the optimiser that moves them.

    `prefix` goes before the names of its loss terms: the phase's name, where there are several phases.
    """

    phase: Phase
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    prefix: str = ""


class ClientModule(LightningModule):
    """One client's model with its objective. As it stands: plain SGD on the whole net, everything shared.

    A method overrides what differs: `shared`, `schedule`, `objective` (or others that its phases name), `receive`,
    `reply`, `predict`. Whatever a client keeps between rounds is a parameter or a persistent buffer: the state_dict is
    the whole private state. What it keeps for one round only goes into an `Anchor`.

    Args:
        net: body and head.
        training: the run's local training settings.
    """

    shared: Selector = NET
    """Which parameters and buffers the server hears of; set in `__init__` where a setting decides it."""
    reported_model: ClassVar[Literal["personal", "global"]] = "personal"
    """The model the method's paper reports: each client's own, or the server's."""
    reported_phase: ClassVar[Literal["trained", "received"]] = "trained"
    """When a personal model is judged: after local training, or as the server sent it."""

    compares_features: ClassVar[bool] = False
    """Whether features of different clients meet, so that they need the same shape."""
    needs_validation: ClassVar[bool] = False
    """Whether every client must have validation examples."""
    lockstep: ClassVar[bool] = False
    """Whether clients may train together, their values stacked: every objective is then a function of the batch and of
    parameters and buffers alone, without decisions by their values, and what `receive` and `adopt` leave behind is all
    in parameters and buffers."""
    extra_on_cpu: ClassVar[bool] = False
    """Whether the extra tensors of a downlink stay on the CPU: they are more than a device should hold."""

    def __init__(self, net: Net, training: Training):
        super().__init__()
        self.automatic_optimization = False  # several optimisers may take turns on one batch
        self.net = net
        self.training_settings = training
        self.round_number = 1
        self._steps: list[list[Step]] = []
        self._anchors: list[Anchor] | None = None

    # What a method may override ------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """The phases of a round."""
        return (Phase(),)

    def objective(self, batch: Batch) -> Terms:
        """Named loss terms of a batch."""
        inputs, labels = batch
        return {"ce": cross_entropy(self.net(inputs), labels)}

    def receive(self, downlink: Message) -> None:
        """Take in what the server sent, before local training, also into the anchors that are for it."""
        load(self, downlink.weights)
        for anchor in self.anchors():
            anchor.take(downlink.weights)

    def join(self, downlink: Message) -> None:
        """Take in the first message of a client that was not in the training; by default as any other message."""
        self.receive(downlink)

    def replaces_body(self, downlink: Message) -> bool:
        """Whether the message that was just received has replaced parameters of the net's body, so that running
        statistics are no longer of it; a head alone moves none.
        """
        return any(name.startswith("net.body.") for name in downlink.weights)

    def before_training(self, shard: Shard) -> None:
        """Bring what was received together with the client's own data, before local training; by default nothing."""

    def reply(self, shard: Shard) -> Uplink:
        """What goes to the server after local training: by default the shared tensors."""
        return Uplink(weights=self.shared_tensors(), client=shard.client, num_examples=shard.num_examples)

    def before_evaluation(self, shard: Shard) -> None:
        """What the client does with its training data before its personal model is judged; by default nothing.

        It works on a copy: all changes are forgotten after the evaluation.
        """

    def predict(self, inputs: Tensor) -> Tensor:
        """Scores [B, C] of the model this client is judged by."""
        return self.net(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Scores [B, C] of the server's model, whose values are loaded; for methods whose `predict` is of another."""
        return self.predict(inputs)

    def plain_net(self, model: Literal["personal", "global"]) -> Net | None:
        """The network whose scores alone make the prediction, so that it is the whole model; None: it takes more.

        By default the net, where the method predicts by nothing else. It only matters for what is exported.
        """
        own = type(self)
        by_the_net = own.predict is ClientModule.predict and (
            model == "personal" or own.predict_global is ClientModule.predict_global
        )
        return self.net if by_the_net else None

    def gradients(self, batch: Batch, phase: Phase, parameters: Sequence[nn.Parameter]) -> Terms:
        """Leave the gradient of a step in `.grad` of the parameters and return the loss terms for the log.

        The one hook for what is no gradient of a single objective (inner steps, two-point gradients).
        """
        terms: Terms = getattr(self, phase.objective)(batch)
        torch.stack(list(terms.values())).sum().backward(inputs=list(parameters))
        return {name: value.detach().clone() for name, value in terms.items()}  # before the step, if it is a parameter

    # What every method has -----------------------------------------------------------------------------------------

    def shared_parameters(self) -> tuple[str, ...]:
        """State_dict keys of the parameters that travel."""
        return self.shared.parameters(self)

    def shared_buffers(self) -> tuple[str, ...]:
        """State_dict keys of the running statistics that travel: none unless buffers are aggregated."""
        return self.shared.buffers(self) if self.training_settings.buffers == "aggregate" else ()

    def shared_tensors(self) -> Tensors:
        """Copies of everything that travels."""
        own = self.state_dict(keep_vars=True)
        return snapshot({key: own[key] for key in self.shared_parameters() + self.shared_buffers()})

    def layout(self, by: UnitKind) -> tuple[Unit, ...]:
        """The fusion units of what travels, in the order of the forward pass."""
        return units(self, self.shared_parameters(), self.shared_buffers(), by)

    def clear_anchors(self) -> None:
        """Forget what was held for one round only, so that nothing passes from one client to the next."""
        for anchor in self.anchors():
            anchor.clear()

    def anchors(self) -> list[Anchor]:
        """What can be held for one round."""
        if self._anchors is None:  # asked for several times for every client and round
            self._anchors = [part for part in self.modules() if isinstance(part, Anchor)]
        return self._anchors

    def recalibrate(self, examples: Examples, batch_size: int = 256) -> None:
        """Measure the net's running statistics of batch normalisation anew, in one pass over the training examples."""
        n = len(examples)
        passes = -(-n // batch_size)
        if n:  # every so-many-th row: batches of one size, as each counts the same, and of all classes
            update_bn((examples.batch(torch.arange(first, n, passes)) for first in range(passes)), self.net)

    @property
    def smallest_batch(self) -> int:
        """Fewest examples in a training batch: batch normalisation in the net cannot measure the variance of one."""
        return 2 if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.net.modules()) else 1

    def stages(self) -> tuple[Stage, ...]:
        """The schedule, laid out with the run's numbers."""
        return stages(self.schedule(), self.training_settings)

    def step_of(self, phase: Phase) -> Step:
        """Make a phase ready, with a fresh optimiser at this round's learning rate."""
        settings, lr = self.training_settings, self.learning_rate(phase)
        parameters = [self.get_parameter(name) for name in phase.trainable.parameters(self)]
        optimizer = SGD(parameters, lr, settings.momentum, weight_decay=settings.weight_decay, fused=True)
        return Step(phase, parameters, optimizer, self.prefix(phase))

    def learning_rate(self, phase: Phase) -> float:
        """A phase's learning rate in this round."""
        settings = self.training_settings
        return (settings.lr if phase.lr is None else phase.lr) * settings.lr_decay ** (self.round_number - 1)

    def prefix(self, phase: Phase) -> str:
        """What goes before the names of a phase's loss terms: its name, where there are several phases."""
        several = len({p.name for stage in self.stages() for p in stage.phases}) > 1
        return f"{phase.name}/" if several else ""

    def optimise(self, batch: Batch, step: Step) -> Terms:
        """One optimiser step on one batch; returns the loss terms before it."""
        step.optimizer.zero_grad()
        terms = self.gradients(batch, step.phase, step.parameters)
        step.optimizer.step()
        return {step.prefix + name: value for name, value in terms.items()}

    # Lightning's side of it ----------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor) -> Tensor:
        """The same as `predict`."""
        return self.predict(inputs)

    def configure_optimizers(self) -> list[Optimizer]:
        """One optimiser per phase, in the order of the stages."""
        self._steps = [[self.step_of(phase) for phase in stage.phases] for stage in self.stages()]
        return [step.optimizer for steps in self._steps for step in steps]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """The steps that are due on this batch, under a `lightning.Trainer`."""
        for step in self._due(batch_idx):
            for name, value in self.optimise(batch, step).items():
                self.log(f"train/{name}", value, batch_size=len(batch[1]))

    def _due(self, batch_idx: int) -> list[Step]:
        """The steps of the stage that the Trainer has come to, with the Trainer's own optimisers.

        Stages are counted in passes over the loader, or in batches where their length is given in steps.
        """
        per_epoch = int(self.trainer.num_training_batches)
        wrapped = self.optimizers()
        wrapped = wrapped if isinstance(wrapped, list) else [wrapped]
        seen, first = self.trainer.current_epoch * per_epoch + batch_idx, 0
        for stage, steps in zip(self.stages(), self._steps, strict=True):
            length = stage.steps if stage.steps is not None else (stage.epochs or 0) * per_epoch
            if seen < length:
                mine = wrapped[first : first + len(steps)]
                return [replace(s, optimizer=o) for s, o in zip(steps, mine, strict=True)]
            seen, first = seen - length, first + len(steps)
        return []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of the judged model."""
        inputs, labels = batch
        scores = self.predict(inputs)
        self.log("val/loss", cross_entropy(scores, labels), batch_size=len(labels))
        self.log("val/accuracy", (scores.argmax(1) == labels).float().mean(), batch_size=len(labels))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Scores [B, C] for a batch."""
        return self.predict(batch[0])
