"""The groups' curves over their seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.rows import Spread, both_ways
from pflsim.analysis.compare.words import title
from pflsim.analysis.results import Group, Run
from pflsim.errors import SettingsError
from pflsim.figures.curves import Curve, draw_curves

Against = Literal["rounds", "bytes", "seconds"]
AGAINST: tuple[Against, ...] = get_args(Against)
LABELS: dict[Against, str] = {
    "rounds": "round",
    "bytes": "traffic up and down, all clients (MB)",
    "seconds": "seconds of all rounds so far",
}
SUFFIXES = (".png", ".svg", ".pdf")


def accuracy_curve(group: Group, against: Against) -> Curve:
    """Mean test accuracy of the judged model: mean over seeds ± sample standard deviation, in rounds all have.

    Against bytes or seconds a round is where its mean over seeds is.
    """
    points = [_points(run, against) for run in group.runs]
    rounds = sorted(set.intersection(*(set(of_run) for of_run in points)))
    x, y = ([Spread(tuple(of_run[number][i] for of_run in points)) for number in rounds] for i in (0, 1))
    means, stds = [spread.mean for spread in y], [spread.std or 0.0 for spread in y]
    several = len(points) > 1
    return Curve(
        group.label,
        [spread.mean for spread in x],
        means,
        [m - s for m, s in zip(means, stds, strict=True)] if several else None,
        [m + s for m, s in zip(means, stds, strict=True)] if several else None,
    )


def _points(run: Run, against: Against) -> dict[int, tuple[float, float]]:
    """Place and accuracy by evaluated round."""
    scope = run.reported
    seconds = accumulate(line.total_seconds for line in run.history)
    found: dict[int, tuple[float, float]] = {}
    for line, until in zip(run.history, seconds, strict=True):
        if scope in line.accuracy:
            megabytes = both_ways(line.traffic_total) / 1e6
            place = {"rounds": float(line.round), "bytes": megabytes, "seconds": until}[against]
            found[line.round] = place, line.accuracy[scope].mean
    return found


def check_picture(path: Path) -> None:
    """Refuse what no curves can be written to.

    Raises:
        SettingsError: says what can.
    """
    if path.suffix not in SUFFIXES:
        raise SettingsError(f"--curves {path}: expected a name that ends in {', '.join(SUFFIXES)}")


def draw(comparison: Comparison, path: Path, against: Against) -> None:
    """Write the groups' curves into a picture."""
    curves: Sequence[Curve] = [accuracy_curve(group, against) for group in comparison.groups]
    whose = "mean ± std over seeds" if any(len(group.runs) > 1 for group in comparison.groups) else "judged model"
    head = "\n".join(textwrap.wrap(title(comparison), 64))
    figure = draw_curves(curves, LABELS[against], f"test accuracy, {whose}", title=head, size=(6.0, 4.0))
    figure.savefig(path, dpi=150)
