"""Titles and notes of the tables of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.results import Run
from pflsim.analysis.results.settings import run_settings
from pflsim.run_folder.summary import Choice
from pflsim.terminal.formats import plural

CHOSEN: dict[Choice, str] = {
    "best_val": "each seed's best by mean validation accuracy",
    "last": "the last evaluated round",
    "best_test_oracle": "each seed's best by mean test accuracy; this ORACLE selects on test data and overestimates "
    "the accuracy",
}


def title(comparison: Comparison) -> str:
    """Return what all runs have in common: `Test accuracy on digits, iid, 20 clients, mlp; 20 rounds, seeds 0–2`."""
    runs = comparison.runs
    data, clients, rounds = (_common(runs, key) for key in ("data", "clients", "rounds_planned"))
    seeds = {group.seeds for group in comparison.groups}
    first = comparison.groups[0].seeds
    what = [
        f"Test accuracy on {data}" if data else "Test accuracy",
        _common(runs, "partition"),
        clients and plural(clients, "client"),
        _common(runs, "model"),
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
    yield f"accuracy: mean test accuracy over {_clients(runs)}{spread}"
    yield "worst decile: mean accuracy of the 10% of clients with the lowest accuracy"
    yield "reported model: the method's choice; trained: after local training; received: as sent by the server"
    yield f"round: {CHOSEN[comparison.choice]}"
    yield "traffic: bytes of all clients in both directions, up to that round and in the whole run"
    if comparison.target is not None:
        every = sorted({run_settings(run)["eval.every"] for run in runs})
        seen = "" if every == [1] else f" (evaluated every {' or '.join(map(str, every))} rounds)"
        given = "" if comparison.target_given else "; every run reaches this accuracy"
        unreached = any(row.rounds_to_target is None for row in comparison.rows)
        dash = "; — if a seed does not reach it" if unreached else ""
        yield f"to {comparison.target:g}: up to the first round with at least this mean accuracy{seen}{given}{dash}"
    for group in comparison.groups:
        for run in group.left_out:
            yield f"left out, because it repeats another run with the same settings and seed: {run.folder}"
    for objection in comparison.objections:
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


def listed(words: Sequence[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else ""


def _common(runs: Sequence[Run], key: str) -> Any:
    """Return the value that all runs' summaries have; None if they differ."""
    values = {run.summary[key] for run in runs}
    return values.pop() if len(values) == 1 else None


def _clients(runs: Sequence[Run]) -> str:
    on = {run.summary["accuracy_of"]["clients"] for run in runs}
    which = {"all": "clients", "participants": "the participants of the round"}
    text = which[on.pop()] if len(on) == 1 else "the evaluated clients"
    return f"{text}, without newcomers" if any(run.summary.get("newcomers") for run in runs) else text
