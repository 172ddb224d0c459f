"""The figures of a group of runs: of one model, in one round of each run, over the group's seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from pflsim.analysis.results import Run
from pflsim.analysis.results.groups import Group
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import Model, Phase
from pflsim.run_folder.summary import Choice

STATS = ("mean", "worst_decile", "median", "best_decile", "std")
"""Columns of `pflsim.run_folder.metrics.AccuracyStats` that a table shows."""


@dataclass(frozen=True, slots=True)
class Value:
    """A figure over seeds: their mean and sample standard deviation, which one seed alone has none of."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a group came to.

    Args:
        group: the runs.
        model, phase: which model, and when in the round it was judged.
        rounds: the round of every run that the figures are of, in the order of the seeds.
        stats: test accuracy over clients, by the names in `STATS`.
        up, down: bytes of all clients up to that round.
        up_total, down_total: bytes of all rounds.
        seconds: wall seconds of the rounds up to that one.
        seconds_total: of the run, its start included; of one that was killed, its rounds at least.
    """

    group: Group
    model: Model
    phase: Phase
    rounds: tuple[int, ...]
    stats: dict[str, Value]
    up: Value
    down: Value
    up_total: Value
    down_total: Value
    seconds: Value
    seconds_total: Value

    @property
    def bytes(self) -> float:
        """Both ways, up to the round."""
        return self.up.mean + self.down.mean


def row_of(group: Group, choice: Choice, model: Model | None = None) -> Row | None:
    """The figures of a group; None where one of its runs has no such round, or no such model."""
    lines = [(run, run.at(choice, model)) for run in group.runs]
    found = [(run, line) for run, line in lines if line is not None]
    if not found or len(found) < len(lines):
        return None
    scope = found[0][0].reported if model is None else found[0][0].scope(model)
    stats = [line.accuracy[run.reported if model is None else run.scope(model)] for run, line in found]

    def over(figure: Callable[[Run, RoundMetrics], float]) -> Value:
        return value_of([figure(run, line) for run, line in found])

    return Row(
        group=group,
        model=scope.model,
        phase=scope.phase,
        rounds=tuple(line.round for _, line in found),
        stats={name: value_of([getattr(each, name) for each in stats]) for name in STATS},
        up=over(lambda _, line: line.traffic_total.up_bytes),
        down=over(lambda _, line: line.traffic_total.down_bytes),
        up_total=over(lambda run, _: run.history[-1].traffic_total.up_bytes),
        down_total=over(lambda run, _: run.history[-1].traffic_total.down_bytes),
        seconds=over(lambda run, line: sum(x.total_seconds for x in run.history if x.round <= line.round)),
        seconds_total=over(lambda run, _: max(run.summary["seconds"], sum(x.total_seconds for x in run.history))),
    )


def value_of(numbers: Sequence[float]) -> Value:
    """Mean and sample standard deviation of one number per seed."""
    return Value(fmean(numbers), stdev(numbers) if len(numbers) > 1 and all(map(math.isfinite, numbers)) else None)
