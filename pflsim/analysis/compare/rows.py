"""What a group of runs came to, over its seeds. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pflsim.analysis.results import Group, Run
from pflsim.errors import SettingsError
from pflsim.run_folder.accounting import Traffic
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import Scope
from pflsim.run_folder.summary import Choice

SLACK = 1e-9
"""A mean of rates may be so far from what it would be without rounding."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of every seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds (n − 1); None with one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, slots=True)
class Row:
    """A group's figures, of the model that its method is judged by, on test data.

    Args:
        group: what it is about.
        judged: that model, and when it is judged.
        rounds: the round of every seed that figures are taken from; empty where a run has none, and then so are they.
        accuracy: mean over clients.
        worst_decile: mean of the worst tenth of the clients.
        best_decile: mean of the best tenth.
        bytes_then: up and down, all clients, until that round.
        bytes_total: the same of the whole run.
        reached: how many seeds reach the target.
        rounds_to_target: the first evaluated round whose accuracy is at least the target; None where a seed has none.
        bytes_to_target: up and down, all clients, until then.
    """

    group: Group
    reported: Scope
    rounds: tuple[int, ...]
    accuracy: Spread | None
    worst_decile: Spread | None
    best_decile: Spread | None
    bytes_then: Spread | None
    bytes_total: Spread
    reached: int
    rounds_to_target: Spread | None
    bytes_to_target: Spread | None


def row(group: Group, choice: Choice, target: float | None) -> Row:
    """Sum a group up; without a target nothing reaches it."""
    reported = group.runs[0].reported
    lines = [line for run in group.runs if (line := run.at(choice)) is not None]
    stats = [line.accuracy[run.reported] for run, line in zip(group.runs, lines, strict=False)]
    there = len(lines) == len(group.runs)
    hits = [hit for run in group.runs if target is not None and (hit := first_at(run, target)) is not None]
    everyone = len(hits) == len(group.runs)
    return Row(
        group=group,
        reported=reported,
        rounds=tuple(line.round for line in lines) if there else (),
        accuracy=_spread(s.mean for s in stats) if there else None,
        worst_decile=_spread(s.worst_decile for s in stats) if there else None,
        best_decile=_spread(s.best_decile for s in stats) if there else None,
        bytes_then=_spread(both_ways(line.traffic_total) for line in lines) if there else None,
        bytes_total=_spread(both_ways(run.history[-1].traffic_total) if run.history else 0 for run in group.runs),
        reached=len(hits),
        rounds_to_target=_spread(hit.round for hit in hits) if everyone else None,
        bytes_to_target=_spread(both_ways(hit.traffic_total) for hit in hits) if everyone else None,
    )


def first_at(run: Run, target: float) -> RoundMetrics | None:
    """The first evaluated round in which the judged model's mean test accuracy is at least the target."""
    scope = run.reported
    return next((x for x in run.history if scope in x.accuracy and x.accuracy[scope].mean >= target - SLACK), None)


def common_target(groups: Sequence[Group]) -> float | None:
    """The highest accuracy that every run reaches, rounded down to a hundredth; None where a run has none."""
    best = [run.stats("best_test_oracle") for group in groups for run in group.runs]
    means = [stats.mean for stats in best if stats is not None]
    return math.floor(min(means) * 100 + SLACK) / 100 if means and len(means) == len(best) else None


def common_choice(groups: Sequence[Group]) -> Choice:
    """`best_val` where every run has validation data, else `last`."""
    return "best_val" if all(run.at("best_val") for group in groups for run in group.runs) else "last"


def check_choice(groups: Sequence[Group], choice: Choice) -> None:
    """Refuse a round that a run has not got.

    Raises:
        SettingsError: names the run.
    """
    for run in (run for group in groups for run in group.runs):
        if choice == "best_val" and run.at(choice) is None:
            raise SettingsError(f"{run.folder} has no validation accuracy to choose a round by; take --at last")


def both_ways(traffic: Traffic) -> int:
    """Up and down together."""
    return traffic.up_bytes + traffic.down_bytes


def _spread(values: Iterable[float]) -> Spread:
    return Spread(tuple(values))
