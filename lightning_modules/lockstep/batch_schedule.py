"""Which batches the clients of a stack take together, and which each takes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.base import Batch
from lightning_modules.lockstep.client_training import ClientTraining
from lightning_modules.loop import passes
from lightning_modules.phases import Stage

AHEAD = 2**20
"""Bytes of batches that are gathered at once, at most, but for a single one."""


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """A client's batches of a stage, as rows of the pool.

    Args:
        full: those of the full size, [F, B].
        others: smaller ones (the last of a pass), by the number of full ones before them.
    """

    full: Tensor
    others: Mapping[int, Sequence[Tensor]]

    @property
    def steps(self) -> int:
        """How many batches there are."""
        return len(self.full) + sum(map(len, self.others.values()))


def schedule_batches(member: ClientTraining, stage: Stage, size: int, smallest: int) -> BatchSchedule:
    """Draw a client's order of examples for a stage; see `loop.passes` for size and smallest.

    A client that does a share of its work has the fewer batches, and leaves a stack the earlier.
    """
    full = [torch.empty(0, size, dtype=torch.int64)]
    others: dict[int, list[Tensor]] = {}
    taken = 0
    for order in passes(member.count, stage, size, member.order, smallest, member.work):
        rows, count = order + member.first, len(order) // size
        full.append(rows[: count * size].view(count, size))
        taken += count
        if len(rows) > count * size:
            others.setdefault(taken, []).append(rows[count * size :])
    return BatchSchedule(torch.cat(full), others)


def gathered(
    members: Sequence[ClientTraining], schedules: Sequence[BatchSchedule], first: int, end: int
) -> Iterator[tuple[int, Batch]]:
    """Full batches number `first` to `end` of some clients: each number with inputs [n, B, ...] and labels [n, B].

    Several are taken out of the pool at once.
    """
    pool = members[0].pool
    rows = torch.stack([schedule_batches.full[first:end] for schedule_batches in schedules], dim=1).to(pool.y.device)
    n, size = rows.shape[1:]
    ahead = max(AHEAD // (n * size * pool.x[:1].numel() * 4), 1)
    for chunk, begin in zip(rows.split(ahead), range(first, end, ahead), strict=True):
        inputs, labels = pool.batch(chunk.flatten())
        inputs, labels = inputs.view(len(chunk), n, size, *inputs.shape[1:]), labels.view(len(chunk), n, size)
        for number, batch in enumerate(zip(inputs.unbind(), labels.unbind(), strict=True)):
            yield begin + number, batch
