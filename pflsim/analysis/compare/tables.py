"""A comparison as tables of text cells, and as records of plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.paired import Difference
from pflsim.analysis.compare.rows import Row, Spread
from pflsim.analysis.compare.words import notes, numbers, paired_notes, title
from pflsim.analysis.results.settings import written
from pflsim.terminal.formats import byte_unit

NONE = "—"


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
    unit, scale = byte_unit(max(row.bytes_total.mean for row in rows))
    columns: list[tuple[str, list[str]]] = [
        ("method", [row.group.label for row in rows]),
        ("reported\nmodel", [f"{row.scope.model}, {row.scope.phase}" for row in rows]),
    ]
    if len({row.group.seeds for row in rows}) > 1:
        columns.append(("seeds", [numbers(row.group.seeds) for row in rows]))
    columns += [
        ("round" + "\n(oracle)" * (comparison.choice == "best_test_oracle"), [_rounds(row) for row in rows]),
        ("accuracy", [_spread(row.stats.get("mean"), 3) for row in rows]),
        ("worst\ndecile", [_spread(row.stats.get("worst_decile"), 3) for row in rows]),
        (f"{unit} until\nthat round", [_mean_bytes(row.bytes_then, scale) for row in rows]),
        (f"{unit}\nin all", [_mean_bytes(row.bytes_total, scale) for row in rows]),
    ]
    if target is not None:
        columns += [
            (f"rounds\nto {target:g}", [_count(row.rounds_to_target) for row in rows]),
            (f"{unit}\nto {target:g}", [_bytes(row.bytes_to_target, scale) for row in rows]),
        ]
    headers, cells = zip(*columns, strict=True)
    return Table(title(comparison), headers, tuple(zip(*cells, strict=True)), tuple(notes(comparison)))


def paired(comparison: Comparison) -> Table:
    """Return a table with one line per difference."""
    several = sum(d.p is not None for d in comparison.differences) > 1
    p = "p (Holm)" if several else "p"
    return Table(
        f"Differences to {comparison.reference.label}, client by client",
        ("method", "pairs", "difference", "95% interval", "better", "equal", "worse", p),
        tuple(_paired(difference) for difference in comparison.differences),
        tuple(paired_notes(comparison)),
    )


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one record of plain numbers per group, all with the same keys; a missing value is None."""
    by_label = {d.group.label: d for d in comparison.differences}
    settings = dict.fromkeys(key for group in comparison.groups for key in group.settings)
    return [_record(comparison, row, by_label.get(row.group.label), list(settings)) for row in comparison.rows]


def _record(comparison: Comparison, row: Row, d: Difference | None, settings: list[str]) -> dict[str, Any]:
    group = row.group
    return {
        "label": group.label,
        "method": group.method,
        **{key: written(group.settings[key]) if key in group.settings else None for key in settings},
        "reported_model": row.scope.model,
        "reported_phase": row.scope.phase,
        "runs": len(group.runs),
        "seeds": " ".join(map(str, group.seeds)),
        "complete": written(group.complete),
        "round_chosen_by": comparison.choice,
        **_columns("round", Spread(row.rounds) if row.rounds else None),
        **_columns("accuracy", row.stats.get("mean")),
        **_columns("worst_decile", row.stats.get("worst_decile")),
        **_columns("best_decile", row.stats.get("best_decile")),
        **_columns("bytes_until_round", row.bytes_then),
        **_columns("bytes_total", row.bytes_total),
        "target": comparison.target,
        "seeds_reaching_target": row.reached,
        **_columns("rounds_to_target", row.rounds_to_target),
        **_columns("bytes_to_target", row.bytes_to_target),
        "reference": comparison.reference.label if d else None,
        "pairs": d and d.pairs,
        **{f"difference_{name}": getattr(d, name, None) for name in ("mean", "low", "high")},
        **{name: getattr(d, name, None) for name in ("better", "equal", "worse", "p", "p_holm")},
    }


def _columns(name: str, spread: Spread | None) -> dict[str, float | None]:
    return {f"{name}_mean": spread and spread.mean, f"{name}_std": spread and spread.std}


def _paired(d: Difference) -> tuple[str, ...]:
    interval = NONE if d.low is None or d.high is None else f"[{_signed(d.low)}, {_signed(d.high)}]"
    mean = NONE if d.mean is None else _signed(d.mean)
    p = NONE if d.p_holm is None else f"{d.p_holm:.3f}" if d.p_holm >= 0.0095 else f"{d.p_holm:.2g}"
    return (d.group.label, str(d.pairs), mean, interval, str(d.better), str(d.equal), str(d.worse), p)


def _rounds(row: Row) -> str:
    if not row.rounds:
        return NONE
    first, last = min(row.rounds), max(row.rounds)
    return str(first) if first == last else f"{first}–{last}"


def _spread(spread: Spread | None, decimals: int, scale: float = 1) -> str:
    if spread is None:
        return NONE
    mean = f"{spread.mean / scale:.{decimals}f}"
    return mean if spread.std is None else f"{mean} ± {spread.std / scale:.{decimals}f}"


def _count(spread: Spread | None) -> str:
    return _spread(spread, 0 if spread is not None and spread.std is None else 1)


def _bytes(spread: Spread | None, scale: float) -> str:
    """Format with three digits, but at most three after the decimal point."""
    if spread is None:
        return NONE
    value = spread.mean / scale
    decimals = 0 if value == 0 or value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return _spread(spread, decimals, scale)


def _mean_bytes(spread: Spread | None, scale: float) -> str:
    return NONE if spread is None else _bytes(Spread((spread.mean,)), scale)


def _signed(value: float) -> str:
    text = f"{value:+.4f}"
    return "0.0000" if float(text) == 0 else text
