"""The state of a run while it runs, for the live displays of one run and of a sweep."""

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"
MAX_VALUES = 200
"""Values that a display is given; of longer runs every second, third, … one."""


@dataclass(slots=True)
class Status:
    """What is known of a run after its last finished round.

    Args:
        rounds: the planned number.
        round: the last finished one.
        primary: name of the primary metric.
        values: its means over clients on test data, in the order of the evaluated rounds.
        worst: its worst decile in the last of them.
        best, best_round: its mean in the best round so far, and this round; None before the first evaluation.
        by_validation: whether the best round is chosen on validation data, else on test data.
        seconds: mean wall seconds of the last ten rounds of this session.
        up, down: bytes of all clients so far.
    """

    rounds: int
    primary: str
    round: int = 0
    values: list[float] = field(default_factory=list)
    worst: float = math.nan
    best: float | None = None
    best_round: int = 0
    by_validation: bool = False
    seconds: float | None = None
    up: int = 0
    down: int = 0

    @property
    def left(self) -> float | None:
        """The estimated seconds to the end."""
        return None if self.seconds is None else max(self.rounds - self.round, 0) * self.seconds


Watch = Callable[[Status], None]
watching: ContextVar[Watch | None] = ContextVar("watching", default=None)
"""Is called with the status of a run at its start and after each round; the run then prints nothing itself."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as bars between the smallest and the largest; many values as the means of stretches."""
    edges = [n * len(values) // min(width, len(values)) for n in range(min(width, len(values)) + 1)] if values else [0]
    shown = [fmean(values[start:end]) for start, end in pairwise(edges)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    steps = ((value - low) / (high - low or 1.0) * (len(BARS) - 1) for value in shown)
    return "".join(BARS[round(step)] if math.isfinite(step) else " " for step in steps)


def write_status(path: Path, status: Status) -> None:
    """Write a status to a file, for another process; errors of the disk are ignored."""
    step = len(status.values) // MAX_VALUES + 1
    text = json.dumps(asdict(status) | {"values": status.values[::-step][::-1]})
    with suppress(OSError):
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)  # readers see the old or the new one


def read_status(path: Path) -> Status | None:
    """Return what `write_status` has written; None if it has not yet."""
    try:
        return Status(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
