"""The mean of the primary metric that runs should reach, and the round in which a run does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pflsim.analysis.runs import Run
from pflsim.config.names import nearest
from pflsim.display.formats import Choice
from pflsim.errors import SettingsError
from pflsim.records.history import METRICS, RoundMetrics

TOLERANCE = 1e-9
"""Rounding error allowed in a mean of rates."""
On = Literal["test", "val"]


@dataclass(frozen=True, slots=True)
class Target:
    """A mean of the primary metric over clients.

    Args:
        text: the number, or the share of the reference's result: `95%`.
        goals: the mean to reach, by seed.
        on: the examples whose mean counts.
        given: whether the caller has set it.
    """

    text: str
    goals: Mapping[int, float]
    on: On = "test"
    given: bool = True

    def first(self, run: Run) -> RoundMetrics | None:
        """Return the first evaluated round in which the reported model's mean is as good; None: there is none."""
        goal = self.goals.get(run.seed, math.nan) * (1 if run.higher else -1)
        return next((line for line, score in _scores(run, self.on) if score >= goal - TOLERANCE), None)


def parsed(target: float | str) -> tuple[float, bool]:
    """Return the number of a target, and whether it is in percent of the reference's result.

    Raises:
        SettingsError: it is neither a finite number nor a share.
    """
    text = str(target)
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (text.endswith("%") and not 0 < value <= 100):
        raise SettingsError(f"--target {target}: expected a number, e.g. 0.9, or a share of the reference's, e.g. 95%")
    return value, text.endswith("%")


def find_target(
    asked: float | str | None, on: On, reference: Sequence[Run], runs: Sequence[Run], choice: Choice
) -> Target | None:
    """Return the target of runs.

    Args:
        asked: a mean; a share of the reference's mean in its chosen round, of each seed; None: the best mean that every
            run reaches, rounded to the worse by 0.01.
        on: the examples whose mean counts.
        reference: the runs of the reference.
        runs: all of them.
        choice: of the reference's round.

    Returns:
        None if a run has no evaluated round and no target is asked for.

    Raises:
        SettingsError: the target is no number and no share, or a run has no validation results.
    """
    if on not in get_args(On):
        raise SettingsError(f"--target-on {on}: {nearest(on, get_args(On))}")
    if on == "val" and (without := [run for run in runs if run.at("best_val") is None]):
        raise SettingsError(f"--target-on val: {without[0].folder} has no validation results; use --target-on test")
    if asked is None:
        best = [max((score for _, score in _scores(run, on)), default=-math.inf) for run in runs]
        if not all(map(math.isfinite, best)):
            return None
        value = (1 if runs[0].higher else -1) * math.floor(min(best) * 100 + TOLERANCE) / 100
        return Target(f"{value:g}", {run.seed: value for run in runs}, on, given=False)
    value, share = parsed(asked)
    if not share:
        return Target(f"{value:g}", {run.seed: value for run in runs}, on)
    lines = [(run, run.at(choice)) for run in reference]
    own = {run.seed: line.evaluations[_scope(run, on)].primary.mean for run, line in lines if line}
    part = value / 100 if reference[0].higher else 100 / value
    return Target(f"{value:g}%", {seed: mean * part for seed, mean in own.items()}, on)


def undisturbed(runs: Iterable[Run]) -> bool:
    """Return whether no two runs overlap in time, judged by their length and the age of their files."""
    ends = [((run.folder / METRICS).stat().st_mtime, run.summary["seconds"]) for run in runs]
    times = sorted((end - seconds, end) for end, seconds in ends)
    return all(end <= start for (_, end), (start, _) in zip(times, times[1:], strict=False))


def _scope(run: Run, on: On) -> Any:
    return run.reported._replace(split=on) if on == "val" else run.reported


def _scores(run: Run, on: On) -> list[tuple[RoundMetrics, float]]:
    """Return the evaluated rounds with their scores; those that are not finite are left out."""
    scope = _scope(run, on)
    found = [(line, line.evaluations[scope].score) for line in run.history if scope in line.evaluations]
    return [(line, score) for line, score in found if math.isfinite(score)]
