"""Training clients in lockstep, as stacks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.lockstep.batch_schedule import (
    ClientTraining,
    StepGroup,
    batches,
    padded,
    schedule_batches,
    step_groups,
)
from lightning_modules.lockstep.replay import CHUNK, ReplayedStep
from lightning_modules.lockstep.tracing import BoundStep, TracedStep, bind_state
from lightning_modules.lockstep.updates import Update
from lightning_modules.phases import Stage, masked
from pflsim.types import Tensors

KEPT_MEMORIES = 8
"""Stacks whose tensors, and with them CUDA graphs, are kept from round to round."""
MIN_GROUP = 4
"""Clients whose smaller batches have the same size train them together if they are at least this many. Fewer do not pay
for the trace. Existing traces do not count: the last bits would depend on earlier rounds."""
FLUSH_STEPS = 64
"""Steps whose loss terms are kept before they are summed, in one operation instead of one per step."""
MAX_TRACES = 500
"""Number of traces at which a cache of them is cleared."""


class LossMeter:
    """Sums the named loss terms of one phase for each client of a stack.

    Args:
        prefix: prepended to the names of the terms.
        clients: number of clients.
    """

    def __init__(self, prefix: str, clients: int):
        self.prefix, self.clients = prefix, clients
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, list[int]] = {}
        self._names: Sequence[str] = ()
        self._members: tuple[int, ...] = ()
        self._pending: list[Sequence[Tensor]] = []

    def add_stacked(self, members: tuple[int, ...], names: Sequence[str], terms: Sequence[Tensor]) -> None:
        """Add a step of some clients.

        Args:
            members: rows of the clients; the terms of other rows are ignored.
            names: of the terms.
            terms: [rows], or scalars if there is one row.
        """
        if members != self._members or len(self._pending) == FLUSH_STEPS:
            self._flush()
        self._members, self._names = members, names
        self._pending.append(terms)

    def add_single(self, row: int, terms: Terms) -> None:
        """Add a step of one client."""
        for name, value in terms.items():
            self._add(name, (row,), value[None], 1)

    def add_to(self, client: ClientTraining, row: int) -> None:
        """Add the sums of row `row` to those of a client's earlier stages."""
        self._flush()
        for name, counts in self.counts.items():
            if counts[row]:
                before = client.sums.get(self.prefix + name)
                sums = self.sums[name][row]
                client.sums[self.prefix + name] = sums if before is None else before + sums
                client.counts[self.prefix + name] = client.counts.get(self.prefix + name, 0) + counts[row]

    def _flush(self) -> None:
        for name, values in zip(self._names, zip(*self._pending, strict=True), strict=False):
            total = torch.stack(values).sum(0).reshape(-1)
            self._add(name, self._members, total[_index(self._members)], len(values))
        self._pending = []

    def _add(self, name: str, members: Sequence[int], values: Tensor, count: int) -> None:
        if name not in self.sums:
            self.sums[name] = values.new_zeros(self.clients)
            self.counts[name] = [0] * self.clients
        self.sums[name][_index(members)] += values
        for row in members:
            self.counts[name][row] += count


def _index(rows: Sequence[int]) -> list[int] | slice:
    """Return an index of these ascending rows; a slice for the first ones, which needs no copy to a GPU."""
    return slice(len(rows)) if rows[-1] == len(rows) - 1 else list(rows)


class Lockstep:
    """Trains clients as stacks, each client with its own examples, order of examples and number of batches.

    Results equal those of `loop.train` up to rounding. Batches of the same size are one traced step.

    Args:
        module: of the clients' architecture; computes for all of them.
        replay: whether steps are replayed, see `ReplayedStep`. Values of stacks then stay at their addresses from round
            to round. None: on GPUs, where starting an operation takes longer than the operation.
    """

    def __init__(self, module: ClientModule, replay: bool | None = None):
        self.module = module
        self.replay = module.device.type == "cuda" if replay is None else replay
        self.traces: dict[object, TracedStep] = {}
        self.memories: dict[object, StackMemory] = {}

    def train(self, clients: Sequence[ClientTraining]) -> None:
        """Train clients for a round; clients with equal stages and shapes form a stack."""
        stacks: dict[object, list[ClientTraining]] = {}
        for client in clients:
            stacks.setdefault(client.stack_key, []).append(client)
        for stack in stacks.values():
            self.module.train()
            for stage in stack[0].stages:
                self._train_stage(stage, stack)
            self.module.zero_grad(set_to_none=True)

    def _train_stage(self, stage: Stage, clients: Sequence[ClientTraining]) -> None:
        size, smallest = self.module.training_settings.batch_size, self.module.smallest_batch
        schedules = schedule_batches(clients, stage, size, smallest)
        steps = [sum(len(block.rows) for block in blocks) for blocks in schedules]
        order = sorted(range(len(clients)), key=lambda k: (-steps[k], k))
        stack = Stack(self, stage, [clients[k] for k in order])
        for group in step_groups([schedules[k] for k in order], size):
            stack.train(group)
        stack.finish()
        for client, taken in zip(clients, steps, strict=True):
            client.taken += taken


@dataclass(slots=True)
class StackMemory:
    """The tensors of a stack, and what is bound to their addresses.

    Args:
        values: parameters and buffers by name, [clients, ...].
        optimizers: the state of each phase's optimiser, by name.
        steps: bound steps by phase, width and batch size.
        replayed: replayed steps by width and batch size, with the optimisers and the examples that they contain.
    """

    values: Tensors
    optimizers: list[Tensors]
    steps: dict[tuple[int, int, int], tuple[TracedStep, BoundStep]] = field(default_factory=dict)
    replayed: dict[torch.Size, tuple[list[object], Tensor, ReplayedStep]] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [*self.values.values(), *(tensor for state in self.optimizers for tensor in state.values())]


class Stack:
    """One stage of a stack of clients.

    Clients that wait or have finished keep their row of the stack: steps are computed for the first `width` rows, where
    only the full width and powers of two occur. So there are few traces. The values of a client that is not part of a
    step are kept apart, since its row changes.

    Args:
        lockstep: has the module, its traced steps and the memory of earlier stacks.
        stage: the stage.
        clients: those with the most steps first, so that clients that finish leave at the end.
    """

    def __init__(self, lockstep: Lockstep, stage: Stage, clients: Sequence[ClientTraining]):
        module, self.lockstep = lockstep.module, lockstep
        self.module, self.phases, self.clients = module, stage.phases, clients
        self.trainable = [phase.trainable.parameters(module) for phase in self.phases]
        self.updates = [Update(module, phase) for phase in self.phases]
        self.memory = self._memory(stage)
        self.values = self.memory.values
        bind_state(module, {name: value[0] for name, value in self.values.items()})
        self.masks = [
            {name: f"{phase.mask}.{name.replace('.', '/')}" for name in module.masks_of(phase) if name in names}
            for phase, names in zip(self.phases, self.trainable, strict=True)
        ]
        """For each phase, the names of masks by parameter."""
        self.meters = [LossMeter(module.prefix(phase), len(clients)) for phase in self.phases]
        self.kept: dict[int, tuple[list[Tensor], int]] = {}
        """For clients that are not in their row: values and optimiser states of several, and the place among them."""

    def _memory(self, stage: Stage) -> StackMemory:
        """Return memory that holds the clients' values."""
        memories, given = self.lockstep.memories, self.clients[0].values
        pool = id(self.clients[0].pool.x)  # replayed steps read the examples of one stack
        key = stage, pool, len(self.clients), tuple((k, v.shape, v.stride(), v.dtype) for k, v in given.items())
        if key not in memories:
            device = self.module.device
            values = {name: stacked([client.values[name] for client in self.clients], device) for name in given}
            pairs = zip(self.updates, self.trainable, strict=True)
            memory = StackMemory(values, [update.state_of(values, names) for update, names in pairs])
            if self.lockstep.replay:
                if len(memories) == KEPT_MEMORIES:
                    memories.pop(next(iter(memories)))
                memories[key] = memory
            return memory
        memory = memories[key]
        for name, value in memory.values.items():
            rows = [client.values[name] for client in self.clients]
            before = rows[0].untyped_storage().data_ptr() == value.untyped_storage().data_ptr()  # of an equal stage
            _filled(value, [row.clone() for row in rows] if before else rows)
        for state in memory.optimizers:
            for tensor in state.values():
                tensor.zero_()
        return memory

    def train(self, group: StepGroup) -> None:
        """Take the steps of some clients, all phases on each batch."""
        full = group.rows.shape[2] == self.module.training_settings.batch_size
        together = full or len(group.clients) >= MIN_GROUP
        width = min(len(self.clients), 1 << group.clients[-1].bit_length()) if together else 0
        self._put_back(group.clients)
        self._keep([row for row in range(width) if row not in group.clients])
        rows = padded(group.rows, group.clients, width) if together else group.rows
        if together and self.lockstep.replay and all(phase.lockstep for phase in self.phases):
            self._replay(group.clients, rows)
            return
        for inputs, labels in batches(self.clients, rows):
            for at, phase in enumerate(self.phases):
                if together and phase.lockstep:
                    self.meters[at].add_stacked(group.clients, *self._step_together(at, (inputs, labels)))
                else:
                    for place, row in enumerate(group.clients):
                        one = row if together else place
                        self._step_alone(at, row, (inputs[one], labels[one]))

    def finish(self) -> None:
        """Write the results to the clients."""
        self._put_back(tuple(self.kept))
        rows = {name: value.unbind() for name, value in self.values.items()}
        for row, client in enumerate(self.clients):
            client.values.update({name: found[row] for name, found in rows.items()})
            for meter in self.meters:
                meter.add_to(client, row)

    def _keep(self, rows: Sequence[int]) -> None:
        """Copy the values of clients whose rows are about to change without them."""
        if new := [row for row in rows if row not in self.kept]:
            at = torch.tensor(new, device=self.module.device)
            values = [tensor.index_select(0, at) for tensor in self.memory.tensors()]
            self.kept.update((row, (values, place)) for place, row in enumerate(new))

    def _put_back(self, rows: Sequence[int]) -> None:
        together: dict[int, list[int]] = {}
        for row in rows:
            if row in self.kept:
                together.setdefault(id(self.kept[row][0]), []).append(row)
        for some in together.values():
            values = self.kept[some[0]][0]
            at, places = torch.tensor([some, [self.kept.pop(row)[1] for row in some]], device=self.module.device)
            for tensor, value in zip(self.memory.tensors(), values, strict=True):
                tensor.index_copy_(0, at, value.index_select(0, places))

    def _replay(self, clients: tuple[int, ...], rows: Tensor) -> None:
        """Take steps [steps, width, batch size] of all phases with the first rows."""
        shape, pool = rows.shape[1:], self.clients[0].pool
        width, size = shape
        updates, examples, replayed = self.memory.replayed.get(shape, (None, None, None))
        keys = [update.key() for update in self.updates]
        if replayed is None or updates != keys or examples is not pool.x:

            def step(batch: Batch) -> list[Tensor]:
                results = [self._step_together(at, batch) for at in range(len(self.phases))]
                return [term for _, terms in results for term in terms]

            replayed = ReplayedStep(step, pool, self.memory.tensors(), shape)
            self.memory.replayed[shape] = keys, pool.x, replayed
        names = [self.memory.steps[at, width, size][0].terms for at in range(len(self.phases))]
        for chunk in rows.split(CHUNK):
            for terms in replayed.run(chunk).unbind():
                first = 0
                for meter, own in zip(self.meters, names, strict=True):
                    meter.add_stacked(clients, own, terms[first : first + len(own)].unbind())
                    first += len(own)

    def _step_together(self, at: int, batch: Batch) -> tuple[Sequence[str], Sequence[Tensor]]:
        """Take the step of phase number `at` with the first rows, one for each part of the batch.

        Returns:
            The names of the loss terms, and the terms.
        """
        width, size = batch[1].shape[:2]
        steps = self.memory.steps
        if (at, width, size) not in steps:
            values = {name: value[:width] for name, value in self.values.items()}
            traced = self._traced(at, values, batch)
            steps[at, width, size] = traced, traced.bind(values)
        traced, step = steps[at, width, size]
        with masked(self._masks(at, slice(width)).values()):
            gradients, terms = step(batch, self.updates[at].rate)
            if gradients:
                moved, state = {name: self.values[name][:width] for name in traced.moved}, self.memory.optimizers[at]
                if width == 1:  # these gradients have no client axis
                    gradients = [gradient[None] for gradient in gradients]
                gradients = self._masked(at, slice(width), moved, gradients)
                self.updates[at].apply(moved, gradients, lambda name: state[name][:width], stacked=True)
        return traced.terms, terms

    def _masks(self, at: int, rows: slice | int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the parameters of phase number `at` that have masks, with them, by name."""
        return {name: (self.values[name][rows], self.values[key][rows]) for name, key in self.masks[at].items()}

    def _masked(self, at: int, rows: slice | int, names: Iterable[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of these parameters, which are 0 where their mask is."""
        masks = self._masks(at, rows)
        pairs = zip(names, gradients, strict=True)
        return [gradient * masks[name][1] if name in masks else gradient for name, gradient in pairs]

    def _traced(self, at: int, values: Tensors, batch: Batch) -> TracedStep:
        """Return the step of phase number `at` for values [n, ...] and a batch [n, B, ...] of these shapes."""
        traces, phase, plain = self.lockstep.traces, self.phases[at], self.updates[at].plain
        strides = tuple((name, value.shape, value.stride()) for name, value in values.items())
        key = phase.objective, plain, self.trainable[at], strides, batch[0].shape
        if key not in traces:
            if len(traces) == MAX_TRACES:
                traces.clear()
            bind_state(self.module, {name: value[0] for name, value in values.items()})
            with self.module.autocast():
                traces[key] = TracedStep(
                    self.module, phase.objective, self.trainable[at], values, batch, plain, self.module.gradients
                )
        return traces[key]

    def _step_alone(self, at: int, row: int, batch: Batch) -> None:
        """Take the step of phase number `at` with one client."""
        phase, state = self.phases[at], self.memory.optimizers[at]
        bound = bind_state(self.module, {name: value[row] for name, value in self.values.items()})
        parameters = {name: bound[name] for name in self.trainable[at]}
        with self.module.autocast():
            terms = self.module.compute_gradients(batch, phase, list(parameters.values()))
        moved = {name: p.detach() for name, p in parameters.items() if p.grad is not None}
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        with masked(self._masks(at, row).values()):
            gradients = self._masked(at, row, moved, gradients)
            self.updates[at].apply(moved, gradients, lambda name: state[name][row], stacked=False)
        self.meters[at].add_single(row, terms)


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy the clients' values to a device along a new first axis, with the strides of the first one.

    A single value that is there is not copied.
    """
    if len(values) == 1 and values[0].device == device:
        return values[0][None]
    like, n = values[0], len(values)
    # torch.stack alone would change the strides, and with them the last bits of later results
    memory = torch.empty(n * like.numel(), dtype=like.dtype, device=device)
    return _filled(memory.as_strided((n, *like.shape), (like.numel(), *like.stride())), values)


def _filled(memory: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Copy values of one shape to the rows of a tensor, and return it."""
    devices = {value.device for value in values}
    if devices == {memory.device}:
        return torch.stack(list(values), out=memory)
    if len(devices) == 1:
        return memory.copy_(torch.stack(list(values)))
    for row, value in zip(memory, values, strict=True):
        row.copy_(value)
    return memory
