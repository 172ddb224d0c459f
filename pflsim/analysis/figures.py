"""Figures for papers: the command line `pflsim figures RUNS…`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pflsim.analysis.calibration import calibrations
from pflsim.analysis.compare import Add, how, of_groups
from pflsim.analysis.drawings import DRAWN, STYLES, template
from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.progress import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pflsim.analysis.charts import Against
    from pflsim.analysis.comparison import Comparison
    from pflsim.analysis.tables import Table


FORMATS = ("pdf", "svg", "png")
EXAMPLES = """examples:
  {program} figures runs                                     all figures, for a column of ICML, into figures/
  {program} figures runs --style ieee --only forest,curves   two of them, for a column of IEEE
  {program} figures runs --only curves --against bytes       accuracy against traffic
"""


def options(add: Add) -> None:
    """Add the options of the command."""
    of_groups(add)
    add("--style", choices=[*STYLES], default="icml", help="template; default: icml")
    add("--format", choices=FORMATS, default="pdf", help="default: pdf")
    add("--only", metavar="NAMES", help=f"some of {','.join(DRAWN)}; default: all")
    add("--out", type=Path, default=Path("figures"), metavar="DIR", help="folder; default: figures")
    add("--against", choices=["rounds", "bytes", "seconds"], default="rounds", help="x axis of curves; default: rounds")


def execute(options: argparse.Namespace) -> None:
    """Draw figures for a paper, each with a LaTeX table of its numbers."""
    from pflsim.analysis.comparison import compare_sets
    from pflsim.analysis.runs import find_runs, judged, read_run
    from pflsim.analysis.tables import cautions, drawn

    asked, folders = how(options), counted("reading runs", find_runs(options.runs))
    runs = judged(map(read_run, folders), options.set)
    compared = compare_sets(runs, options.reference, **asked)
    for caution in (text for comparison in compared for text in cautions(comparison)):
        print(f"CAUTION: {caution}", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (figure, table) in all_figures(compared, options.style, options.only, options.against).items():
        path = options.out / f"{name}.{options.format}"
        figure.savefig(path, dpi=300)
        path.with_suffix(".tex").write_text(drawn([table], "latex") + "\n", encoding="utf-8")
        print(f"{path}, {path.with_suffix('.tex')}")


def all_figures(
    compared: Sequence[Comparison],
    style: str = "icml",
    only: str | Iterable[str] | None = None,
    against: Against = "rounds",
) -> dict[str, tuple[Figure, Table]]:
    """Return the figures of comparisons and the tables of their numbers, by name.

    Args:
        compared: comparisons; with several, `-1`, `-2`, … is added to the names. Without differences there are curves
            and calibration.
        style: the template, a key of `STYLES`.
        only: some of `DRAWN`, also in one string with commas; None: all, and calibration if there is some.
        against: the x axis of curves.

    Raises:
        SettingsError: there is no such style or figure, or nothing to draw.
    """
    names, found = only.split(",") if isinstance(only, str) else [*(only or DRAWN)], {}
    for name, known in ((style, STYLES), *((name, DRAWN) for name in names)):
        if name not in known:
            raise SettingsError(f"figures: {name}: {nearest(name, known)}")
    for number, comparison in enumerate(compared, 1):
        for name in names if comparison.paired else [name for name in names if name in ("curves", "calibration")]:
            if name == "calibration" and not only and not calibrations(comparison)[0]:
                continue
            with template(STYLES[style]):
                drawn = DRAWN[name](comparison, STYLES[style], *[against] * (name == "curves"))
            found[f"{name}-{number}" if len(compared) > 1 else name] = drawn
    if not found:
        raise SettingsError(f"{', '.join(names)}: at least two methods are needed that can be compared")
    return found
