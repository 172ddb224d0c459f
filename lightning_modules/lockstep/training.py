"""Training clients in lockstep, as stacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule
from lightning_modules.lockstep.batch_schedule import BatchSchedule, full_batches, schedule_batches
from lightning_modules.lockstep.client_training import ClientTraining, LossMeter
from lightning_modules.lockstep.tracing import BoundStep, TracedStep, traced_step
from lightning_modules.lockstep.values import bind_state
from lightning_modules.phases import Stage

ALWAYS_TRACED_CLIENTS, MIN_TRACED_STEPS = 8, 4
"""Up to ALWAYS_TRACED_CLIENTS clients are always trained together. More are only if they take at least MIN_TRACED_STEPS
steps, which pay for the trace. Existing traces do not count: the last bits would depend on earlier rounds."""


class Lockstep:
    """Trains clients as stacks, each client with its own examples, order of examples and number of batches.

    Results equal those of `loop.train` up to rounding. The full batches of a stack are one traced step; a smaller batch
    is trained by its client alone.

    Args:
        module: of the clients' architecture; computes for all of them.
    """

    def __init__(self, module: ClientModule):
        self.module = module
        self.traces: dict[object, TracedStep] = {}

    def train(self, clients: Sequence[ClientTraining]) -> None:
        """Train clients for a round; clients with equal stages and shapes form a stack."""
        stacks: dict[object, list[ClientTraining]] = {}
        for client in clients:
            stacks.setdefault(client.stack_key, []).append(client)
        for stack in stacks.values():
            bind_state(self.module, stack[0].values)
            self.module.train()
            for stage in stack[0].stages:
                self._train_stage(stage, stack)
            self.module.zero_grad(set_to_none=True)

    def _train_stage(self, stage: Stage, clients: Sequence[ClientTraining]) -> None:
        size, smallest = self.module.training_settings.batch_size, self.module.smallest_batch
        schedules = [schedule_batches(client, stage, size, smallest) for client in clients]
        rows = sorted(range(len(clients)), key=lambda k: (-len(schedules[k].full), k))
        Stack(self.module, self.traces, stage, [clients[k] for k in rows], [schedules[k] for k in rows]).run()


class Stack:
    """One stage of a stack of clients.

    Args:
        module: of the clients' architecture.
        traces: the module's traced steps.
        stage: the stage.
        clients: ordered by their number of full batches, most first, so that clients that finish leave at the end.
        schedules: the batches of each client.
    """

    def __init__(
        self,
        module: ClientModule,
        traces: dict[object, TracedStep],
        stage: Stage,
        clients: Sequence[ClientTraining],
        schedules: Sequence[BatchSchedule],
    ):
        self.module, self.traces, self.phases = module, traces, stage.phases
        self.clients, self.schedules = clients, schedules
        self.values = {name: _stacked([client.values[name] for client in clients]) for name in clients[0].values}
        self.steps: dict[tuple[int, int], tuple[TracedStep, BoundStep]] = {}
        self.trainable = [phase.trainable.parameters(module) for phase in self.phases]
        self.rates = [module.learning_rate(phase) for phase in self.phases]
        self.momenta: list[dict[str, Tensor]] = [{} for _ in self.phases]
        if module.training_settings.momentum:
            self.momenta = [{k: torch.zeros_like(self.values[k]) for k in names} for names in self.trainable]
        self.meters = [LossMeter(module.prefix(phase), len(clients)) for phase in self.phases]

    def run(self) -> None:
        """Take all steps of the stage and write the results to the clients."""
        done = 0
        for active in range(len(self.schedules), 0, -1):
            end = len(self.schedules[active - 1].full)
            if end > done:
                self._run_full(active, done, end)
                done = end
        for row, schedule in enumerate(self.schedules):
            for index in schedule.smaller.get(len(schedule.full), ()):
                self._run_smaller(row, index)
        for row, client in enumerate(self.clients):
            client.values.update({name: value[row] for name, value in self.values.items()})
            client.taken += self.schedules[row].steps
            for meter in self.meters:
                meter.add_to(client, row)

    def _run_full(self, active: int, first: int, end: int) -> None:
        """Train the first `active` clients on full batches `first` to `end`, and on smaller batches before each."""
        schedules = self.schedules[:active]
        together = active <= ALWAYS_TRACED_CLIENTS or end - first >= MIN_TRACED_STEPS
        rows_with_smaller: dict[int, list[int]] = {}
        for row, schedule in enumerate(schedules):
            for number in schedule.smaller:
                if first <= number < end:
                    rows_with_smaller.setdefault(number, []).append(row)
        for number, batch in full_batches(self.clients[:active], schedules, first, end):
            for row in rows_with_smaller.get(number, ()):
                for index in schedules[row].smaller[number]:
                    self._run_smaller(row, index)
            for at, phase in enumerate(self.phases):
                if together and phase.lockstep:
                    self._step_together(at, active, batch)
                else:
                    for row in range(active):
                        self._step_alone(at, row, (batch[0][row], batch[1][row]))

    def _run_smaller(self, row: int, index: Tensor) -> None:
        """Take the steps of all phases on a batch of one client."""
        batch = self.clients[row].pool.batch(index)
        for at in range(len(self.phases)):
            self._step_alone(at, row, batch)

    def _step_together(self, at: int, active: int, batch: Batch) -> None:
        """Take the step of phase number `at` with the first `active` clients."""
        if (at, active) not in self.steps:
            values = {name: value[:active] for name, value in self.values.items()}
            traced = traced_step(self.traces, self.module, self.phases[at], self.trainable[at], values, batch)
            self.steps[at, active] = traced, traced.bind(values)
        traced, step = self.steps[at, active]
        gradients, terms = step(batch, self.rates[at])
        if gradients:
            moved, momenta = [self.values[name][:active] for name in traced.moved], self.momenta[at]
            self._descend(at, moved, gradients, [momenta[name][:active] for name in traced.moved if momenta])
        self.meters[at].add_stacked(active, traced.terms, terms)

    def _step_alone(self, at: int, row: int, batch: Batch) -> None:
        """Take the step of phase number `at` with one client."""
        phase, momenta = self.phases[at], self.momenta[at]
        bind_state(self.module, {name: value[row] for name, value in self.values.items()})
        parameters = {name: self.module.get_parameter(name) for name in self.trainable[at]}
        self.module.zero_grad(set_to_none=True)
        terms = self.module.gradients(batch, phase, list(parameters.values()))
        moved = {name: p for name, p in parameters.items() if p.grad is not None}
        gradients = [p.grad for p in moved.values() if p.grad is not None]
        rows = [momenta[name][row] for name in moved if momenta]
        self._descend(at, [p.detach() for p in moved.values()], gradients, rows)
        self.meters[at].add_single(row, terms)

    def _descend(
        self, at: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor]
    ) -> None:
        """Update parameters as torch.optim.SGD does."""
        settings = self.module.training_settings
        with torch.no_grad():
            for number, (parameter, step) in enumerate(zip(parameters, gradients, strict=True)):
                if settings.weight_decay:
                    step = step.add(parameter, alpha=settings.weight_decay)
                if momenta:
                    step = momenta[number].mul_(settings.momentum).add_(step)
                parameter.add_(step, alpha=-self.rates[at])


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Stack the clients' values along a new first axis and keep their strides; a single value is not copied."""
    if len(values) == 1:
        return values[0][None]
    like, n = values[0], len(values)
    # torch.stack would change the strides, and with them the last bits of later results
    memory = like.new_empty(n * like.numel())
    stacked = memory.as_strided((n, *like.shape), (like.numel(), *like.stride()))
    for row, value in zip(stacked, values, strict=True):
        row.copy_(value)
    return stacked
