"""The client: a LightningModule that defines what it shares, how it trains and which model it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import update_bn

from lightning_modules.anchor import Anchor, NamedTensors
from lightning_modules.losses import mean_loss
from lightning_modules.nets.frozen import Frozen, named
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.optimizers import KeptOptimizers, OptimizerChoice
from lightning_modules.phases import Phase, Schedule, Stage, masked, stages
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.params import NET, NOTHING, Selector, UnitKind, load, snapshot, units
from pflsim.servers.base import Federation
from pflsim.tasks.task import Criterion, in_float32
from pflsim.types import ClientInfo, ModelKind, Tensors, Unit

Batch = tuple[Tensor, Tensor]
"""Inputs [B, ...] and targets: classes [B], or values or labels [B, T]."""
Terms = dict[str, Tensor]
"""Named scalar loss terms; training minimises their sum."""
Evaluation = tuple[Terms, Sequence[Tensor | None]]
"""Loss terms and gradients; None for a parameter that the loss does not depend on."""
Evaluate = Callable[[Sequence[Tensor], slice], Evaluation]


def averaged(parts: Iterable[tuple[Evaluation, float]]) -> Evaluation:
    """Return the weighted sum of the loss terms and gradients of several mini-batches."""
    terms, gradients = Terms(), list[Tensor | None]()
    for (found, slopes), share in parts:
        terms = {name: value.detach() * share + terms.get(name, 0) for name, value in found.items()}
        scaled = [None if slope is None else slope * share for slope in slopes]
        pairs = zip(gradients or [None] * len(scaled), scaled, strict=True)
        gradients = [new if old is None else old if new is None else old.add_(new) for old, new in pairs]
    return terms, gradients


@dataclass(frozen=True, slots=True)
class Step:
    """A phase with its parameters and its optimiser.

    Args:
        phase: the phase.
        parameters: the parameters that it trains.
        optimizer: over these parameters.
        prefix: of its loss terms in the log; the phase's name where the schedule has several phases.
        masks: parameters with their masks, see `Phase.mask`.
    """

    phase: Phase
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    prefix: str = ""
    masks: Sequence[tuple[nn.Parameter, Tensor]] = ()


class ClientModule(LightningModule):
    """Base class for the client side of all methods.

    The base class trains the whole net by plain SGD and shares all of it, as FedAvg does. A method is a subclass that
    overrides what differs. Most methods need only these:

    - `shared`: which parameters are sent to the server.
    - `schedule`: what is trained, in which order, for how long.
    - `objective`: the loss terms of a batch.
    - `receive` and `reply`: how downlinks are read and uplinks are written.
    - `predict`: the scores of the reported model.

    One module serves many clients in turn. Each client's private state is the `state_dict`: whatever a client keeps
    between rounds must be a parameter or a persistent buffer. Tensors for one round only go into an `Anchor`.

    Args:
        net: body and head.
        training: local training settings of the run.

    Example:
        >>> class FedProx(ClientModule):
        ...     def __init__(self, net: Net, training: Training, *, mu: float = 0.001):
        ...         super().__init__(net, training)
        ...         self.mu, self.received = mu, Anchor(self.shared_parameters())
        ...
        ...     def objective(self, batch: Batch) -> Terms:
        ...         return {**super().objective(batch), "prox": proximal(self.received.pairs(self), self.mu)}
    """

    shared: Selector = NET
    """Parameters and buffers that travel. Set it in `__init__` if a setting decides it."""
    equal_start: Selector = NOTHING
    """Parameters and buffers that do not travel but start with the same values, for `init=per_client` too."""
    reported_model: ClassVar[Literal["personal", "global"]] = "personal"
    """Model that the method reports: each client's own ("personal") or the server's ("global")."""
    reported_phase: ClassVar[Literal["trained", "received"]] = "trained"
    """When a personal model is evaluated: after local training, or as received."""

    shares_statistics: ClassVar[bool] = True
    """Whether the running statistics of shared layers travel, with `buffers=aggregate`."""
    compares_features: ClassVar[bool] = False
    """Whether features of different clients are compared, and therefore need one shape."""
    needs_classes: ClassVar[bool] = False
    """Whether the method needs one class per example and one score per class, for example for class means."""
    token_targets: ClassVar[bool] = False
    """Whether the method works with scores and targets of each token, as task=language_model has them. A class says so
    for itself, and not for its subclasses."""
    needs_validation: bool | str = False
    """Whether every client needs validation examples; a text says how the method does without."""
    common_net: ClassVar[bool] = False
    """Whether `__init__` has a keyword `common`, which is no setting: a net of the architecture `model.common` with the
    same initial values for all clients. See `lightning_modules.common_net.CommonNet`."""
    lockstep: bool = False
    """Whether clients may be stacked and trained together. Requires that every objective is a function of the batch,
    the parameters and the buffers only, without control flow on their values, and that `receive` and `before_training`
    store everything in parameters and buffers."""
    private_steps: bool = False
    """Whether local training uses the client's examples only through the gradients of objectives on a batch, so that
    privacy=example protects them. A class sets it for itself, and not for its subclasses."""
    extra_on_cpu: ClassVar[bool] = False
    """Whether the `extra` tensors of a downlink stay on the CPU, for messages too large for the device."""

    base_attributes: ClassVar[frozenset[str]] = frozenset(vars(LightningModule())) | {
        "training_settings", "kept_optimizers", "round_number", "steps_taken", "_steps", "_anchors",
        "constant_buffers", "second_names",
    }  # fmt: skip
    """Attributes that Lightning or the simulator may change."""

    def __init__(self, net: Net, training: Training):
        super().__init__()
        self.automatic_optimization = False  # several optimisers may step on one batch
        self.net = net
        self.criterion = Criterion(training.task)
        self.training_settings = training
        self.round_number = 1
        self.steps_taken = 0
        self._steps: list[list[Step]] = []
        self.kept_optimizers: KeptOptimizers | None = None
        self.constant_buffers: frozenset[str] = frozenset()
        self.second_names: Mapping[str, str] = {}  # see `pflsim.params.second_names`
        self._anchors: list[Anchor] | None = None

    # Hooks that a method may override ------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Return the phases of a round.

        Default: one phase that trains the whole net.
        """
        return (Phase(),)

    def objective(self, batch: Batch) -> Terms:
        """Return the named loss terms of a batch; their sum is minimised.

        A phase may name another method as its objective.

        Args:
            batch: inputs [B, ...] and targets [B] or [B, T].
        """
        inputs, targets = batch
        return {self.loss_name: self.task_loss(self.net(inputs), targets)}

    def task_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch; every objective takes its prediction loss from here.

        Default: the run's `task.loss`.

        Args:
            scores: outputs of the net, [B, C], or [B, T] for T values or labels.
            targets: classes [B] int64, or [B, T] float32.
        """
        return self.criterion(scores, targets)

    def head_objective(self, batch: Batch) -> Terms:
        """Return the task's loss on features of the fixed body, for phases that train the head alone."""
        inputs, targets = batch
        with torch.no_grad(), evaluating(self.net.body):
            features = self.net.body(inputs)
        return {self.loss_name: self.task_loss(self.net.head(features), targets)}

    def receive(self, downlink: Message) -> None:
        """Read the server's message before local training.

        Default: load the weights, and store in each `Anchor` the values that it names.
        """
        load(self, downlink.weights)
        for anchor in self.anchors():
            anchor.store_received(downlink.weights)

    def join(self, downlink: Message) -> None:
        """Read the first message of a newcomer, a client that was held out of training.

        Default: `receive`.
        """
        self.receive(downlink)

    def replaces_body(self, downlink: Message) -> bool:
        """Return whether `receive` replaced parameters of the net's body by this message.

        If so, `buffers=recalibrate` measures the running statistics again. Override it if `receive` does not load the
        weights into the net.
        """
        return any(name.startswith("net.body.") for name in downlink.weights)

    def before_training(self, shard: Shard) -> None:
        """Prepare local training after `receive`, with access to the client's data.

        Default: do nothing.
        """

    def reply(self, shard: Shard) -> Uplink:
        """Return the message to the server after local training; the module is in evaluation mode.

        `steps_taken` is the number of optimiser steps of local training. Default: the shared tensors.
        """
        return Uplink(weights=self.shared_tensors(), client=shard.client, num_examples=shard.weight)

    def survey(self, shard: Shard) -> Uplink:
        """Return the reply outside of local training: in the initial round, and before rounds with a survey.

        All changes are discarded afterwards. Default: `reply`.
        """
        return self.reply(shard)

    def before_evaluation(self, shard: Shard) -> None:
        """Adapt the personal model before it is evaluated.

        All changes are discarded after the evaluation. Default: do nothing.
        """

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores [B, C] of the client's reported model."""
        return self.net(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores [B, C] of the server's model, whose weights are loaded.

        Default: `predict`. Override it if `predict` uses another model of the client.
        """
        return self.predict(inputs)

    def gradients(self, evaluate: Evaluate, values: Sequence[Tensor], size: int) -> Evaluation:
        """Return the loss terms and the gradients of one step.

        Default: those of the phase's objective on the mini-batch. Override it for steps that are not the gradient of
        one objective, such as inner steps or finite differences.

        Args:
            evaluate: maps values of the trained parameters, and rows of the mini-batch, to loss terms and gradients.
            values: of the trained parameters, before the step.
            size: number of examples in the mini-batch.
        """
        return evaluate(values, slice(size))

    def decided_by_rounds(self) -> object:
        """Return what the number of rounds of the run decides about its rounds, such as the end of a schedule.

        A run is extended only where this does not change. Default: nothing.
        """
        return None

    # For methods and the simulator ---------------------------------------------------------------------------------

    def shared_parameters(self) -> tuple[str, ...]:
        """Return the state_dict keys of the parameters that travel."""
        return self.shared.parameters(self)

    def shared_buffers(self) -> tuple[str, ...]:
        """Return the state_dict keys of the buffers that travel; empty unless `buffers=aggregate`.

        Buffers of the net that training does not change are equal everywhere and do not travel.
        """
        aggregated = self.shares_statistics and self.training_settings.buffers == "aggregate"
        chosen = self.shared.buffers(self) if aggregated else ()
        return tuple(key for key in chosen if key not in self.constant_buffers)

    def shared_tensors(self) -> Tensors:
        """Return copies of all shared parameters and buffers by state_dict key."""
        state = self.state_dict(keep_vars=True)
        return snapshot({key: state[key] for key in self.shared_parameters() + self.shared_buffers()})

    def layout(self, by: UnitKind) -> tuple[Unit, ...]:
        """Return the fusion units of the shared tensors, in the order of the forward pass."""
        return units(self, self.shared_parameters(), self.shared_buffers(), by)

    def federation(self, sizes: Sequence[int]) -> Federation:
        """Return what the server knows before the first round; the module has its initial values.

        Args:
            sizes: number of training examples of each client.
        """
        return Federation(
            clients=tuple(ClientInfo(client, size) for client, size in enumerate(sizes)),
            initial=self.shared_tensors(),
            layouts={unit: self.layout(unit) for unit in ("module", "tensor", "model")},
            seed=self.training_settings.seed,
            rounds=self.training_settings.rounds,
            num_classes=self.net.num_classes,
            feature_width=self.net.feature_width,
            head=deepcopy(self.net.head),
        )

    def adapts(self, model: Literal["personal", "global"]) -> bool:
        """Return whether an evaluation adapts this model to the client's examples before it predicts."""
        cls, received = type(self), model == "global" or self.reported_phase == "received"
        overridden = cls.before_evaluation is not ClientModule.before_evaluation or (
            received and cls.before_training is not ClientModule.before_training
        )
        recalibrated = received and self.training_settings.buffers == "recalibrate"
        return recalibrated or (model == "personal" and overridden)

    def clear_anchors(self) -> None:
        """Clear all anchors. Called before each client, so that nothing leaks from one client to the next."""
        for anchor in self.anchors():
            anchor.clear()

    def anchors(self) -> list[Anchor]:
        """Return all `Anchor` submodules."""
        if self._anchors is None:  # called several times per client and round
            self._anchors = [module for module in self.modules() if isinstance(module, Anchor)]
        return self._anchors

    def recalibrate(self, examples: Examples, model: ModelKind = "personal", batch_size: int = 256) -> None:
        """With `buffers=recalibrate`, measure the running statistics of batch normalisation again.

        Args:
            examples: the training examples, for one pass.
            model: which model predicts next, if they share a net.
            batch_size: most examples per forward pass.
        """
        n = len(examples)
        batches = -(-n // batch_size)
        if n and self.training_settings.buffers == "recalibrate":
            for net in self.measured(model):
                # strided batches have equal sizes, since all count the same, and a mix of classes
                update_bn((examples.batch(torch.arange(first, n, batches)) for first in range(batches)), net)

    def measured(self, model: ModelKind) -> tuple[nn.Module, ...]:
        """Return the nets whose running statistics `recalibrate` measures before this model predicts."""
        return (self.net,)

    def load_model(self, weights: Tensors, shard: Shard) -> None:
        """Load weights; with `buffers=recalibrate`, measure running statistics on the client's training examples."""
        load(self, weights)
        self.recalibrate(shard.train)

    def training_loss(self, weights: Tensors, shard: Shard) -> float:
        """Load weights and return the net's mean loss on the training examples; infinite if it diverged."""
        self.load_model(weights, shard)
        loss = mean_loss(self.net, shard.train, self.criterion)
        return loss if math.isfinite(loss) else math.inf

    @property
    def loss_name(self) -> str:
        """The name of the task's loss among the terms of an objective: "ce" for cross-entropy, else "loss"."""
        return self.criterion.term

    @property
    def smallest_batch(self) -> int:
        """Minimum number of examples per training batch: 2 with batch normalisation, else 1."""
        parts = (part for net in self.measured("personal") for part in net.modules())
        return 2 if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts) else 1

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the schedule, with the run's lengths filled in."""
        return stages(self.schedule(), self.training_settings)

    def make_step(self, phase: Phase) -> Step:
        """Return a phase's step, with a new optimiser at this round's learning rate."""
        names = phase.trainable.parameters(self)
        parameters = [self.get_parameter(name) for name in names]
        if not parameters:
            method, under = self.training_settings.method, ", ".join(phase.trainable.under)
            raise SettingsError(
                f"method={method} trains {under} in phase {phase.name}, where "
                "the model has no parameters, or frozen ones only; use another model, or freeze less"
            )
        choice = OptimizerChoice() if phase.plain else self.training_settings.optimizer
        lr = self.learning_rate(phase)
        groups = choice.groups(dict(zip(names, parameters, strict=True)), self.rate_factors(choice.parts), lr)
        optimizer = choice.make(groups, lr, *self.momentum_and_decay(phase))
        phases = self.kept_phases()
        if self.kept_optimizers is not None and phase in phases:  # others are trained outside the schedule
            self.kept_optimizers.restore(phases.index(phase), optimizer)
        masks = [(self.get_parameter(name), mask) for name, mask in self.masks_of(phase).items() if name in names]
        return Step(phase, parameters, optimizer, self.prefix(phase), masks)

    def rate_factors(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the factors of the learning rates of `optimizer.parts` by parameter.

        A pattern names parameters of every net of the module, or a part of the module, such as a second net.

        Raises:
            SettingsError: a pattern names neither a part of the client's net nor one of the module.
        """
        found: dict[str, float] = {}
        nets = [(path, part) for path, part in self.named_modules() if isinstance(part, Net)] if parts else ()
        for pattern, factor in parts.items():
            beside = [name for name, _ in self.named_parameters() if name.startswith(f"{pattern}.")]
            found |= dict.fromkeys(beside, factor)
            for path, net in nets:
                names = dict(net.named_parameters())
                with suppress(*(() if net is self.net and not beside else (SettingsError,))):
                    chosen = named(net, [pattern.removeprefix("net.")], names, "optimizer.parts")
                    found |= {f"{path}.{name}": factor for name in chosen}
        return found

    def masks_of(self, phase: Phase) -> dict[str, Tensor]:
        """Return the masks of a phase by parameter."""
        found = self.get_submodule(phase.mask)
        return found.tensors if isinstance(found, NamedTensors) else {}

    def keep_optimizers(self) -> None:
        """With `optimizer.keep=true`, add buffers for the states of the optimisers; called once after `__init__`."""
        if self.training_settings.optimizer.keep:
            self.kept_optimizers = KeptOptimizers([self.make_step(phase).optimizer for phase in self.kept_phases()])

    def store_optimizer(self, step: Step) -> None:
        """Keep the state of a step's optimiser until the next round, if the run does."""
        if self.kept_optimizers is not None and not step.phase.plain:
            self.kept_optimizers.store(self.kept_phases().index(step.phase), step.optimizer)

    def kept_phases(self) -> list[Phase]:
        """Return the phases whose optimisers `optimizer.keep=true` keeps, in the same order in every round.

        Default: those of the schedule. Override it if the schedule depends on the round.
        """
        phases = (phase for stage in self.stages() for phase in stage.phases)
        return list(dict.fromkeys(phase for phase in phases if not phase.plain))

    def learning_rate(self, phase: Phase) -> float:
        """Return a phase's learning rate in this round."""
        settings = self.training_settings
        first = settings.lr if phase.lr is None else phase.lr
        return first if phase.plain else first * settings.lr_factor(self.round_number)

    def momentum_and_decay(self, phase: Phase) -> tuple[float, float]:
        """Return a phase's momentum and weight decay."""
        settings = self.training_settings
        return (0.0, 0.0) if phase.plain else (settings.momentum, settings.weight_decay)

    def prefix(self, phase: Phase) -> str:
        """Return the prefix of a phase's loss terms: `<phase>/` if the schedule has several phases, else empty."""
        several = len({p.name for stage in self.stages() for p in stage.phases}) > 1
        return f"{phase.name}/" if several else ""

    def autocast(self) -> torch.autocast:
        """Return the context in which scores and gradients are computed; bfloat16 with `precision=bf16`."""
        on = self.training_settings.precision == "bf16"
        # parameters change in place, so that a cache of their bfloat16 copies would be out of date
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on, cache_enabled=False)

    def compute_gradients(self, batch: Batch, phase: Phase, parameters: Sequence[nn.Parameter]) -> Terms:
        """Store the gradients of a phase's step in its parameters' `.grad`, and return the loss terms for the log."""
        (inputs, labels), start = batch, [p.detach() for p in parameters]

        def evaluate(values: Sequence[Tensor], rows: slice) -> Evaluation:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data = value
            if self.training_settings.accumulate_grad_batches == 1:
                return one(rows)
            chosen, size = range(len(labels))[rows], self.training_settings.batch_size
            parts = [chosen[at : at + size] for at in range(0, len(chosen), size)]
            weights = [int(self.criterion.weight(labels[p.start : p.stop])) for p in parts]
            shares = [weight / max(sum(weights), 1) for weight in weights]
            return averaged((one(slice(p.start, p.stop)), share) for p, share in zip(parts, shares, strict=True))

        def one(rows: slice) -> Evaluation:
            terms: Terms = getattr(self, phase.objective)((inputs[rows], labels[rows]))
            if not isinstance(terms, dict):
                found = type(terms).__name__
                raise TypeError(f"{phase.objective} returned a {found}; expected a dict of named loss terms")
            return terms, torch.autograd.grad(torch.stack(list(terms.values())).sum(), parameters, allow_unused=True)

        terms, gradients = self.gradients(evaluate, start, len(labels))
        for parameter, value, gradient in zip(parameters, start, gradients, strict=True):
            if gradient is not None and gradient.stride() != value.stride():
                gradient = torch.empty_like(value).copy_(gradient)  # fused optimisers assume equal strides
            parameter.data, parameter.grad = value, gradient
        # clone: a term may be a parameter, which the step changes
        return {name: in_float32(value.detach()).clone() for name, value in terms.items()}

    def optimise(self, batch: Batch, step: Step, compute: Callable[..., Terms] | None = None) -> Terms:
        """Take one optimiser step on a batch and return the loss terms before it.

        `compute` takes the place of `compute_gradients`.
        """
        step.optimizer.zero_grad()
        with self.autocast():
            terms = (compute or self.compute_gradients)(batch, step.phase, step.parameters)
        for parameter, mask in step.masks:
            if parameter.grad is not None:
                parameter.grad.mul_(mask)
        if (limit := self.training_settings.clip_grad_norm) is not None and not step.phase.plain:
            nn.utils.clip_grad_norm_(step.parameters, limit)
        with masked(step.masks):
            step.optimizer.step()
        return {step.prefix + name: value for name, value in terms.items()}

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """Return the private state; a tied parameter has its first name only."""
        found = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in self.second_names:
            found.pop(prefix + name, None)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, first in self.second_names.items():
            if prefix + first in state_dict:
                state_dict[prefix + name] = state_dict[prefix + first]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # LightningModule interface -------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClientModule:
        """Move or convert all tensors; frozen ones in place, as parameters, so that copies of the net share them."""

        def convert(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, Frozen):
                return fn(tensor)
            tensor.data = fn(tensor.data)
            return tensor

        return super()._apply(convert, recurse)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores that the outputs of `predict` stand for: one for each class, or values in their unit."""
        return self.criterion.scores(self.predict(inputs))

    def configure_optimizers(self) -> list[Optimizer]:
        """Return one optimiser per phase, in the order of the stages."""
        self._steps = [[self.make_step(phase) for phase in stage.phases] for stage in self.stages()]
        return [step.optimizer for steps in self._steps for step in steps]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Take the steps of the current stage on a batch, under a `lightning.Trainer`."""
        for step in self._current_steps(batch_idx):
            for name, value in self.optimise(batch, step).items():
                self.log(f"train/{name}", value, batch_size=len(batch[1]))

    def _current_steps(self, batch_idx: int) -> list[Step]:
        """Return the steps of the Trainer's current stage, with the Trainer's own optimisers."""
        per_epoch = int(self.trainer.num_training_batches)
        wrapped = self.optimizers()
        wrapped = wrapped if isinstance(wrapped, list) else [wrapped]
        seen, first = self.trainer.current_epoch * per_epoch + batch_idx, 0
        for stage, steps in zip(self.stages(), self._steps, strict=True):
            length = stage.steps if stage.steps is not None else (stage.epochs or 0) * per_epoch
            if seen < length:
                optimizers = wrapped[first : first + len(steps)]
                return [replace(s, optimizer=o) for s, o in zip(steps, optimizers, strict=True)]
            seen, first = seen - length, first + len(steps)
        return []
