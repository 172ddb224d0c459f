"""Loss terms of a phase, added up client by client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_modules.base import Terms
from lightning_modules.lockstep.client_training import ClientTraining

KEPT = 64
"""Steps whose terms are kept before they are added up: one operation for all of them instead of one each."""


class LossMeter:
    """Sums of the named loss terms of a stack of clients.

    Args:
        prefix: goes before the names.
        clients: of the stack.
    """

    def __init__(self, prefix: str, clients: int):
        self.prefix, self.clients = prefix, clients
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, list[int]] = {}
        self._names: Sequence[str] = ()
        self._active = 0
        self._kept: list[Sequence[Tensor]] = []

    def together(self, active: int, names: Sequence[str], terms: Sequence[Tensor]) -> None:
        """A step of the first clients: terms [active] each, or scalars of a single client."""
        if active != self._active or len(self._kept) == KEPT:
            self._add_up()
        self._active, self._names = active, names
        self._kept.append(terms)

    def alone(self, row: int, terms: Terms) -> None:
        """A step of one client."""
        for name, value in terms.items():
            self._add(name, range(row, row + 1), value, 1)

    def hand_over(self, row: int, member: ClientTraining) -> None:
        """Add a client's sums to those of its earlier stages."""
        self._add_up()
        for name, counts in self.counts.items():
            if counts[row]:
                before = member.sums.get(self.prefix + name)
                sums = self.sums[name][row]
                member.sums[self.prefix + name] = sums if before is None else before + sums
                member.counts[self.prefix + name] = member.counts.get(self.prefix + name, 0) + counts[row]

    def _add_up(self) -> None:
        for name, values in zip(self._names, zip(*self._kept, strict=True), strict=False):
            self._add(name, range(self._active), torch.stack(values).sum(0), len(values))
        self._kept = []

    def _add(self, name: str, rows: range, value: Tensor, count: int) -> None:
        if name not in self.sums:
            self.sums[name] = value.new_zeros(self.clients)
            self.counts[name] = [0] * self.clients
        self.sums[name][rows.start : rows.stop] += value
        for row in rows:
            self.counts[name][row] += count
