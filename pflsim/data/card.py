"""What was read: a few lines for people, and all columns for records."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Card:
    """What was read; prints as a table.

    Args:
        lines: what, and the figures that its owner knows.
        columns: all columns of a table: name, kind, and more by kind.
    """

    lines: tuple[tuple[str, str], ...] = ()
    columns: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        first = max((len(what) for what, _ in self.lines), default=0) + 2
        cut = (textwrap.shorten(text, WIDTH - first, placeholder=" ...") for _, text in self.lines)
        return "\n".join(f"{what:{first}}{text}" for (what, _), text in zip(self.lines, cut, strict=True))

    __repr__ = __str__

    def record(self) -> dict[str, Any]:
        """Return the content of data_card.json."""
        return {"card": dict(self.lines), "columns": list(self.columns)}
