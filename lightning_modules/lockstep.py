"""Clients of one architecture trained together: their values stacked, their objective vectorised over the stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.loop import batch_indices
from lightning_modules.phases import Phase, Stage
from lightning_modules.tracing import TracedStep
from pflsim.data.federated import Examples

FEWEST = 4
"""A stack of a size that takes fewer steps in a stage than this is not worth a trace: its clients train one by one."""

MOST = 100
"""Traces that are kept."""


@dataclass(slots=True)
class Trainee:
    """A client about to train.

    Args:
        values: all of its parameters and buffers by name, those held for the round too; new values come out here.
        pool: examples of several clients, on the module's device.
        first, count: where its own lie in the pool.
        order: decides the order of its examples.
        stages: its schedule.
    """

    values: dict[str, Tensor]
    pool: Examples
    first: int
    count: int
    order: torch.Generator
    stages: tuple[Stage, ...]
    taken: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> object:
        """What trainees must have in common to be stacked."""
        return self.stages, tuple((name, value.shape, value.dtype) for name, value in self.values.items())

    @property
    def losses(self) -> dict[str, float]:
        """The mean over its mini-batches of every named loss term."""
        return {name: float(total) / self.counts[name] for name, total in self.sums.items()}


class Lockstep:
    """Trains stacks of clients, each with its own examples, order of examples and number of batches.

    Equal to `loop.train` for each of them but for rounding. The clients with the most batches come first in a stack, so
    that those which have finished leave at its end. The full batches of a stack are one traced step; a batch of another
    size is the client's own affair.

    Args:
        module: of the architecture; works for all clients.
    """

    def __init__(self, module: ClientModule):
        self.module = module
        self._traced: dict[object, TracedStep] = {}

    def train(self, trainees: Sequence[Trainee]) -> None:
        """Train clients for a round; those that are alike go together."""
        kinds: dict[object, list[Trainee]] = {}
        for trainee in trainees:
            kinds.setdefault(trainee.kind, []).append(trainee)
        for alike in kinds.values():
            wear(self.module, alike[0].values)
            self.module.train()
            for stage in alike[0].stages:
                self._stage(stage, alike)
            self.module.zero_grad(set_to_none=True)

    def _stage(self, stage: Stage, trainees: Sequence[Trainee]) -> None:
        size, smallest = self.module.training_settings.batch_size, self.module.smallest_batch
        plans = [list(batch_indices(t.count, stage, size, t.order, smallest)) for t in trainees]
        rows = sorted(range(len(trainees)), key=lambda k: (-sum(len(i) == size for i in plans[k]), k))
        _Stack(self, stage, [trainees[k] for k in rows], [plans[k] for k in rows], size).run()

    def traced(self, phase: Phase, trainable: tuple[str, ...], values: dict[str, Tensor], batch: Batch) -> TracedStep:
        """The step of a phase for values and a batch of these shapes."""
        settings = self.module.training_settings
        key = (phase.objective, trainable, tuple((k, v.shape) for k, v in values.items()), batch[0].shape)
        if key not in self._traced:
            if len(self._traced) == MOST:
                self._traced.clear()
            wear(self.module, {name: value[0] for name, value in values.items()})
            plain = not settings.momentum and not settings.weight_decay
            self._traced[key] = TracedStep(self.module, phase.objective, trainable, values, batch, plain)
        return self._traced[key]


class _Stack:
    """A stage of some clients, the one with the most full batches first; phases are meant by their place in it."""

    def __init__(
        self,
        lockstep: Lockstep,
        stage: Stage,
        trainees: Sequence[Trainee],
        plans: Sequence[Sequence[Tensor]],
        size: int,
    ):
        self.lockstep, self.module, self.phases = lockstep, lockstep.module, stage.phases
        self.trainees, self.plans, self.size = trainees, plans, size
        self.values = {k: torch.stack([t.values[k] for t in trainees]) for k in trainees[0].values}
        self.parts: dict[int, dict[str, Tensor]] = {}
        self.steps: dict[tuple[int, int], TracedStep] = {}
        self.trainable = [phase.trainable.parameters(self.module) for phase in self.phases]
        self.rates = [self.module.learning_rate(phase) for phase in self.phases]
        self.prefixes = [self.module.prefix(phase) for phase in self.phases]
        self.momenta: list[dict[str, Tensor]] = [{} for _ in self.phases]
        if self.module.training_settings.momentum:
            self.momenta = [{k: torch.zeros_like(self.values[k]) for k in names} for names in self.trainable]
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, list[int]] = {}

    def run(self) -> None:
        """Take all steps of the stage, and give the clients their values back."""
        waiting = [iter(plan) for plan in self.plans]
        full = [sum(len(index) == self.size for index in plan) for plan in self.plans]
        for active in range(len(self.trainees), 0, -1):
            done = full[active] if active < len(full) else 0
            ticks = full[active - 1] - done
            for _ in range(ticks):
                indices = [self._next_full(row, waiting[row]) for row in range(active)]
                if ticks >= FEWEST:
                    self._together(indices)
                else:
                    for row, index in enumerate(indices):
                        self._alone(row, index)
        for row, rest in enumerate(waiting):
            for index in rest:
                self._alone(row, index)
        for row, trainee in enumerate(self.trainees):
            trainee.values.update({name: value[row] for name, value in self.values.items()})
            trainee.taken += len(self.plans[row])
            for name, counts in self.counts.items():
                if counts[row]:
                    before = trainee.sums.get(name)
                    trainee.sums[name] = self.sums[name][row] if before is None else before + self.sums[name][row]
                    trainee.counts[name] = trainee.counts.get(name, 0) + counts[row]

    def _next_full(self, row: int, waiting: Iterator[Tensor]) -> Tensor:
        """The client's next full batch; smaller ones before it are dealt with here."""
        for index in waiting:
            if len(index) == self.size:
                return index
            self._alone(row, index)
        raise AssertionError("a client has fewer full batches than were counted")

    def _together(self, indices: Sequence[Tensor]) -> None:
        """All phases on a full batch of the first clients."""
        active, pool = len(indices), self.trainees[0].pool
        starts = torch.tensor([[trainee.first] for trainee in self.trainees[:active]])
        inputs, labels = pool.batch((torch.stack(list(indices)) + starts).flatten())
        batch = inputs.view(active, self.size, *inputs.shape[1:]), labels.view(active, self.size)
        for at, phase in enumerate(self.phases):
            if phase.lockstep:
                self._step_together(at, active, batch)
            else:
                for row in range(active):
                    self._step_alone(at, row, (batch[0][row], batch[1][row]))

    def _alone(self, row: int, index: Tensor) -> None:
        """All phases on a batch of one client."""
        trainee = self.trainees[row]
        batch = trainee.pool.batch(index + trainee.first)
        for at in range(len(self.phases)):
            self._step_alone(at, row, batch)

    def _step_together(self, at: int, active: int, batch: Batch) -> None:
        if active not in self.parts:
            self.parts[active] = {name: value[:active] for name, value in self.values.items()}
        values, momenta = self.parts[active], self.momenta[at]
        if (at, active) not in self.steps:
            self.steps[at, active] = self.lockstep.traced(self.phases[at], self.trainable[at], values, batch)
        step = self.steps[at, active]
        gradients, terms = step(values, batch, self.rates[at])
        if not step.plain:
            moved = [values[name] for name in step.moved]
            self._descend(at, moved, gradients, [momenta[name][:active] for name in step.moved if momenta])
        self._note(at, slice(active), terms)

    def _step_alone(self, at: int, row: int, batch: Batch) -> None:
        phase, momenta = self.phases[at], self.momenta[at]
        wear(self.module, {name: value[row] for name, value in self.values.items()})
        parameters = {name: self.module.get_parameter(name) for name in self.trainable[at]}
        self.module.zero_grad(set_to_none=True)
        terms = self.module.gradients(batch, phase, list(parameters.values()))
        moved = {name: p for name, p in parameters.items() if p.grad is not None}
        gradients = [p.grad for p in moved.values() if p.grad is not None]
        rows = [momenta[name][row] for name in moved if momenta]
        self._descend(at, [p.detach() for p in moved.values()], gradients, rows)
        self._note(at, row, terms)

    def _descend(
        self, at: int, moved: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor]
    ) -> None:
        """A step of SGD as torch.optim.SGD takes it."""
        settings = self.module.training_settings
        with torch.no_grad():
            for number, (parameter, step) in enumerate(zip(moved, gradients, strict=True)):
                if settings.weight_decay:
                    step = step.add(parameter, alpha=settings.weight_decay)
                if momenta:
                    step = momenta[number].mul_(settings.momentum).add_(step)
                parameter.add_(step, alpha=-self.rates[at])

    def _note(self, at: int, rows: int | slice, terms: Terms) -> None:
        """Add loss terms to those of some rows."""
        prefix, everyone = self.prefixes[at], range(len(self.trainees))
        for name, value in terms.items():
            if prefix + name not in self.sums:
                self.sums[prefix + name] = value.new_zeros(len(everyone))
                self.counts[prefix + name] = [0 for _ in everyone]
            self.sums[prefix + name][rows] += value
            for row in everyone[rows] if isinstance(rows, slice) else (rows,):
                self.counts[prefix + name][row] += 1


def wear(module: ClientModule, values: dict[str, Tensor]) -> None:
    """Make tensors the module's parameters and buffers, without copying; what it held for a round goes."""
    module.clear_anchors()
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        if name in parameters:
            parameters[name].data = value
        else:
            owner, _, key = name.rpartition(".")
            part = module.get_submodule(owner)
            if key in part._buffers:
                part._buffers[key] = value
            else:  # of an anchor
                part.register_buffer(key, value, persistent=False)


def worn(module: ClientModule) -> dict[str, Tensor]:
    """Copies of all parameters and buffers of a module, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items()}
