"""Words that are put together."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.report.rows import Value

ROUND = {
    "best_val": "each run's round with the best validation accuracy",
    "last": "the last evaluated round",
    "best_test_oracle": "the round with the best test accuracy",
}


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else ""


def plural(count: int, name: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def spans(values: Sequence[int]) -> str:
    """Ascending numbers, three or more in sequence as a range: `0–2, 5`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def rate(value: Value | float) -> str:
    """A rate in three digits."""
    return f"{value.mean if isinstance(value, Value) else value:.3f}"
