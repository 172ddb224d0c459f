"""A comparison as tables of text cells with titles and notes, and as records of plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pflsim.analysis.comparison import Comparison, Row, Spread
from pflsim.analysis.paired import Difference
from pflsim.analysis.runs import incomplete, run_settings
from pflsim.config.names import written
from pflsim.records.summary import Choice
from pflsim.terminal.formats import NONE, byte_unit, plural

CHOSEN: dict[Choice, str] = {
    "best_val": "each seed's best by mean validation accuracy",
    "last": "the last evaluated round",
    "best_test_oracle": "each seed's best by mean test accuracy; this ORACLE selects on test data and overestimates "
    "the accuracy",
}


MODEL = "reported\nmodel"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells with a title above and notes below. The first column holds text, the others numbers.

    A header may have several lines.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def tables(comparison: Comparison) -> list[Table]:
    """Return the table of the groups and, if there are differences, the table of these."""
    return [figures(comparison), *([paired(comparison)] if comparison.differences else [])]


def figures(comparison: Comparison) -> Table:
    """Return a table with one line per group."""
    rows, target = comparison.rows, comparison.target
    unit, scale = byte_unit(max(row.figures["bytes_total"].mean for row in rows))
    columns = {
        "method": [row.group.label for row in rows],
        MODEL: [f"{row.scope.model}, {row.scope.phase}" for row in rows],
    }
    if len({row.group.seeds for row in rows}) > 1:
        columns["seeds"] = [numbers(row.group.seeds) for row in rows]
    columns["round" + "\n(oracle)" * (comparison.choice == "best_test_oracle")] = [span(row.rounds) for row in rows]

    def add(header: str, name: str, decimals: int | None = None, scale: float = 1, std: bool = True) -> None:
        columns[header] = [_spread(row.figures.get(name), decimals, scale, std) for row in rows]

    add("accuracy", "mean", 3)
    add("worst\ndecile", "worst_decile", 3)
    for name in comparison.metrics:
        add(name.replace("_", "\n"), name, 3)
    add(f"{unit} until\nthat round", "bytes_until_round", None, scale, std=False)
    add(f"{unit}\nin all", "bytes_total", None, scale, std=False)
    if target is not None:
        add(f"rounds\nto {target:g}", "rounds_to_target", 1)
        add(f"{unit}\nto {target:g}", "bytes_to_target", None, scale)
    return Table(
        title(comparison), tuple(columns), tuple(zip(*columns.values(), strict=True)), tuple(notes(comparison))
    )


def paired(comparison: Comparison) -> Table:
    """Return a table with one line per difference."""
    several = sum(d.p is not None for d in comparison.differences) > 1
    headers = (
        "method",
        "pairs",
        "difference",
        "95% interval",
        "better",
        "equal",
        "worse",
        "p (Holm)" if several else "p",
    )
    rows = []
    for d in comparison.differences:
        interval = NONE if d.low is None or d.high is None else f"[{_signed(d.low)}, {_signed(d.high)}]"
        p = NONE if d.p_holm is None else f"{d.p_holm:.3f}" if d.p_holm >= 0.0095 else f"{d.p_holm:.2g}"
        mean = NONE if d.mean is None else _signed(d.mean)
        rows.append((d.group.label, str(d.pairs), mean, interval, str(d.better), str(d.equal), str(d.worse), p))
    about = f"Differences to {comparison.reference.label}, client by client"
    return Table(about, headers, tuple(rows), tuple(paired_notes(comparison)))


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one record of plain numbers per group, all with the same keys; a missing value is None."""
    by_label = {d.group.label: d for d in comparison.differences}
    settings = dict.fromkeys(key for group in comparison.groups for key in group.settings)
    return [_record(comparison, row, by_label.get(row.group.label), list(settings)) for row in comparison.rows]


def _record(comparison: Comparison, row: Row, d: Difference | None, settings: list[str]) -> dict[str, Any]:
    group = row.group

    def columns(*names: str) -> dict[str, float | None]:
        spreads = {name: row.figures.get("mean" if name == "accuracy" else name) for name in names}
        return {f"{n}_{what}": getattr(s, what, None) for n, s in spreads.items() for what in ("mean", "std")}

    return {
        "label": group.label,
        "method": group.method,
        "comparison": title(comparison),
        **{key: written(group.settings[key]) if key in group.settings else None for key in settings},
        "reported_model": row.scope.model,
        "reported_phase": row.scope.phase,
        "runs": len(group.runs),
        "seeds": " ".join(map(str, group.seeds)),
        "complete": written(group.complete),
        "round_chosen_by": comparison.choice,
        **columns("round", "accuracy", "worst_decile", "best_decile", *comparison.metrics),
        **columns("bytes_until_round", "bytes_total"),
        "target": comparison.target,
        "seeds_reaching_target": row.reached,
        **columns("rounds_to_target", "bytes_to_target"),
        "reference": comparison.reference.label if d else None,
        "pairs": d and d.pairs,
        **{f"difference_{name}": getattr(d, name, None) for name in ("mean", "low", "high")},
        **{name: getattr(d, name, None) for name in ("better", "equal", "worse", "p", "p_holm")},
    }


def span(rounds: Sequence[int]) -> str:
    """Format the smallest and the largest round: `3–7`, or `3` if they are equal, or `—` if there are none."""
    first, last = min(rounds, default=NONE), max(rounds, default=NONE)
    return str(first) if first == last else f"{first}–{last}"


def _spread(spread: Spread | None, decimals: int | None, scale: float, std: bool) -> str:
    """Format `mean ± std`.

    Args:
        spread: the values; None: there are none.
        decimals: after the point; 1: of counts, which are whole numbers with one seed; None: as for three digits, at
            most three.
        scale: size of the unit.
        std: whether to add the standard deviation.
    """
    if spread is None:
        return NONE
    mean = spread.mean / scale
    if decimals == 1 and spread.std is None:
        decimals = 0
    elif decimals is None:
        decimals = 0 if mean == 0 else next((n for n, least in enumerate((99.95, 9.995, 0.9995)) if mean >= least), 3)
    text = f"{mean:.{decimals}f}"
    return text if spread.std is None or not std else f"{text} ± {spread.std / scale:.{decimals}f}"


def _signed(value: float) -> str:
    text = f"{value:+.4f}"
    return "0.0000" if float(text) == 0 else text


def title(comparison: Comparison) -> str:
    """Return what all runs have in common: `Test accuracy on digits, iid, 20 clients, mlp; 20 rounds, seeds 0–2`."""
    runs = comparison.runs
    keys = ("data", "partition", "clients", "model", "rounds_planned")
    found = {key: {run.summary[key] for run in runs} for key in keys}
    common = {key: values.pop() if len(values) == 1 else None for key, values in found.items()}
    data, partition, clients, model, rounds = (common[key] for key in keys)
    seeds = {group.seeds for group in comparison.groups}
    first = comparison.groups[0].seeds
    what = [
        f"Test accuracy on {data}" if data else "Test accuracy",
        partition,
        clients and plural(clients, "client"),
        model,
    ]
    how = [
        rounds and plural(rounds, "round"),
        f"seed{'s' if len(first) > 1 else ''} {numbers(first)}" if len(seeds) == 1 else None,
    ]
    parts = [", ".join(str(word) for word in words if word) for words in (what, how)]
    return "; ".join(part for part in parts if part)


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield the lines below the table of groups, which define its columns."""
    runs = comparison.runs
    spread = "; ± is the sample standard deviation over seeds" if len(runs) > len(comparison.groups) else ""
    on = {run.summary["accuracy_of"]["clients"] for run in runs}
    which = {"all": "clients", "participants": "the participants of the round"}
    clients = which[on.pop()] if len(on) == 1 else "the evaluated clients"
    clients += ", without newcomers" if any(run.summary.get("newcomers") for run in runs) else ""
    yield f"accuracy: mean test accuracy over {clients}{spread}"
    yield "worst decile: mean accuracy of the 10% of clients with the lowest accuracy"
    if comparison.metrics:
        yield f"{', '.join(comparison.metrics)}: mean over the same clients, on test data, in the same round"
    yield "reported model: the method's choice; trained: after local training; received: as sent by the server"
    yield f"round: {CHOSEN[comparison.choice]}"
    yield "traffic: bytes of all clients in both directions, up to that round and in the whole run"
    if comparison.target is not None:
        every = sorted({run_settings(run)["eval.every"] for run in runs})
        seen = "" if every == [1] else f" (evaluated every {' or '.join(map(str, every))} rounds)"
        given = "" if comparison.target_given else "; every run reaches this accuracy"
        unreached = any("rounds_to_target" not in row.figures for row in comparison.rows)
        dash = "; — if a seed does not reach it" if unreached else ""
        yield f"to {comparison.target:g}: up to the first round with at least this mean accuracy{seen}{given}{dash}"
    for group in comparison.groups:
        for run in group.left_out:
            yield f"left out, because it repeats another run with the same settings and seed: {run.folder}"
    for objection in (*comparison.objections, *incomplete(runs)):
        yield f"CAUTION: {objection}"


def paired_notes(comparison: Comparison) -> Iterator[str]:
    """Yield the lines below the table of differences."""
    tested = [d for d in comparison.differences if d.p is not None]
    holm = f", Holm-corrected for {len(tested)} comparisons" if len(tested) > 1 else ""
    yield f"difference: mean over pairs (client, seed) of accuracy minus that of {comparison.reference.label}"
    yield f"95% interval: bootstrap over pairs (BCa); p: Wilcoxon's signed-rank test{holm}"
    yield "both treat the clients of a seed as independent, so they understate the variation between seeds"


def numbers(values: Sequence[int]) -> str:
    """Format ascending numbers, three or more in sequence as a range: `0–2,5`."""
    stretches: list[list[int]] = []
    for value in values:
        if stretches and value == stretches[-1][-1] + 1:
            stretches[-1].append(value)
        else:
            stretches.append([value])
    return ",".join(f"{s[0]}–{s[-1]}" if len(s) > 2 else ",".join(map(str, s)) for s in stretches)
