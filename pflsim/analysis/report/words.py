"""Words that are put together."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.analysis.compare.words import numbers
from pflsim.analysis.report.rows import Value

ROUND = {
    "best_val": "each run's round with the best validation accuracy",
    "last": "the last evaluated round",
    "best_test_oracle": "the round with the best test accuracy",
}


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else ""


def spans(values: Sequence[int]) -> str:
    """Ascending numbers, three or more in sequence as a range: `0–2, 5`."""
    return numbers(values).replace(",", ", ")


def rate(value: Value | float) -> str:
    """A rate in three digits."""
    return f"{value.mean if isinstance(value, Value) else value:.3f}"
