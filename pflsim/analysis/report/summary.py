"""The sentences at the top of a report."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.rows import TOLERANCE, Row
from pflsim.analysis.compare.words import listed
from pflsim.terminal.formats import format_bytes

MAX_NAMES = 5
"""Longer lists of methods are replaced by their number."""


def sentences(comparison: Comparison) -> list[str]:
    """Return the main results in at most three sentences."""
    rows = comparison.rows
    if len(rows) == 1:
        (row,) = rows
        mean, worst, sent = row.stats["mean"].mean, row.stats["worst_decile"].mean, format_bytes(_bytes(row))
        return [f"Mean test accuracy {mean:.3f}, worst decile {worst:.3f}, {sent} of traffic up to that round."]
    said = [f"Highest mean accuracy: {_best(rows, 'mean')}. Highest worst decile: {_best(rows, 'worst_decile')}."]
    if comparison.differences:
        clear = [(d.group.label, d.mean or 0.0) for d in comparison.differences if d.clear]
        parts = {
            "clearly higher for": [label for label, mean in clear if mean > 0],
            "clearly lower for": [label for label, mean in clear if mean < 0],
            "not clear for": [d.group.label for d in comparison.differences if not d.clear],
        }
        text = "; ".join(f"{what} {_names(labels)}" for what, labels in parts.items() if labels)
        said.append(f"Mean accuracy compared with {comparison.reference.label}: {text}.")
    least, most = min(rows, key=_bytes), max(rows, key=_bytes)
    low, high = (f"{format_bytes(_bytes(row))} ({row.group.label})" for row in (least, most))
    return [*said, f"Traffic up to these rounds: from {low} to {high}."]


def _bytes(row: Row) -> float:
    return row.bytes_then.mean if row.bytes_then else 0.0


def _best(rows: Sequence[Row], figure: str) -> str:
    best = max(row.stats[figure].mean for row in rows)
    return f"{_names([row.group.label for row in rows if best - row.stats[figure].mean < TOLERANCE])} ({best:.3f})"


def _names(labels: Sequence[str]) -> str:
    return listed(labels) if len(labels) <= MAX_NAMES else f"{len(labels)} methods"
