"""What the charts show, computed once for text, matplotlib and HTML: forest plot, curves, clients, and axes.

`pflsim.analysis.comparison.frontier` is the line of the chart of cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pflsim.analysis.comparison import Comparison, Row, both_ways
from pflsim.analysis.differences import values_of
from pflsim.analysis.groups import Group
from pflsim.analysis.runs import Run
from pflsim.display.metrics import fixed

if TYPE_CHECKING:
    from pandas import DataFrame

Against = Literal["rounds", "bytes", "seconds"]
CUT = 4
"""The axis leaves out methods that are worse by this multiple of what the better half of the methods needs."""
REACH = 2
"""The axis has the ends of intervals up to this multiple of the largest mean of the better half."""


def limits_of(comparison: Comparison, lines: Iterable[Row], number: int = 0) -> tuple[float, float]:
    """Return the limits of the axis of the differences to a reference.

    It has 0, the means and seeds of the methods that are not far behind (`CUT`), the intervals of the better half
    as far as `REACH`, and the baselines farther by `CUT`.

    Args:
        comparison: has the metric.
        lines: the best first.
        number: of the reference.
    """
    sign, least = 1 if comparison.higher else -1, comparison.least
    found = [(d.mean, d) for line in lines if (d := line.deltas[number]) and d.mean is not None]
    reach = [[sign * x for x in (mean, *d.by_seed)] for mean, d in found]
    better = (len(reach) + 1) // 2
    need = max([least / 2, *(abs(x) for own in reach[:better] for x in own)])
    most = REACH * max([least / 2, *(abs(mean) for mean, _ in found[:better])])
    ends = [sign * x for _, d in found[:better] for x in d.over_seeds if x is not None]
    beside = [sign * difference for _, difference in comparison.beside if number == 0]
    shown = [0.0, *(x for own in reach if own[0] >= -CUT * need for x in own), *np.clip(ends, -most, most).tolist()]
    shown += np.clip(beside, -CUT * most, CUT * most).tolist()
    low, high = min(shown), max(shown)
    more = max(0.05 * (high - low), (least - (high - low)) / 2)
    return (low - more, high + more) if comparison.higher else (-high - more, more - low)


class Curve(NamedTuple):
    """The reported model's primary metric on test data in the rounds that all runs of a group have.

    Args:
        x: the round, the bytes of all clients in both directions, or the wall seconds so far, as mean over seeds.
        mean, low, high: over seeds.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(group: Group, against: Against = "rounds", most: int = 400) -> Curve | None:
    """Return the curve of a group, thinned out to so many points; None if its runs have no round in common."""
    by_run = [curve_points(run, against) for run in group.runs]
    rounds = sorted(set.intersection(*map(set, by_run)))
    rounds = [rounds[n] for n in np.linspace(0, len(rounds) - 1, min(len(rounds), most)).round().astype(int)]
    if not rounds:
        return None
    x, y = np.array([[found[number] for number in rounds] for found in by_run]).transpose(2, 0, 1)
    return Curve(x.mean(0), y.mean(0), y.min(0), y.max(0))


def curve_points(run: Run, against: Against) -> dict[int, tuple[float, float]]:
    """Return x and y by round."""
    xs: Sequence[float] = {
        "rounds": [line.round for line in run.history],
        "bytes": [both_ways(line.traffic_total) for line in run.history],
        "seconds": list(accumulate(line.clock_seconds for line in run.history)),
    }[against]
    lines = [(x, line, line.evaluations.get(run.reported)) for x, line in zip(xs, run.history, strict=True)]
    return {line.round: (x, found.mean) for x, line, found in lines if found and math.isfinite(found.mean)}


def client_table(comparison: Comparison) -> DataFrame:
    """Return the primary metric [pairs, groups] by seed and client, the weakest with the reference first.

    Clients that are the same in every seed have their mean over the seeds.
    """
    from pandas import DataFrame, concat

    values, primary, base = values_of(comparison.groups, comparison.choice), comparison.primary, comparison.reference
    table = DataFrame({k: concat({seed: found[primary] for seed, found in v.items()}) for k, v in values.items()})
    if comparison.families[0].same_clients:
        table = concat([DataFrame(table.groupby(level=1).mean())], keys=[0])
    return table.dropna(subset=[base.label]).sort_values(base.label, ascending=comparison.higher, kind="stable")


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis, or a logarithmic one.

    Args:
        low, high: its ends; of a logarithmic axis, their logarithms to the base 10.
        ticks: values with a label.
        log: whether it is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value as a percentage of the axis, from its low end; beyond the ends too."""
        found = math.log10(value) if self.log else value
        return round(100 * (found - self.low) / (self.high - self.low), 2)

    def up(self, value: float, height: float) -> float:
        """Return the place of a value on a vertical axis in pixels from the top."""
        return round(height * (1 - self.at(value) / 100), 1)

    def text(self, value: float, sign: str = "", scale: float = 1.0) -> str:
        """Return a tick's label in a unit, with the decimals that the ticks need and a true minus."""
        step = min((b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)), default=abs(value) or 1.0)
        decimals = max(0, -math.floor(math.log10(step * scale) + 1e-9))
        return fixed(value * scale, decimals, sign if value else "").replace("-", "−")


def axis(values: Iterable[float], least: float = 0.0, count: int = 4, pad: float = 0.04) -> Axis:
    """Return an axis that covers values.

    Args:
        values: finite numbers; without any, 0 and 1. There is no tick below 0 if no value is.
        least: the least length.
        count: about how many ticks, at least two.
        pad: what is added at each end, as a share of the length.
    """
    from matplotlib.ticker import MaxNLocator

    found = [*values] or [0.0, 1.0]
    low, high = min(found), max(found)
    more = max(least or 1e-3 * max(abs(low), abs(high), 1e-9), high - low) * (1 + 2 * pad) - (high - low)
    low, high = low - more / 2, high + more / 2
    first = max(low, 0) if min(found) >= 0 else low
    ticks = map(float, MaxNLocator(round(1.6 * count), steps=[1, 2, 5, 10]).tick_values(first, high))
    return Axis(low, high, tuple(round(tick, 12) for tick in ticks if first <= tick <= high))


def log_axis(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis that covers positive values, with ticks at 1, 2 and 5 times powers of ten.

    Over three decades or more, ticks are at powers of ten.
    """
    from matplotlib.ticker import LogLocator

    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    more = max(0.06 * (high - low), 0.2, 0.35 - (high - low) / 2)  # so that there are at least two ticks
    low, high = low - more, high + more
    ticks = LogLocator(subs=(1, 2, 5) if high - low < 2.7 else (1,), numticks=99).tick_values(10**low, 10**high)
    return Axis(low, high, tuple(tick for tick in map(float, ticks) if low <= math.log10(tick) <= high), log=True)
