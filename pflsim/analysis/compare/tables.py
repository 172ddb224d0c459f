"""A comparison as tables of cells, and as one record a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.paired import Difference
from pflsim.analysis.compare.rows import Row, Spread
from pflsim.analysis.compare.words import notes, numbers, paired_notes, title
from pflsim.analysis.results.settings import written

UNITS = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9))
NONE = "—"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells with what is said above and below them; the first column is text, the others are figures.

    A header may have several lines.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def tables(comparison: Comparison) -> list[Table]:
    """The groups' figures and, where there is something to compare, their differences."""
    found = [figures(comparison)]
    if comparison.differences:
        found.append(paired(comparison))
    return found


def figures(comparison: Comparison) -> Table:
    """A line for each group."""
    rows, target = comparison.rows, comparison.target
    unit, scale = _unit(rows)
    columns: list[tuple[str, list[str]]] = [
        ("method", [row.group.label for row in rows]),
        ("reported\nmodel", [f"{row.reported.model}, {row.reported.phase}" for row in rows]),
    ]
    if len({row.group.seeds for row in rows}) > 1:
        columns.append(("seeds", [numbers(row.group.seeds) for row in rows]))
    columns += [
        ("round" + "\n(oracle)" * (comparison.choice == "best_test_oracle"), [_rounds(row) for row in rows]),
        ("accuracy", [_rate(row.accuracy) for row in rows]),
        ("worst\ndecile", [_rate(row.worst_decile) for row in rows]),
        (f"{unit} until\nthat round", [_mean_bytes(row.bytes_then, scale) for row in rows]),
        (f"{unit}\nin all", [_mean_bytes(row.bytes_total, scale) for row in rows]),
    ]
    if target is not None:
        columns += [
            (f"rounds\nto {target:g}", [_number(row.rounds_to_target) for row in rows]),
            (f"{unit}\nto {target:g}", [_bytes(row.bytes_to_target, scale) for row in rows]),
        ]
    headers, cells = zip(*columns, strict=True)
    return Table(title(comparison), headers, tuple(zip(*cells, strict=True)), tuple(notes(comparison)))


def paired(comparison: Comparison) -> Table:
    """A line for each difference."""
    several = sum(d.p is not None for d in comparison.differences) > 1
    p = "p (Holm)" if several else "p"
    headers = ("method", "pairs", "difference", "95% interval", "better", "equal", "worse", p)
    return Table(
        f"Differences to {comparison.reference.label}, client by client",
        headers,
        tuple(_paired(difference) for difference in comparison.differences),
        tuple(paired_notes(comparison)),
    )


def _paired(d: Difference) -> tuple[str, ...]:
    interval = NONE if d.low is None or d.high is None else f"[{_signed(d.low)}, {_signed(d.high)}]"
    mean = NONE if d.mean is None else _signed(d.mean)
    counts = (str(n) for n in (d.better, d.equal, d.worse))
    return (d.group.label, str(d.pairs), mean, interval, *counts, NONE if d.p_holm is None else _p(d.p_holm))


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Plain numbers, one record a group, with the same keys in all of them; None where there is nothing."""
    against = {d.group.label: d for d in comparison.differences}
    settings = dict.fromkeys(key for group in comparison.groups for key in group.settings)
    return [_record(comparison, row, against.get(row.group.label), list(settings)) for row in comparison.rows]


def _record(comparison: Comparison, row: Row, d: Difference | None, settings: list[str]) -> dict[str, Any]:
    group = row.group
    given = {key: written(group.settings[key]) if key in group.settings else None for key in settings}
    return {
        "label": group.label,
        "method": group.method,
        **given,
        "reported_model": row.reported.model,
        "reported_phase": row.reported.phase,
        "runs": len(group.runs),
        "seeds": " ".join(map(str, group.seeds)),
        "complete": written(group.complete),
        "round_chosen_by": comparison.choice,
        **_columns("round", Spread(row.rounds) if row.rounds else None),
        **_columns("accuracy", row.accuracy),
        **_columns("worst_decile", row.worst_decile),
        **_columns("best_decile", row.best_decile),
        **_columns("bytes_until_round", row.bytes_then),
        **_columns("bytes_total", row.bytes_total),
        "target": comparison.target,
        "seeds_reaching_target": row.reached,
        **_columns("rounds_to_target", row.rounds_to_target),
        **_columns("bytes_to_target", row.bytes_to_target),
        "reference": comparison.reference.label if d else None,
        "pairs": d.pairs if d else None,
        "difference_mean": d.mean if d else None,
        "difference_low": d.low if d else None,
        "difference_high": d.high if d else None,
        "better": d.better if d else None,
        "equal": d.equal if d else None,
        "worse": d.worse if d else None,
        "p": d.p if d else None,
        "p_holm": d.p_holm if d else None,
    }


def _columns(name: str, spread: Spread | None) -> dict[str, float | None]:
    return {f"{name}_mean": spread and spread.mean, f"{name}_std": spread and spread.std}


# Cells ----------------------------------------------------------------------------------------------------------------


def _rounds(row: Row) -> str:
    if not row.rounds:
        return NONE
    first, last = min(row.rounds), max(row.rounds)
    return str(first) if first == last else f"{first}–{last}"


def _rate(spread: Spread | None) -> str:
    return _spread(spread, 3)


def _spread(spread: Spread | None, decimals: int, scale: float = 1) -> str:
    if spread is None:
        return NONE
    mean = f"{spread.mean / scale:.{decimals}f}"
    return mean if spread.std is None else f"{mean} ± {spread.std / scale:.{decimals}f}"


def _number(spread: Spread | None) -> str:
    """Of whole numbers."""
    return _spread(spread, 0 if spread is not None and spread.std is None else 1)


def _bytes(spread: Spread | None, scale: float) -> str:
    return NONE if spread is None else _spread(spread, _decimals(spread.mean / scale), scale)


def _mean_bytes(spread: Spread | None, scale: float) -> str:
    return NONE if spread is None else _bytes(Spread((spread.mean,)), scale)


def _decimals(value: float) -> int:
    """Three digits, but at most three behind the point."""
    return 0 if value == 0 or value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3


def _unit(rows: tuple[Row, ...]) -> tuple[str, float]:
    """One unit for all: the smallest in which no figure has more than four digits."""
    most = max(row.bytes_total.mean for row in rows)
    return next((unit for unit in UNITS if most / unit[1] < 9999.5), UNITS[-1])


def _signed(value: float) -> str:
    text = f"{value:+.4f}"
    return "0.0000" if float(text) == 0 else text


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0095 else f"{value:.2g}"
