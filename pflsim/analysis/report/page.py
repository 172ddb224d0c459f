"""The page: everything worked out, then one template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pflsim.analysis.compare.paired import differences, find_reference
from pflsim.analysis.compare.rows import common_choice, common_target
from pflsim.analysis.compare.words import plural
from pflsim.analysis.report import facts
from pflsim.analysis.report.clients import client_charts, shown_runs
from pflsim.analysis.report.curves import accuracy_charts, loss_charts
from pflsim.analysis.report.pictures import partition_pictures, view_pictures
from pflsim.analysis.report.price import price_chart
from pflsim.analysis.report.rows import Row, Value, row_of
from pflsim.analysis.report.verdict import in_short
from pflsim.analysis.report.words import ROUND, listed, spans
from pflsim.analysis.results import Group, Run, check_comparable, group_runs, read_run
from pflsim.analysis.results.groups import check_evaluation
from pflsim.errors import SettingsError
from pflsim.run_folder.metrics import Model
from pflsim.run_folder.summary import Choice
from pflsim.terminal.console import WHEN, format_bytes, format_seconds

CHOSEN: dict[Choice, str] = {
    "best_val": "best by validation",
    "last": "last round",
    "best_test_oracle": "best test round (oracle)",
}
SHADES = 10


def page(folders: Sequence[Path], anyway: bool = False) -> str:
    """The report about run folders, as HTML.

    Raises:
        SettingsError: a folder cannot be read, has no round to report, or the runs cannot be compared.
    """
    groups = group_runs(read_run(folder) for folder in folders)
    for run in (run for group in groups for run in group.runs):
        if run.at("last") is None:
            raise SettingsError(f"{run.folder}: no round of this run is evaluated yet")
    reasons = check_comparable(groups) if len(groups) > 1 else []
    if reasons and not anyway:
        raise SettingsError(f"these runs cannot be compared: {'; '.join(reasons)}. --anyway reports them all the same")
    return _render(_context(groups, reasons))


def _context(groups: Sequence[Group], reasons: Sequence[str]) -> dict[str, Any]:
    choice = common_choice(groups)
    reference, alike = find_reference(groups, None), not check_evaluation(groups)
    target = common_target(groups) if len(groups) > 1 else None
    runs = [run for group in groups for run in group.runs]
    rows = [row for group in groups if (row := row_of(group, choice)) is not None]  # all of them: see `page`
    return {
        "title": _title(groups),
        "about": _about(groups),
        "groups": groups,
        "runs": runs,
        "banners": _banners(groups, reasons),
        "points": in_short(rows, choice, alike),
        "choice": choice,
        "chosen": CHOSEN[choice],
        "round_words": ROUND[choice],
        "rows": rows,
        "other_rounds": _others(groups, choice, reported=True),
        "other_models": _others(groups, choice, reported=False),
        "whom": sorted({run.summary["accuracy_of"]["clients"] for run in runs}),
        "price": price_chart(rows) if len(rows) > 1 else None,
        "curves": accuracy_charts(rows),
        "losses": loss_charts(groups),
        "clients": client_charts(groups, choice),
        "shown": shown_runs(groups),
        "reference": reference.label,
        "differences": differences(groups, reference, choice) if alike and len(groups) > 1 else [],
        "target": target,
        "communication": [facts.communication(group, choice, target) for group in groups],
        "partitions": partition_pictures(groups),
        "hashes": sorted({(run.seed, run.partition_hash) for run in runs}),
        "views": view_pictures(groups),
        "newcomers": [(g, run) for g in groups for run in g.runs if run.summary.get("newcomers")],
        "incidents": facts.incidents(groups),
        "settings": facts.settings_table(groups),
        "configs": [(group.label, _yaml(group.runs[0].config), group.runs[0].name) for group in groups],
        "environments": facts.environments(runs),
        "commands": facts.commands(runs),
    }


def _title(groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(group.method for group in groups))
    what = listed(methods) if len(methods) <= 6 else f"{len(methods)} methods"
    return f"{what} on {_common([run for group in groups for run in group.runs], 'data')}"


def _about(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    clients, rounds = _common(runs, "clients"), _common(runs, "rounds_planned")
    parts = [
        f"{_common(runs, 'partition')}, {_common(runs, 'model')}",
        f"{clients} client{'' if clients == '1' else 's'}",
        f"{rounds} rounds",
        f"seed{'s' if len(seeds) > 1 else ''} {spans(seeds)}",
    ]
    return "; ".join(parts) + (f"; {plural(len(runs), 'run')}" if len(runs) > 1 else "")


def _common(runs: Sequence[Run], key: str) -> str:
    """What the runs have in common, or all that they have."""
    return listed(list(dict.fromkeys(str(run.summary[key]) for run in runs)), "or")


def _banners(groups: Sequence[Group], reasons: Sequence[str]) -> list[str]:
    """What a reader must know before any figure."""
    said = [f"These runs should not be compared: {reason}." for reason in reasons]
    for run in (run for group in groups for run in group.runs if not run.complete):
        planned = run.summary["rounds_planned"]
        line = f"{run.name} is not complete: {run.done} of {planned} rounds are done, and its figures are of these."
        said += [line] if not any(f"{run.folder} is not complete" in reason for reason in reasons) else []
    left = [run.name for group in groups for run in group.left_out]
    if left:
        said.append(f"Left out, since other runs with the same settings and seed say the same: {listed(left)}.")
    return said


def _others(groups: Sequence[Group], headline: Choice, reported: bool) -> list[tuple[str, Row]]:
    """Figures that are not the headline: of the other rounds, or of the models that methods are not judged by."""
    found = []
    for group in groups:
        by = group.runs[0].reported.model
        model = by if reported else next(each for each in get_args(Model) if each != by)
        for choice in CHOSEN:
            row = None if reported and choice == headline else row_of(group, choice, model)
            if row is not None:
                found.append((CHOSEN[choice], row))
    return found


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)


def _render(context: Mapping[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("pflsim.analysis.report", "templates")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"rate": _rate, "size": _size, "duration": _duration, "plural": plural, "listed": listed, "p": _p}
    env.globals |= {"WHEN": WHEN, "shade": lambda number: f"var(--c{number % SHADES + 1})"}
    return env.get_template("report.html").render(context)


def _rate(value: Value | float | None) -> str:
    """In four digits; in three with the spread over seeds."""
    if value is None:
        return "—"
    if not isinstance(value, Value):
        return f"{value:.4f}".replace("-", "−")
    return f"{value.mean:.4f}" if value.spread is None else f"{value.mean:.3f} ± {value.spread:.3f}"


def _p(value: float | None) -> str:
    return "—" if value is None else "< 0.001" if value < 0.001 else f"{value:.2g}"


def _size(value: Value | float | None) -> str:
    count = value.mean if isinstance(value, Value) else value
    return "—" if count is None else format_bytes(count)


def _duration(value: Value | float) -> str:
    return format_seconds(value.mean if isinstance(value, Value) else value)
