"""A stage of some clients together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule
from lightning_modules.lockstep.batch_schedule import BatchSchedule, gathered
from lightning_modules.lockstep.client_training import ClientTraining
from lightning_modules.lockstep.loss_meter import LossMeter
from lightning_modules.lockstep.traces import Traces
from lightning_modules.lockstep.tracing import Step, TracedStep
from lightning_modules.lockstep.values import bind_state
from lightning_modules.phases import Stage

FEW, FEWEST = 8, 4
"""A trace is made for every number of clients up to FEW, and for more only if they take FEWEST steps together. What has
been traced before does not count: it would make the last bits depend on who lives where."""


class Stack:
    """A stage of some clients, the one with the most full batches first; phases are meant by their place in it."""

    def __init__(
        self,
        module: ClientModule,
        traces: Traces,
        stage: Stage,
        members: Sequence[ClientTraining],
        schedules: Sequence[BatchSchedule],
    ):
        self.module, self.traces, self.phases = module, traces, stage.phases
        self.members, self.schedules = members, schedules
        self.values = {name: _stacked([t.values[name] for t in members]) for name in members[0].values}
        self.steps: dict[tuple[int, int], tuple[TracedStep, Step]] = {}
        self.trainable = [phase.trainable.parameters(module) for phase in self.phases]
        self.rates = [module.learning_rate(phase) for phase in self.phases]
        self.momenta: list[dict[str, Tensor]] = [{} for _ in self.phases]
        if module.training_settings.momentum:
            self.momenta = [{k: torch.zeros_like(self.values[k]) for k in names} for names in self.trainable]
        self.notes = [LossMeter(module.prefix(phase), len(members)) for phase in self.phases]

    def run(self) -> None:
        """Take all steps of the stage, and give the clients their values back."""
        done = 0
        for active in range(len(self.schedules), 0, -1):
            end = len(self.schedules[active - 1].full)
            if end > done:
                self._stretch(active, done, end)
                done = end
        for row, schedule_batches in enumerate(self.schedules):
            for index in schedule_batches.others.get(len(schedule_batches.full), ()):
                self._alone(row, index)
        for row, member in enumerate(self.members):
            member.values.update({name: value[row] for name, value in self.values.items()})
            member.taken += self.schedules[row].steps
            for notes in self.notes:
                notes.hand_over(row, member)

    def _stretch(self, active: int, first: int, end: int) -> None:
        """Full batches number `first` to `end` of the first clients, and the smaller ones before each of them."""
        schedules, together = self.schedules[:active], active <= FEW or end - first >= FEWEST
        smaller: dict[int, list[int]] = {}
        for row, schedule_batches in enumerate(schedules):
            for number in schedule_batches.others:
                if first <= number < end:
                    smaller.setdefault(number, []).append(row)
        for number, batch in gathered(self.members[:active], schedules, first, end):
            for row in smaller.get(number, ()):
                for index in schedules[row].others[number]:
                    self._alone(row, index)
            for at, phase in enumerate(self.phases):
                if together and phase.lockstep:
                    self._step_together(at, active, batch)
                else:
                    for row in range(active):
                        self._step_alone(at, row, (batch[0][row], batch[1][row]))

    def _alone(self, row: int, index: Tensor) -> None:
        """All phases on a batch of one client."""
        batch = self.members[row].pool.batch(index)
        for at in range(len(self.phases)):
            self._step_alone(at, row, batch)

    def _step_together(self, at: int, active: int, batch: Batch) -> None:
        if (at, active) not in self.steps:
            values = {name: value[:active] for name, value in self.values.items()}
            traced = self.traces.of(self.phases[at], self.trainable[at], values, batch)
            self.steps[at, active] = traced, traced.bind(values)
        traced, step = self.steps[at, active]
        gradients, terms = step(batch, self.rates[at])
        if gradients:
            moved, momenta = [self.values[name][:active] for name in traced.moved], self.momenta[at]
            self._descend(at, moved, gradients, [momenta[name][:active] for name in traced.moved if momenta])
        self.notes[at].together(active, traced.terms, terms)

    def _step_alone(self, at: int, row: int, batch: Batch) -> None:
        phase, momenta = self.phases[at], self.momenta[at]
        bind_state(self.module, {name: value[row] for name, value in self.values.items()})
        parameters = {name: self.module.get_parameter(name) for name in self.trainable[at]}
        self.module.zero_grad(set_to_none=True)
        terms = self.module.gradients(batch, phase, list(parameters.values()))
        moved = {name: p for name, p in parameters.items() if p.grad is not None}
        gradients = [p.grad for p in moved.values() if p.grad is not None]
        rows = [momenta[name][row] for name in moved if momenta]
        self._descend(at, [p.detach() for p in moved.values()], gradients, rows)
        self.notes[at].alone(row, terms)

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


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Values of clients with the clients' axis first, each as it lay in memory; one client's stays where it is."""
    if len(values) == 1:
        return values[0][None]
    like, n = values[0], len(values)
    # torch.stack would lay them out anew, and what follows would depend on who trained here before.
    memory = like.new_empty(n * like.numel())
    stacked = memory.as_strided((n, *like.shape), (like.numel(), *like.stride()))
    for row, value in zip(stacked, values, strict=True):
        row.copy_(value)
    return stacked
