"""One client's training in a stack, and which batches stacked clients train at the same time."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_modules.base import Batch
from lightning_modules.loop import epoch_orders
from lightning_modules.phases import Stage
from pflsim.data.federated import Examples

PREFETCH_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Maximum size of the batches that are gathered at once, by device; at least one batch is."""


@dataclass(slots=True)
class ClientTraining:
    """A client's state, data and schedule for one round, and the results of its training.

    Args:
        values: all parameters and buffers by name, including anchors; training replaces them by others. They are not
            written to, unless the client trains alone.
        pool: examples of several clients, on the module's device.
        first, count: this client's examples are the rows first .. first + count − 1 of the pool.
        generator: draws the order of its examples.
        stages: its schedule.
        work: train only this share of each stage's batches, in (0, 1]; see `loop.epoch_orders`.
        taken: number of mini-batches so far.
        sums, counts: sum and number of values of each named loss term so far.
    """

    values: dict[str, Tensor]
    pool: Examples
    first: int
    count: int
    generator: torch.Generator
    stages: tuple[Stage, ...]
    work: float = 1.0
    taken: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def stack_key(self) -> object:
        """Clients with equal keys can be stacked: they have the same stages, shapes and dtypes."""
        return self.stages, tuple((name, value.shape, value.dtype) for name, value in self.values.items())


def mean_losses(clients: Collection[ClientTraining]) -> list[dict[str, float]]:
    """Return each client's mean of every named loss term over its mini-batches."""
    sums = [total for client in clients for total in client.sums.values()]
    totals = iter(torch.stack(sums).tolist() if sums else ())  # the device is waited for once
    return [{name: next(totals) / client.counts[name] for name in client.sums} for client in clients]


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive full batches of one client, or a smaller one.

    Args:
        start: number of the stack's step with the first full batch; a smaller batch is trained before this step.
        rows: row numbers of the pool, [batches, batch size].
    """

    start: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Consecutive steps of some clients of a stack with batches of the same size.

    Args:
        clients: ascending positions in the stack.
        rows: row numbers of the pool, [steps, clients, batch size].
    """

    clients: tuple[int, ...]
    rows: Tensor


def schedule_batches(clients: Sequence[ClientTraining], stage: Stage, size: int, smallest: int) -> list[list[Block]]:
    """Draw each client's order of examples for a stage, and choose the step of each batch.

    If the stage has a number of epochs, all clients begin an epoch at the same step, so that the smaller batches at the
    ends of the epochs meet. If it has a number of steps, each client trains without a pause.

    Args:
        clients: the clients of a stack.
        stage: its length in epochs or steps.
        size: the batch size.
        smallest: a last batch with fewer examples is left out.

    Returns:
        The batches of each client in order.
    """
    orders = [
        [c.pool.vary(order + c.first) for order in epoch_orders(c.count, stage, size, c.generator, smallest, c.work)]
        for c in clients
    ]
    longest = max((order.numel() // size for epochs in orders for order in epochs), default=0)
    schedules = []
    for epochs in orders:
        blocks, step = list[Block](), 0
        for order in epochs:
            full, rest = divmod(order.numel(), size)
            end = step + (full if stage.epochs is None else longest)
            if full:
                blocks.append(Block(step, order[: full * size].view(full, size)))
            if rest:
                blocks.append(Block(end, order[None, full * size :]))
            step = end
        schedules.append(blocks)
    return schedules


def step_groups(schedules: Sequence[Sequence[Block]], size: int) -> Iterator[StepGroup]:
    """Yield all steps of a stack in order; clients with batches of the same size at the same time form a group.

    Args:
        schedules: see `schedule_batches`.
        size: of full batches.
    """
    smaller, full = dict[tuple[int, int, int], dict[int, Tensor]](), list[tuple[int, Block]]()
    for client, blocks in enumerate(schedules):
        before = Counter[int]()
        for block in blocks:
            if block.rows.shape[1] < size:
                key = block.start, before[block.start], block.rows.shape[1]
                smaller.setdefault(key, {})[client] = block.rows
                before[block.start] += 1
            else:
                full.append((client, block))
    ends = {block.start + len(block.rows) for _, block in full}
    steps = sorted({at for at, *_ in smaller} | {block.start for _, block in full} | ends)
    waiting = sorted(smaller)
    for begin, end in zip(steps, [*steps[1:], *steps[-1:]], strict=True):
        while waiting and waiting[0][0] == begin:
            yield _group(smaller[waiting.pop(0)])
        active = {c: b.rows[begin - b.start : end - b.start] for c, b in full if b.start <= begin}
        if active := {client: rows for client, rows in active.items() if len(rows)}:
            yield _group(active)


def _group(rows: dict[int, Tensor]) -> StepGroup:
    return StepGroup(tuple(sorted(rows)), torch.stack([rows[client] for client in sorted(rows)], dim=1))


def padded(rows: Tensor, clients: Sequence[int], width: int) -> Tensor:
    """Return row numbers [steps, width, batch size] for the first `width` clients; those not in `clients` get row 0."""
    if len(clients) == width:
        return rows
    found = rows.new_zeros(len(rows), width, rows.shape[2])
    found[:, list(clients)] = rows
    return found


def batches(clients: Sequence[ClientTraining], rows: Tensor) -> Iterator[Batch]:
    """Yield inputs [n, B, ...] and targets [n, B, ...] for row numbers [steps, n, B]. Several are gathered at once."""
    pool = clients[0].pool
    n, size = rows.shape[1:]
    per_chunk = max(PREFETCH_BYTES[pool.y.device.type] // (n * size * pool.x[:1].numel() * 4), 1)
    for chunk in rows.to(pool.y.device).split(per_chunk):
        inputs, labels = pool.batch(chunk.flatten())
        stacked = (part.view(len(chunk), n, size, *part.shape[1:]).unbind() for part in (inputs, labels))
        yield from zip(*stacked, strict=True)
