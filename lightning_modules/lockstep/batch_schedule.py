"""Which batches stacked clients train together, and which each trains alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.base import Batch
from lightning_modules.lockstep.client_training import ClientTraining
from lightning_modules.loop import epoch_orders
from lightning_modules.phases import Stage

PREFETCH_BYTES = 2**20
"""Maximum size of the batches that are gathered at once; at least one batch is."""


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """A client's batches of a stage, as row numbers of the pool.

    Args:
        full: batches of the full size, [F, B].
        smaller: smaller batches (the last of an epoch), by the number of full batches before them.
    """

    full: Tensor
    smaller: Mapping[int, Sequence[Tensor]]

    @property
    def steps(self) -> int:
        """Number of batches."""
        return len(self.full) + sum(map(len, self.smaller.values()))


def schedule_batches(client: ClientTraining, stage: Stage, size: int, smallest: int) -> BatchSchedule:
    """Draw a client's order of examples for a stage; see `loop.epoch_orders` for the arguments."""
    full = [torch.empty(0, size, dtype=torch.int64)]
    smaller: dict[int, list[Tensor]] = {}
    before = 0
    for order in epoch_orders(client.count, stage, size, client.generator, smallest, client.work):
        rows, count = order + client.first, len(order) // size
        full.append(rows[: count * size].view(count, size))
        before += count
        if len(rows) > count * size:
            smaller.setdefault(before, []).append(rows[count * size :])
    return BatchSchedule(torch.cat(full), smaller)


def full_batches(
    clients: Sequence[ClientTraining], schedules: Sequence[BatchSchedule], first: int, end: int
) -> Iterator[tuple[int, Batch]]:
    """Yield the numbers `first` to `end` of the clients' full batches, with inputs [n, B, ...] and labels [n, B].

    Several batches are gathered from the pool at once.
    """
    pool = clients[0].pool
    rows = torch.stack([schedule.full[first:end] for schedule in schedules], dim=1).to(pool.y.device)
    n, size = rows.shape[1:]
    per_chunk = max(PREFETCH_BYTES // (n * size * pool.x[:1].numel() * 4), 1)
    for chunk, begin in zip(rows.split(per_chunk), range(first, end, per_chunk), strict=True):
        inputs, labels = pool.batch(chunk.flatten())
        inputs, labels = inputs.view(len(chunk), n, size, *inputs.shape[1:]), labels.view(len(chunk), n, size)
        for number, batch in enumerate(zip(inputs.unbind(), labels.unbind(), strict=True)):
            yield begin + number, batch
