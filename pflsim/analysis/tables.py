"""Comparisons as tables of text, Markdown, LaTeX and HTML, and as records of plain numbers, frames and CSV."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import tabulate as tabulate_module
from rich.console import Console
from tabulate import LATEX_ESCAPE_RULES, tabulate

from pflsim.analysis.clients import all_intervals, bracketed, client_keys, client_records, interval_texts, over_clients
from pflsim.analysis.comparison import Comparison, Row, Spread
from pflsim.analysis.differences import Difference, Family
from pflsim.analysis.forest import as_text
from pflsim.analysis.groups import Group
from pflsim.analysis.headings import about
from pflsim.analysis.intervals import METRICS, POOLED
from pflsim.analysis.runs import UNSCORED, Run, incomplete, run_settings
from pflsim.analysis.targets import undisturbed
from pflsim.analysis.verdict import over_benchmarks
from pflsim.config.names import listed, written
from pflsim.data.splits import copies_labels
from pflsim.display.formats import CHOSEN, NONE, byte_unit, in_text, who_is_evaluated, wrapped
from pflsim.display.identity import identity
from pflsim.display.metrics import fixed, points, rounded, scale_of, steady
from pflsim.errors import SettingsError
from pflsim.types import ModelKind

if TYPE_CHECKING:
    from pandas import DataFrame

tabulate_module.MIN_PADDING = 0  # columns are as wide as their header
Format = Literal["text", "markdown", "latex", "csv"]
SUFFIXES: dict[str, Format] = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}
GREEK = {"α": "alpha", "β": "beta", "λ": "lambda", "ρ": "rho", "τ": "tau"}
LATEX = str.maketrans(
    {"±": r"$\pm$", "²": "$^2$", "–": "--", "—": "---", "−": "$-$", **{k: rf"$\{name}$" for k, name in GREEK.items()}}
)
PAGE = 40
"""The most lines of a LaTeX table on one page."""
COLUMNS = 120
"""Width above which labels of a table in text take several lines."""
MODEL = "reported\nmodel"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells with a title and a text above and notes below. The first column holds text, the others numbers.

    A header may have several lines. The plot is of text only.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    text: str = ""
    plot: str = ""


def tables(comparison: Comparison, plot: str = "") -> list[Table]:
    """Return the table of the groups and, if there are differences, the table of these for each reference.

    Clients with names have a table of means over them, see `means`.
    """
    named = has_means(comparison) and comparison.runs[0].partition.get("names")
    differences = [paired(comparison, each) for each in comparison.families if comparison.paired]
    return [figures(comparison, plot), *differences, *([means(comparison)] if named else []), *where(comparison)]


def figures(comparison: Comparison, plot: str = "") -> Table:
    """Return a table with one line per group, the best first if they can be compared."""
    rows = [*comparison.lines, *(row for row in comparison.rows if row not in comparison.lines), *comparison.baselines]
    cells = {"method": [row.label for row in rows]}
    cells[MODEL] = [f"{row.scope.model}, {row.scope.phase}" for row in rows]
    if len({row.group.seeds for row in rows}) > 1:
        cells["seeds"] = [numbers(row.group.seeds) for row in rows]
    for column in columns(comparison):
        if column.header:
            found = [row.figures.get(column.figure) for row in rows]
            missing = [f"{row.reached} of {len(row.hits)}" if column.of_target else NONE for row in rows]
            pairs = zip(found, missing, strict=True)
            cells[column.header] = [other if spread is None else column.text(spread) for spread, other in pairs]
    lines = tuple(zip(*cells.values(), strict=True))
    text = " ".join(comparison.sentences)
    return Table(title(comparison), tuple(cells), lines, tuple(notes(comparison)), text, plot)


class Column(NamedTuple):
    """A figure of the groups, in tables and in records.

    Args:
        name: the start of its keys in records; "": it is in none.
        header: in tables; "": it is in none.
        figure: a key of `Row.figures`.
        text: formats it in tables.
        of_target: whether it needs a target that all seeds of a group reach.
    """

    name: str
    header: str
    figure: str
    text: Callable[[Spread], str]
    of_target: bool = False


def columns(comparison: Comparison) -> list[Column]:
    """Return the figures in the order of tables and records."""
    unit, scale = byte_unit(max(row.figures["bytes_total"].mean for row in comparison.rows))
    oracle = "\n(oracle)" * (comparison.choice == "best_test_oracle")
    undefined = any(row.figures["undefined"].mean for row in comparison.rows if "undefined" in row.figures)
    private, target = any("epsilon" in row.figures for row in comparison.rows), comparison.target
    reaches, given, to = target is not None, bool(target and target.given), f"\nto {target and target.text}"
    virtual = [line.virtual_seconds is not None for run in comparison.runs for line in run.history]
    seconds = "virtual\nseconds" if all(virtual) else "seconds"
    timed = given and (all(virtual) or not any(virtual) and undisturbed(comparison.runs))

    def size(spread: Spread) -> str:
        mean = spread.mean / scale
        return fixed(mean, next((n for n, least in enumerate((99.95, 9.995, 0.9995)) if mean >= least), 3 * (mean > 0)))

    return [
        Column("round", f"round{oracle}", "round", _span),
        Column(comparison.primary, in_text(comparison.primary).replace(" ", "\n"), "mean", _spread),
        Column("weighted", "weighted\nmean", "weighted_mean", lambda spread: fixed(spread.mean, 3)),
        Column("", "undefined\nclients" * undefined, "undefined", _span),
        Column("worst_decile", "worst\ndecile", "worst_decile", _spread),
        Column("best_decile", "", "best_decile", _spread),
        *(Column(name, in_text(name).replace(" ", "\n"), name, _spread) for name in comparison.metrics),
        Column("epsilon", "ε" * private, "epsilon", lambda spread: rounded(spread.mean)),
        Column("bytes_until_round", f"{unit} until\nround", "bytes_until_round", size),
        Column("bytes_total", f"{unit}\nin all", "bytes_total", size),
        Column("rounds_to_target", f"rounds{to}" * reaches, "rounds_to_target", _span, True),
        Column("times_fewer_rounds", "times fewer\nrounds" * given, "times_fewer_rounds", _times),
        Column("up_to_target", "", "up_to_target", size),
        Column("bytes_to_target", f"{unit}{to}" * reaches, "bytes_to_target", size, True),
        Column("seconds_to_target", f"{seconds}{to}" * timed, "seconds_to_target", _spread, True),
    ]


def paired(comparison: Comparison, family: Family) -> Table:
    """Return a table with one line per difference to a reference, the best first."""
    reference, corrected = family.reference.label, " (Holm)" * (family.tests > 1)
    unit = "clients" if family.same_clients else "pairs"
    kinds, scale = ("seeds", unit), scale_of(comparison.primary)
    difference = "difference" + ",\npoints" * bool(scale[2])
    intervals, tests = ([f"{what},\n{kind}" for kind in kinds] for what in ("95% interval", f"p{corrected}"))
    headers = ("method", unit, difference, *intervals, "better", "equal", "worse", *tests, "evidence")
    rows, better = [], 1 if comparison.higher else -1
    for d in sorted(family.differences, key=lambda d: math.inf if d.mean is None else -better * d.mean):
        seeds = NONE if None in d.over_seeds else f"[{', '.join(points(x, comparison.primary) for x in d.over_seeds)}]"
        ends, counts = (seeds, steady(d.low, d.high, *scale[:2])), map(str, (d.better, d.equal, d.worse))
        own = d.seeds and d.seeds.p_holm, d.p_holm
        p = (NONE if x is None else f"{x:.3f}" if x >= 0.0095 else f"{x:.2g}" for x in own)
        rows.append((d.group.label, str(d.pairs), points(d.mean, comparison.primary), *ends, *counts, *p, d.level))
    about = f"Differences to {reference}, client by client"
    tested = f", Holm-corrected for {family.tests} comparisons" if corrected else ""
    over_seeds = "clients and seeds are both random" if family.same_clients else "moderated t test of the seeds' means"
    how = "with all their seeds; each counts once, with its mean over them" if family.same_clients else "of each seed"
    notes = (
        f"difference: mean over seeds of mean {in_text(comparison.primary)} over clients, minus that of {reference}",
        f"seeds: {over_seeds}{tested}",
        f"{unit}: bootstrap (BCa) and Wilcoxon's signed-rank test over clients {how}{tested}; p = 1 if ranks and "
        "difference point to different sides",
        f"clear: both p < 0.05, and the interval over {unit} excludes 0; on these clients only: not p over seeds",
    )
    as_before = f"columns as in the differences to {comparison.reference.label}"
    return Table(about, headers, tuple(rows), notes if family is comparison.families[0] else (as_before,))


def has_means(comparison: Comparison) -> bool:
    """Return whether there are figures for `means`."""
    return comparison.primary in METRICS or any(name in POOLED for name in comparison.metrics)


def means(comparison: Comparison) -> Table:
    """Return a table with three means over clients, and with metrics over the rows of all clients together."""
    rows, primary, interval = [*comparison.lines, *comparison.baselines], in_text(comparison.primary), "95%\ninterval"
    found = [{key: spread.mean for key, spread in row.figures.items()} | dict(over_clients(row)) for row in rows]
    columns = [(f"mean\n{primary}", "mean"), ("weighted\nmean", "weighted_mean")]
    columns += [("random-\neffects", "random_effects_mean"), (interval, "random_effects")]
    columns += [("τ²", "random_effects_tau2"), ("I²", "random_effects_i2")]
    columns += [("clients\nleft out", "random_effects_left_out")]
    for name in (f"pooled_{name}" for name in POOLED if any(f"pooled_{name}" in own for own in found)):
        metric = in_text(name.removeprefix("pooled_")).replace(" ", "\n")
        columns += [(f"{metric},\nall rows", name), (interval, name)]

    def cell(own: Mapping[str, float], header: str, key: str) -> str:
        if header == interval:
            return bracketed(own.get(f"{key}_low"), own.get(f"{key}_high"))
        text = f"{own.get(key, 0):,.1f}".removesuffix(".0") if "left_out" in key else rounded(own.get(key, 0))
        return text.replace("-", "−") if key in own else NONE

    pairs = zip(rows, found, strict=True)
    cells = tuple((row.label, *(cell(own, *column) for column in columns)) for row, own in pairs)
    scale = "logarithm" if comparison.primary == "rmse" else "logit"
    notes = [
        f"random-effects: mean {primary} over clients by DerSimonian and Laird, on the scale of the {scale} (as τ²), "
        "with the interval of Hartung and Knapp; left out: clients without a variance",
        "all rows: the rows of all clients together; the interval is a bootstrap over clients",
        "figures of several seeds are means over them",
        *[f"{NONE}: too few clients with a variance, or {UNSCORED}"] * any(NONE in line for line in cells),
    ]
    return Table("Means over clients", ("method", *(header for header, _ in columns)), cells, tuple(notes))


def where(comparison: Comparison) -> list[Table]:
    """Return a table with the mean on each test set, and of new clients; nothing if there are only the own test rows.

    There is none either if the comparison itself is on another set.
    """
    rows, primary = [*comparison.lines, *comparison.baselines], comparison.primary
    runs = [run for row in rows for run in row.group.runs]
    names = ["test", *dict.fromkeys(name for run in runs for name in run.sets)]
    names += NEW if any(run.summary.get("newcomers") for run in runs) else ()
    if len(names) == 1 or any(run.on != "test" or run.reported.model not in get_args(ModelKind) for run in runs):
        return []

    def value(run: Run, name: str) -> float | None:
        if name in NEW:
            found = (run.summary.get("newcomers") or {}).get(name) or {}
            return found.get("mean" if primary == "accuracy" else primary)
        stats = replace(run, on=name).stats(comparison.choice)
        return stats and stats.mean

    def cell(row: Row, name: str) -> str:
        found = [each for run in row.group.runs if (each := value(run, name)) is not None]
        return _spread(Spread(tuple(found))) if len(found) == len(row.group.runs) else NONE

    cells = tuple((row.label, *(cell(row, name) for name in names)) for row in rows)
    headers = (
        {"test": "own\ntest rows", "triggered": "attack\nsuccess", **NEW}.get(name, name.replace("_", "\n"))
        for name in names
    )
    notes = [f"{in_text(primary)}: mean over clients and seeds; round: {CHOSEN[comparison.choice]}"]
    notes += ["attack success: share of rows with the backdoor's square that get its label"] * ("triggered" in names)
    notes += ["new clients: on their own test rows, after the last round"] * (names[-1] in NEW)
    return [Table("Where the models are judged", ("method", *headers), cells, tuple(notes))]


NEW = {"received": "new clients,\nas received", "trained": "new clients,\nfine-tuned"}
"""Headers of the results of new clients, by phase."""
FIRST: dict[str, Callable[[Any], str]] = {
    "client": str, "seed": str, "train": "{:,.0f}".format, "test": "{:,.0f}".format, "positives": "{:.0%}".format,
}  # fmt: skip
"""Formats of the first columns of the table of clients."""


def clients_table(comparison: Comparison) -> Table:
    """Return a table with one line per client: its rows, and its result with each method."""
    intervals = all_intervals(comparison)
    texts, reasons = interval_texts(intervals)
    known = client_records(comparison, intervals)
    first = {key: text for key, text in FIRST.items() if any(record.get(key) is not None for record in known)}
    heads = [[NONE if record[key] is None else text(record[key]) for key, text in first.items()] for record in known]
    own = [[each.get(key, NONE) for each in texts.values()] for key in client_keys(intervals)]
    values = comparison.runs[0].partition.get("values", ("", "1"))
    notes = [
        f"{in_text(comparison.primary)} with its 95% interval, on the test rows of each client"
        + f" in the set {comparison.runs[0].on}" * (comparison.runs[0].on != "test")
        + "; figures of several seeds are means over them" * (comparison.seeds > 1 and "seed" not in first),
        "train, test: numbers of rows; validation rows are in neither"
        + f"; positives: share of {values[-1]} in all rows" * ("positives" in first),
        *reasons,
    ]
    rows = [row for row in (*comparison.rows, *comparison.baselines) if row.label in texts]
    models = (f"{r.label}: {r.scope.model}, {r.scope.phase}, round {_span(r.figures['round'])}" for r in rows)
    notes.append("; ".join(models))
    lines = tuple((*head, *cells) for head, cells in zip(heads, own, strict=True))
    return Table(title(comparison), (*first, *texts), lines, tuple(notes))


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one record of plain numbers per group, all with the same keys; a missing value is None."""
    rows = (*comparison.rows, *comparison.baselines)
    settings = dict.fromkeys(key for row in rows for key in row.group.settings)
    over = dict.fromkeys(key for row in rows for key in over_clients(row))
    return [_record(comparison, row, list(settings), list(over)) for row in rows]


def _record(comparison: Comparison, row: Row, settings: list[str], over: list[str]) -> dict[str, Any]:
    group = row.group
    alike = next((labels for labels in comparison.identical if group.label in labels), ())
    same = [each.name for each in comparison.groups if each.label in alike and each is not group]
    families = zip(("", "fedavg_"), comparison.families, row.deltas, strict=False)
    spreads = [(column.name, row.figures.get(column.figure)) for column in columns(comparison) if column.name]
    figures = [(f"{name}_{what}", getattr(s, what, None)) for name, s in spreads for what in ("mean", "std")]
    first = [key for key, _ in figures].index("rounds_to_target_mean")

    def difference(family: Family, d: Difference | None) -> dict[str, Any]:
        ends = ("difference_low_over_seeds", "difference_high_over_seeds")
        return {
            "reference": family.reference.name if d else None,
            "pairs": d and d.pairs,
            **{f"difference_{name}": getattr(d, name, None) for name in ("mean", "low", "high")},
            **dict(zip(ends, d.over_seeds if d else (None, None), strict=True)),
            **{name: getattr(d, name, None) for name in ("better", "equal", "worse", "p", "p_holm")},
            **{f"{name}_over_seeds": getattr(d and d.seeds, name, None) for name in ("p", "p_holm", "error", "df")},
            **dict(zip(("prior_variance", "prior_df"), d and family.prior or (None, None), strict=True)),
            "level": d.level if d and not comparison.objections else None,
        }

    return {
        "label": group.name,
        "method": group.method,
        "comparison": title(comparison),
        **{key: written(group.settings[key]) if key in group.settings else None for key in settings},
        "reported_model": row.scope.model,
        "reported_phase": row.scope.phase,
        "runs": len(group.runs),
        "seeds": " ".join(map(str, group.seeds)),
        "complete": written(all(run.complete for run in group.runs)),
        "round_chosen_by": comparison.choice,
        **dict(figures[:first]),
        "target": comparison.target and comparison.target.text,
        "seeds_reaching_target": row.reached,
        "rounds_to_target_by_seed": " ".join("none" if hit is None else str(hit) for hit in row.hits),
        **dict(figures[first:]),
        **{f"{start}{key}": value for start, each, d in families for key, value in difference(each, d).items()},
        "identical_to": "; ".join(same),
        **{key: over_clients(row).get(key) for key in over},
    }


def span(counts: Sequence[float]) -> str:
    """Format the smallest and the largest whole number: `3–7`, or `3` if they are equal, or `—` if there are none."""
    first, *others = dict.fromkeys(f"{count:.0f}" for count in sorted(counts)) or [NONE]
    return "–".join([first, *others[-1:]])


def _span(spread: Spread) -> str:
    return span(spread.values)


def _times(spread: Spread) -> str:
    return fixed(spread.mean, 2)


def _spread(spread: Spread) -> str:
    return fixed(spread.mean, 3) + ("" if spread.std is None else f" ± {fixed(spread.std, 3)}")


def title(comparison: Comparison, in_words: bool = False) -> str:
    """Return what all runs have in common: `Test accuracy on digits, iid, 20 clients, mlp; 20 rounds, seeds 0–2`.

    Args:
        comparison: the runs.
        in_words: have the partition in words, without most of its settings.
    """
    data, rules, clients, rounds, model, partition = about(comparison)
    seeds = {group.seeds for group in comparison.groups}
    own = seeds.pop() if len(seeds) == 1 else ()
    tested = f"Test {in_text(comparison.primary)}" + (f" on {data}" if data else "")
    on = comparison.runs[0].on
    tested += f" (test set {on})" * (on != "test")
    what = [tested, rules if in_words else partition, clients, model]
    how = [rounds, own and f"seed{'s' if len(own) > 1 else ''} {numbers(own)}"]
    return "; ".join(filter(None, (", ".join(filter(None, words)) for words in (what, how))))


def _names(groups: Sequence[Group], others: Sequence[Group]) -> list[str]:
    """Return the groups' labels, or for all groups of a method the method's name."""
    whole = {group.method for group in groups} - {group.method for group in others if group not in groups}
    return [*dict.fromkeys(identity(g.method).display if g.method in whole else g.label for g in groups)]


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield the lines below the table of groups, which define its columns."""
    runs = comparison.runs
    spread = "; ± is the sample standard deviation over seeds" if len(runs) > len(comparison.groups) else ""
    on = {run.summary["accuracy_of"]["clients"] for run in runs}
    clients = who_is_evaluated(on.pop()) if len(on) == 1 else "the evaluated clients"
    clients += f", on the test set {runs[0].on}" * (runs[0].on != "test")
    for key, who in (("newcomers", "newcomers"), ("attack", "malicious ones")):
        clients += f", without {who}" if any(run.summary.get(key) for run in runs) else ""
    primary, worst = in_text(comparison.primary), "lowest" if comparison.higher else "highest"
    yield f"{primary}: mean test {primary} over {clients}{spread}"
    yield "weighted mean: weighted by the clients' test examples"
    yield f"worst decile: mean {primary} of the 10% of clients with the {worst} {primary}"
    if others := ", ".join(map(in_text, comparison.metrics)):
        yield f"{others}: mean over the clients for which it is defined, on test data, in the same round"
    yield "reported model: the method's choice; trained: after local training; received: as sent by the server"
    oracle = "; it is chosen on test data, so the result is too good" * (comparison.choice == "best_test_oracle")
    yield f"round: {CHOSEN[comparison.choice]} of each seed{oracle}"
    private = [run for row in comparison.rows if "epsilon" in row.figures for run in row.group.runs]
    if deltas := sorted({f"{run.summary['privacy']['delta']:g}" for run in private}):
        yield f"ε: what differential privacy spends up to that round, with δ = {listed(deltas)}"
    yield "traffic: bytes of all clients in both directions, up to that round and in the whole run"
    yield from target_notes(comparison)
    unnamed = [group for group in comparison.groups if "lr" not in group.settings]
    holders: dict[str, list[Group]] = {}
    for group in unnamed:
        holders.setdefault(written(run_settings(group.runs[0])["lr"]), []).append(group)
    if len(holders) > 1:
        yield f"lr: {', '.join(f'{rate} ({listed(_names(having, unnamed))})' for rate, having in holders.items())}"
    if comparison.baselines:
        labels = listed([row.label for row in comparison.baselines])
        yield f"{labels}: baselines on the same rows, in no test; pooled and mixed ones see the rows of all clients"
    yield from (f"the same {primary} on every client in every seed: {listed(each)}" for each in comparison.identical)
    yield from remarks(comparison)
    for group in comparison.groups:
        for run in group.left_out:
            yield f"left out, because it repeats another run with the same settings and seed: {run.folder}"
    for text in cautions(comparison):
        yield f"CAUTION: {text}"


def target_notes(comparison: Comparison) -> Iterator[str]:
    """Yield what reaching the target means, if there is one."""
    runs, primary = comparison.runs, in_text(comparison.primary)
    if target := comparison.target:
        every = sorted({run_settings(run)["eval.every"] for run in runs})
        seen = "" if every == [1] else f" (evaluated every {' or '.join(map(str, every))} rounds)"
        given = "" if target.given else f"; every run reaches this {primary}"
        unreached = any(None in row.hits for row in (*comparison.rows, *comparison.baselines))
        part = "; n of m: so many seeds reach it" * unreached
        least, kind = "least" if comparison.higher else "most", "mean " + "validation " * (target.on == "val") + primary
        goal = f"this {kind}"
        if target.text.endswith("%"):
            divided = "" if comparison.higher else "1/"
            goal = f"{divided}{target.text} of the {kind} of {comparison.reference.label} and the same seed"
        yield f"to {target.text}: up to the first round with at {least} {goal}{seen}{given}{part}"
        if any("times_fewer_rounds" in row.figures for row in comparison.rows) and target.given:
            yield f"times fewer rounds: those of {comparison.reference.label} by the method's, mean over seeds"


def cautions(comparison: Comparison) -> Iterator[str]:
    """Yield why the groups should not be compared, what does not count, and what is not complete."""
    yield from comparison.objections
    if comparison.missing:
        yield f"left out, since runs with their method or seed are missing: {listed(comparison.missing)}"
    yield from incomplete(comparison.runs)
    beside = [run for row in comparison.baselines or comparison.rows for run in row.group.runs if row.group.is_baseline]
    yield from (f"{run.folder}: {text}" for run in beside for text in run.summary.get("warnings", ()))


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield what figures do not show: test rows that favour personal models, and clients left out or not trained."""
    if splits := {run_settings(run)["split"] for run in comparison.runs if copies_labels(run.config["split"])}:
        why = "test rows have the label shares of each client's training rows"
        yield f"split={', '.join(sorted(splits))}: {why}, which favours personal models if clients have few rows"
    for family in comparison.families:
        found, name = family.differences, family.reference.label
        if alone := [f"{d.unmatched} with {d.group.label}" for d in found if d.unmatched]:
            yield f"clients with a value of one only, which the difference to {name} leaves out: {listed(alone)}"
        tests = [(d, d.seeds.clients) for d in found if d.seeds]
        if complete := [f"{n} with {d.group.label}" for d, n in tests if n not in (None, d.pairs)]:
            yield f"clients with all seeds, to which the test over seeds against {name} is limited: {listed(complete)}"
    for row in comparison.rows:
        never, others = list[int](), list[float]()
        for run, number in zip(row.group.runs, row.rounds, strict=False):
            rates, clients = run.counts(number)[run.primary].dropna().to_dict(), run.untrained(number)
            trained = [rate for client, rate in rates.items() if client not in clients]
            never.append(len(rates) - len(trained))
            others.append(sum(trained) / max(len(trained), 1))
        if any(never):
            what = f"clients that have not taken part up to that round: {span(sorted(never))}"
            mean = Spread(tuple(others)).mean
            yield f"{row.label}: {what}; without them, the {in_text(comparison.primary)} is {rounded(mean)}"


def numbers(values: Sequence[int]) -> str:
    """Format ascending numbers, three or more in sequence as a range: `0–2,5`."""
    in_sequence = groupby(enumerate(values), lambda pair: pair[1] - pair[0])  # value - place is the same
    stretches = [[value for _, value in pairs] for _, pairs in in_sequence]
    return ",".join(f"{s[0]}–{s[-1]}" if len(s) > 2 else ",".join(map(str, s)) for s in stretches)


def render(
    comparisons: Sequence[Comparison], kind: Format, terminal: Console | None = None, clients: bool = False
) -> str:
    """Return comparisons in one of the formats, without a final line break.

    Args:
        comparisons: what to write.
        kind: the format; text begins with a forest plot.
        terminal: decides the width and the colours of the forest plot; None: 80 columns, without colours.
        clients: write the table of clients instead of those of the groups.
    """
    if clients and kind == "csv":
        return as_csv([record for each in comparisons for record in client_records(each, all_intervals(each))])
    if clients:
        return "\n\n\n".join(drawn([clients_table(each)], kind) for each in comparisons)
    if kind == "csv":
        return as_csv([record for comparison in comparisons for record in records(comparison)])
    screen = terminal or Console(width=80, file=StringIO())
    made = (tables(each, forest_text(each, screen) if kind == "text" else "") for each in comparisons)
    return "\n\n\n".join(drawn(each, kind) for each in (*made, overview(comparisons)) if each)


def forest_text(comparison: Comparison, terminal: Console) -> str:
    """Return the forest plot of a comparison as characters for a terminal; "" if its groups cannot be compared."""
    if not comparison.paired:
        return ""
    page = "light" if os.environ.get("COLORFGBG", "").endswith((";7", ";15")) else "dark"
    with terminal.capture() as captured:
        terminal.print(as_text(comparison, comparison.lines, terminal.width, page), soft_wrap=True, highlight=False)
    return captured.get().rstrip("\n")


def overview(comparisons: Sequence[Comparison]) -> list[Table]:
    """Return a table with the differences of each method on several benchmarks; nothing with fewer than two."""
    found = [each for each in comparisons if each.paired]
    if len(found) < 2:
        return []
    differences = [
        {d.group.label: f"{points(d.mean, each.primary)}, {d.level}" for d in each.differences} for each in found
    ]
    rows = [
        (label, *(own.get(label, NONE) for own in differences))
        for label in dict.fromkeys(label for own in differences for label in own)
    ]
    notes = [
        f"{n}: {title(each)}; difference to {each.reference.label}" + ", in points" * bool(scale_of(each.primary)[2])
        for n, each in enumerate(found, 1)
    ]
    headers = ("method", *map(str, range(1, len(found) + 1)))
    text = over_benchmarks([each.families[0] for each in found])
    return [Table("Differences on each benchmark", headers, tuple(rows), tuple(notes), text)]


def drawn(made: Sequence[Table], kind: Format) -> str:
    """Return tables below each other; sentences of text have lines of at most `WIDTH`."""
    return "\n\n".join(map({"text": _text, "markdown": _markdown, "latex": _latex}[kind], made))


def _text(table: Table) -> str:
    title, text, *notes = (
        wrapped(line, indent="  " * (n > 1)) for n, line in enumerate((table.title, table.text, *table.notes))
    )
    above = [line for part in (table.plot, text) if part for line in (part, "")]
    grid = _grid(table, "simple")
    if (excess := max(map(len, grid.splitlines())) - COLUMNS) > 0:
        width = max(20, *(len(label) - excess for label, *_ in table.rows))
        rows = tuple((wrapped(label, width, "  "), *cells) for label, *cells in table.rows)
        grid = _grid(replace(table, rows=rows), "simple")
    return "\n".join([title, "", *above, grid, "", *notes])


def _markdown(table: Table) -> str:
    """Return a table in Markdown, with the notes as a list."""

    def escaped(cell: str) -> str:
        return re.sub(r"([\\|*<>`])", r"\\\1", cell)

    rows = tuple(tuple(map(escaped, row)) for row in table.rows)
    grid = _grid(replace(table, headers=tuple(map(escaped, table.headers)), rows=rows), "pipe")
    text = [escaped(table.text), ""] * bool(table.text)
    return "\n".join([escaped(table.title), "", *text, grid, "", *(f"- {escaped(note)}" for note in table.notes)])


def _latex(table: Table) -> str:
    """Return a LaTeX table environment, or one of several pages, which need the packages booktabs or longtable."""
    caption = ". ".join(filter(None, (table.title, table.text.removesuffix("."), *table.notes)))
    escaped = "".join(LATEX_ESCAPE_RULES.get(character, character) for character in caption)
    package, caption = "booktabs", f"\\caption{{{escaped}.}}"
    if len(table.rows) > PAGE:
        package, end = "longtable", "\\end{longtable}"
        made = _grid(table, "latex_longtable").replace(end, f"{caption}\\\\\n{end}")
    else:
        made = "\n".join(["\\begin{table}", "\\centering", _grid(table, "latex_booktabs"), caption, "\\end{table}"])
    minus = re.sub(r"(?<![\w-])-(?=\d)", "$-$", made.translate(LATEX))  # a hyphen is no minus sign
    return f"% needs \\usepackage{{{package}}}\n{minus}"


def format_of(path: Path | None) -> Format:
    """Return the format that a file name stands for; text if there is no file.

    Raises:
        SettingsError: the suffix is unknown.
    """
    if path is not None and path.suffix not in SUFFIXES:
        raise SettingsError(f"--out {path}: expected one of the suffixes {', '.join(SUFFIXES)}, or set --format")
    return "text" if path is None else SUFFIXES[path.suffix]


def _grid(table: Table, kind: str) -> str:
    headers = [header if kind == "simple" else header.replace("\n", " ") for header in table.headers]
    align = ["left" if header in (table.headers[0], MODEL) else "right" for header in table.headers]
    return tabulate(table.rows, headers, kind, disable_numparse=True, colalign=align)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return records as CSV with a column for every key, without a final line break."""
    from pandas import DataFrame

    cells = [{key: _as_text(cell) for key, cell in row.items()} for row in rows]
    return DataFrame(cells, dtype=object).to_csv(index=False).removesuffix("\n")  # object: whole numbers stay whole


def _as_text(cell: Any) -> Any:
    """Return a cell with a quote in front if a spreadsheet would execute it; numbers are unchanged."""
    executed = isinstance(cell, str) and re.match(r"[=@\t\r]|[+-](?![\d.]+(e[+-]?\d+)?$)", cell)
    return f"'{cell}" if executed else cell


class Comparisons(tuple[Comparison, ...]):
    """Comparisons as tables."""

    def records(self) -> DataFrame:
        """Return a row of plain numbers per group of runs, with all figures."""
        from pandas import DataFrame

        return DataFrame([record for comparison in self for record in records(comparison)])

    def clients(self) -> DataFrame:
        """Return a row per client: its rows, and its result with each group of runs and the 95% interval."""
        from pandas import DataFrame

        return DataFrame([record for each in self for record in client_records(each, all_intervals(each))])

    def save(self, path: str | Path, clients: bool = False) -> Path:
        """Write the tables to a file and return its path.

        Args:
            path: the suffix .txt, .md, .tex or .csv decides the format.
            clients: write the table of clients instead of those of the groups.

        Raises:
            SettingsError: the suffix is another one.
        """
        out = Path(path)
        out.write_text(render(self, format_of(out), clients=clients) + "\n", encoding="utf-8")
        return out

    def __repr__(self) -> str:
        """Return the tables as text."""
        return render(self, "text")

    def _repr_html_(self) -> str:
        return "".join(
            f"<p><b>{escape(table.title)}</b></p><p>{escape(table.text)}</p>"
            f"{tabulate(table.rows, table.headers, 'html', disable_numparse=True)}"
            f"<p>{'<br>'.join(map(escape, table.notes))}</p>"
            for made in (*map(tables, self), overview(self))
            for table in made
        )
