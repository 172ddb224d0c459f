"""The HTML page of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pflsim.analysis.calibration as calibration
import pflsim.analysis.report.charts as charts
import pflsim.analysis.report.details as details
import pflsim.analysis.report.structure as structure
from pflsim.analysis.charts import Axis, axis
from pflsim.analysis.clients import client_intervals, interval_texts
from pflsim.analysis.comparison import STATS, Comparison, Spread, compare, compare_sets, row
from pflsim.analysis.groups import check_evaluation
from pflsim.analysis.headings import heading, varying
from pflsim.analysis.report.charts import Benchmark, overall
from pflsim.analysis.report.details import Study, read_study
from pflsim.analysis.report.grid import MAX_GROUPS, grid_of
from pflsim.analysis.runs import Run, read_run
from pflsim.analysis.tables import (
    as_csv,
    columns,
    drawn,
    has_means,
    means,
    numbers,
    records,
    remarks,
    span,
    tables,
    target_notes,
    where,
)
from pflsim.analysis.targets import undisturbed
from pflsim.analysis.verdict import over_benchmarks, winners
from pflsim.config.names import listed, written
from pflsim.display.formats import CHOSEN, NONE, format_bytes, format_seconds, in_text, plural, who_is_evaluated
from pflsim.display.identity import FAMILIES, Identity, identity
from pflsim.display.metrics import decimals_of, fixed, points, rounded, scale_of
from pflsim.errors import SettingsError
from pflsim.progress import counted
from pflsim.records.folder import LOG
from pflsim.records.history import METRICS

if TYPE_CHECKING:
    from jinja2 import Environment


def page(folders: Sequence[Path], study: Path | None = None, **target: Any) -> str:
    """Return the report on run folders as HTML.

    Args:
        folders: one or several run folders.
        study: the folder of the study of `pflsim tune` that the runs belong to.
        target: `target` and `target_on` of `compare`.

    Raises:
        SettingsError: a folder cannot be read, the target is wrong, or no run has an evaluated round.
    """
    each = counted("reading runs", folders)
    read = [(folder, read_run(folder) if (folder / METRICS).is_file() else None) for folder in each]
    runs = [run for _, run in read if run and run.at("last")]
    if not runs:
        first = [f"{folder}: {': '.join(_why(folder, run))}" for folder, run in read[:3]]
        raise SettingsError("\n".join(["no run has an evaluated round", *first, *["…"] * (len(read) > 3)]))
    runs = [run for run in runs if run.complete] or runs  # if none is finished, what there is so far
    sets = compare_sets(runs, **target)
    groups = [row.group for comparison in sets for row in (*comparison.rows, *comparison.baselines)]
    used = {run.folder for group in groups for run in (*group.runs, *group.left_out)}
    out = [_why(folder, run) for folder, run in read if not run or run.folder not in used]
    timed = undisturbed(run for _, run in read if run)
    return _render(
        [_benchmark(c, target) for c in sets], out, study and read_study(study), count=len(folders), timed=timed
    )


def _why(folder: Path, run: Run | None) -> tuple[str, str]:
    """Return what a run was that does not count, and how far it came, with the error in its log."""
    text = (folder / LOG).read_text(encoding="utf-8") if (folder / LOG).is_file() else ""
    ends = re.findall(r"the run ended: (.*)", text)
    what = f"{identity(run.method).display} seed {run.seed}" if run else folder.name
    rounds = f"{run.done} of {run.summary['rounds_planned']} rounds are done" if run else "no round is done"
    rounds += ", but other runs with its method or its seed are missing" * (run is not None and run.complete)
    return what, f"{rounds}: {ends[-1]}" if ends else rounds


def _benchmark(whole: Comparison, target: Mapping[str, Any]) -> Benchmark:
    grid = None if check_evaluation(whole.groups) else grid_of(whole.groups, whole.choice)
    beside = [row.group for row in whole.baselines]
    comparison = whole
    if grid and len(whole.groups) > MAX_GROUPS:
        comparison = compare([*grid.shown, *beside], whole.choice, **target)
    return Benchmark(comparison, whole, grid)


def answer(benchmark: Benchmark) -> tuple[str, str]:
    """Return the first sentence with the methods' names in bold, as HTML, and the others."""
    comparison, grid = benchmark.comparison, benchmark.grid
    line = comparison.lines[0]
    said, name = comparison.sentences, in_text(comparison.primary)
    if grid and len({method for method, *_ in grid.lines}) == 1:
        best, by = grid.cells[0].row, "by validation" if comparison.choice == "best_val" else "on test data"
        values = " and ".join(f"{key}={written(v)}" for key, v in best.group.settings.items())
        lead = f"Of {len(grid.cells)} settings of {identity(best.group.method).display}, {values} is the best {by}"
        said = [f"{lead}: its mean test {name} is {rounded(best.figures['mean'].mean)}.", *said]
    elif not said:
        mean, worst = (rounded(line.figures[figure].mean) for figure in ("mean", "worst_decile"))
        said = [f"{line.label} has a mean {name} of {mean}.", f"Worst decile: {worst}."]
    names = sorted((escape(line.label) for line in comparison.lines), key=len, reverse=True)
    names = [name for name in names if name != escape(comparison.reference.label) or len(names) == 1]
    pattern = rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)"
    return re.sub(pattern, r"<b>\1</b>", escape(said[0], quote=False)), " ".join(said[1:])


def environment(who: Sequence[Identity]) -> Environment:
    """Return the templates, with the filters and functions that they use.

    Args:
        who: the methods; in a template, `m(one)` is the class that has the colours of one of them.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from yaml import safe_dump

    loader = PackageLoader("pflsim.analysis.report", "templates")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"rate": _rate, "size": _size, "plural": plural, "p": _p, "listed": listed, "points": points}
    env.filters |= {"thousands": "{:,}".format, "span": span}
    env.filters |= {"duration": lambda value: format_seconds(value.mean), "letters": in_text, "numbers": numbers}
    env.filters |= {"begun": lambda text: text if text[1:2].isupper() else text[:1].upper() + text[1:], "zip": zip}
    env.filters["cut"] = lambda name, most: name if len(name) <= most else f"{name[: most - 1]}…"
    env.filters["yaml"] = partial(safe_dump, sort_keys=False, allow_unicode=True)
    env.globals |= {"charts": charts, "details": details, "structure": structure, "answer": answer, "scale": scale_of}
    env.globals |= {"CHOSEN": CHOSEN, "STATS": STATS, "evaluated": who_is_evaluated, "row_of": row}
    env.globals |= {"FAMILIES": FAMILIES, "who_all": who, "m": lambda one: f"m{who.index(one)}", "axis": axis}
    env.globals |= {"who_is": identity, "remarks": remarks, "SHARES": Axis(0, 1, (0, 0.5, 1))}
    env.globals |= {"calibration": calibration, "has_means": has_means, "means_table": means}
    env.globals |= {"columns_of": columns, "target_notes": target_notes, "NONE": NONE}
    env.globals |= {"where": where, "client_intervals": client_intervals, "interval_texts": interval_texts}
    return env


def _render(benchmarks: Sequence[Benchmark], out: Sequence[tuple[str, str]], study: Study | None, **about: Any) -> str:
    from markupsafe import Markup

    comparisons = [benchmark.comparison for benchmark in benchmarks]
    who = list(dict.fromkeys(line.who for each in comparisons for line in (*each.lines, *each.baselines)))
    who += [method.who for method in (study.methods if study else ()) if method.who not in who]
    env = environment(who)
    names = varying(comparisons)
    values = about | {
        "benchmarks": benchmarks, "title": heading(comparisons[0]), "study": study, "names": names,
        "unfinished": out, "csv": as_csv(r for c in comparisons for r in records(c)),
        "latex": "\n\n".join(drawn(tables(each), "latex") for each in comparisons), "winners": "", "together": "",
    }  # fmt: skip
    families = [(" ".join(name), each.families[0]) for name, each in zip(names, comparisons, strict=True)]
    if len(benchmarks) > 1 and all(c.paired for c in comparisons):
        values |= {"winners": winners(families), "overall": overall(benchmarks)}
        values["together"] = over_benchmarks([family for _, family in families])
    texts = [env.get_template("section.html").render(values, b=benchmark) for benchmark in benchmarks]
    values["sections"] = [Markup(_with_own_ids(text, number) if number else text) for number, text in enumerate(texts)]
    return env.get_template("report.html").render(values)


def _with_own_ids(section: str, number: int) -> str:
    """Append a number to all ids of a section and to the references to them, except the marks of the page."""
    return re.sub(r'(\bid="|href="#|labelledby=")(?!k-)([^")]+)', rf"\g<1>\g<2>-{number}", section)


def _rate(value: Spread | float | None, decimals: int = 3, like: float | None = None) -> str:
    """Format a value, or the mean over seeds, with fewer decimals if it, or the value that it belongs to, is large."""
    found = value.mean if isinstance(value, Spread) else value
    text = NONE if found is None or found != found else fixed(found, decimals_of(like or found, decimals))
    return text.replace("-", "−") if float(text.strip(NONE) or 1) else text.removeprefix("-")


def _p(value: float | None) -> str:
    return NONE if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _size(value: Spread | float | None) -> str:
    count = value.mean if isinstance(value, Spread) else value
    return NONE if count is None else format_bytes(count)
