"""The HTML page of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pflsim.analysis.report.charts as charts
import pflsim.analysis.report.facts as facts
from pflsim.analysis.comparison import STATS, Comparison, Row, Spread, compare, compare_sets, row
from pflsim.analysis.curves import BAND
from pflsim.analysis.groups import Group, check_evaluation
from pflsim.analysis.report.grid import grid_of
from pflsim.analysis.report.svg import PALETTE
from pflsim.analysis.runs import incomplete, read_run
from pflsim.analysis.tables import overview, untrained
from pflsim.analysis.tables import title as heading
from pflsim.config.names import listed, written
from pflsim.errors import SettingsError
from pflsim.records.heatmaps import drawing
from pflsim.records.summary import Choice, who_is_evaluated
from pflsim.terminal.formats import CHOSEN, WHEN, format_bytes, format_seconds, plural
from pflsim.types import ModelKind


def page(folders: Sequence[Path]) -> str:
    """Return the report on run folders as HTML.

    Args:
        folders: one or several run folders.

    Raises:
        SettingsError: a folder cannot be read, or has no evaluated round.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if run.at("last") is None:
            raise SettingsError(f"{run.folder}: this run has no evaluated round yet")
    with drawing():
        return _render([_context(comparison) for comparison in compare_sets(runs)])


def _context(whole: Comparison) -> dict[str, Any]:
    """Return the values of the template for one set of runs; in a grid, only each method's best is shown in detail."""
    grid = None if check_evaluation(whole.groups) else grid_of(whole.groups, whole.choice)
    comparison = compare(grid.shown, whole.choice) if grid else whole
    groups, runs = comparison.groups, whole.runs
    return {
        "whole": whole,
        "grid": grid,
        "comparison": comparison,
        "title": _title(groups),
        "seeds": max(len(group.runs) for group in groups),
        "evaluated": sorted({who_is_evaluated(run.summary["accuracy_of"]["clients"]) for run in runs}),
        "differences": {d.group.label: d for d in comparison.differences},
        "hashes": sorted({(run.seed, run.partition_hash) for run in runs}),
        "newcomers": [(group, run) for group in groups for run in group.runs if run.summary.get("newcomers")],
    }


def _title(groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(group.method for group in groups))
    data = dict.fromkeys(str(run.summary["data"]) for group in groups for run in group.runs)
    return f"{listed(methods) if len(methods) <= 6 else f'{len(methods)} methods'} on {' or '.join(data)}"


def banners(comparison: Comparison) -> list[str]:
    """Return the warnings at the top of the page."""
    lines = [f"These runs should not be compared: {reason}." for reason in comparison.objections]
    lines += [f"{reason}." for reason in (*incomplete(comparison.runs), *untrained(comparison))]
    counts = [(row.group.label, row.figures["undefined"]) for row in comparison.rows if "undefined" in row.figures]
    if found := [f"{count.mean:g} with {label}" for label, count in counts if count.mean]:
        lines.append(f"{comparison.primary} is undefined for clients, which do not count: {', '.join(found)}.")
    warned = {warning: run.name for run in comparison.runs for warning in run.summary.get("warnings", ())}
    lines += [f"Warning of {name}: {warning}." for warning, name in warned.items()]
    repeated = [run.name for group in comparison.groups for run in group.left_out]
    if repeated:
        lines.append(f"Left out, because they repeat other runs with the same settings and seed: {listed(repeated)}.")
    return lines


def others(groups: Sequence[Group], choices: Sequence[Choice], reported: bool) -> list[tuple[str, Row]]:
    """Return the rows of other rounds, either of the reported models or of the others."""
    models = [run.reported.model for run in (group.runs[0] for group in groups)]
    found = [
        (CHOSEN[choice], row(group, choice, model=model))
        for group, own in zip(groups, models, strict=True)
        for model in get_args(ModelKind)
        for choice in choices
        if (model == own) is reported
    ]
    return [(name, each) for name, each in found if each.rounds]


def _render(contexts: Sequence[Mapping[str, Any]]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from yaml import safe_dump

    loader = PackageLoader("pflsim.analysis.report", "templates")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"rate": _rate, "size": _size, "plural": plural, "p": _p}
    env.filters["duration"] = lambda value: format_seconds(value.mean)
    env.filters["yaml"] = partial(safe_dump, sort_keys=False, allow_unicode=True)
    env.globals |= {"WHEN": WHEN, "CHOSEN": CHOSEN, "STATS": STATS, "BAND": BAND, "charts": charts, "facts": facts}
    env.globals |= {"heading": heading, "banners": banners, "others": others}
    env.globals["shade"] = lambda number: f"var(--c{number % len(PALETTE) + 1})"
    env.globals["settings_of"] = lambda group: " ".join(f"{key}={written(v)}" for key, v in group.settings.items())
    verdicts = overview([context["comparison"] for context in contexts])
    titles = list(dict.fromkeys(context["title"] for context in contexts))
    texts = [env.get_template("section.html").render(context) for context in contexts]
    sections = [Markup(_with_own_ids(text, number) if number else text) for number, text in enumerate(texts)]
    return env.get_template("report.html").render(title="; ".join(titles), sections=sections, overview=verdicts)


def _with_own_ids(section: str, number: int) -> str:
    """Append a number to all ids of a section and to the references to them."""
    return re.sub(r'(\bid="|href="#|url\(#|labelledby=")([^")]+)', rf"\g<1>\g<2>-{number}", section)


def _rate(value: Spread | float | None) -> str:
    """Format with four digits, or with three and the standard deviation over seeds."""
    if value is None:
        return "—"
    if not isinstance(value, Spread):
        return f"{value:.4f}".replace("-", "−").replace("−0.0000", "0.0000")
    return f"{value.mean:.4f}" if value.std is None else f"{value.mean:.3f} ± {value.std:.3f}"


def _p(value: float | None) -> str:
    return "—" if value is None else "< 0.001" if value < 0.001 else f"{value:.2g}"


def _size(value: Spread | float | None) -> str:
    count = value.mean if isinstance(value, Spread) else value
    return "—" if count is None else format_bytes(count)
