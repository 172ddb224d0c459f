"""What a comparison's tables are called, and what is to be said below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.results import Run
from pflsim.analysis.results.settings import run_settings
from pflsim.run_folder.summary import Choice

CHOSEN: dict[Choice, str] = {
    "best_val": "each seed's best by mean validation accuracy",
    "last": "the last",
    "best_test_oracle": "each seed's best by mean test accuracy, an ORACLE's choice: it was made by looking at the "
    "test data, so the figures are no estimate of anything",
}


def title(comparison: Comparison) -> str:
    """What all runs have in common: `Test accuracy on digits, iid, 20 clients, mlp; 20 rounds, seeds 0–2`."""
    runs = _runs(comparison)
    clients, rounds = _common(runs, "clients"), _common(runs, "rounds_planned")
    seeds = {group.seeds for group in comparison.groups}
    same = f"seed{'s' if len(comparison.groups[0].seeds) > 1 else ''} {numbers(*seeds)}" if len(seeds) == 1 else None
    data = _common(runs, "data")
    what = [
        f"Test accuracy on {data}" if data else "Test accuracy",
        _common(runs, "partition"),
        clients and plural(clients, "client"),
        _common(runs, "model"),
    ]
    how = [rounds and plural(rounds, "round"), same]
    parts = [", ".join(str(word) for word in words if word) for words in (what, how)]
    return "; ".join(part for part in parts if part)


def notes(comparison: Comparison) -> Iterator[str]:
    """Lines below the table of the groups: what the figures are."""
    runs = _runs(comparison)
    several = any(len(group.runs) > 1 for group in comparison.groups)
    spread = "; ± sample standard deviation over seeds" if several else ""
    yield f"accuracy: mean over {_whom(runs)} of each one's test accuracy{spread}"
    yield "worst decile: mean of the worst tenth of them"
    yield "judged model: what a method is judged by; trained: after local training, received: as the server sends it"
    yield f"round: {CHOSEN[comparison.choice]}"
    yield "traffic: up and down, all clients together, until that round and in all rounds"
    if comparison.target is not None:
        given = "" if comparison.target_given else "; it is what every run reaches, rounded down"
        unreached = any(row.rounds_to_target is None for row in comparison.rows)
        dash = "; — where not every seed gets there" if unreached else ""
        yield f"to {comparison.target:g}: until mean test accuracy is first as high{_seen(runs)}{given}{dash}"
    for group in comparison.groups:
        for run in group.left_out:
            yield f"left out, since another run with these settings and this seed says the same: {run.folder}"
    for objection in comparison.objections:
        yield f"CAUTION: {objection}"


def paired_notes(comparison: Comparison) -> Iterator[str]:
    """Lines below the table of differences."""
    reference = comparison.reference.label
    tested = [d for d in comparison.differences if d.p is not None]
    yield f"difference: mean over pairs (client, seed) of accuracy less that with {reference}, each at its round above"
    holm = f", Holm-corrected for {len(tested)} comparisons" if len(tested) > 1 else ""
    yield f"95% interval: bootstrap of the pairs (BCa); p: Wilcoxon's signed-rank test{holm}"
    yield "pairs of a seed come from one training, which neither allows for: about other seeds both are too sure"


def numbers(values: Sequence[int]) -> str:
    """Ascending numbers, three or more in sequence as a range: `0–2,5`."""
    stretches: list[list[int]] = []
    for value in values:
        if stretches and value == stretches[-1][-1] + 1:
            stretches[-1].append(value)
        else:
            stretches.append([value])
    parts = [[f"{s[0]}–{s[-1]}"] if len(s) > 2 else [str(value) for value in s] for s in stretches]
    return ",".join(text for part in parts for text in part)


def _runs(comparison: Comparison) -> list[Run]:
    return [run for group in comparison.groups for run in group.runs]


def _common(runs: Sequence[Run], key: str) -> Any:
    """What all runs' summaries say; None where they differ."""
    values = {run.summary[key] for run in runs}
    return values.pop() if len(values) == 1 else None


def plural(count: int, name: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _whom(runs: Sequence[Run]) -> str:
    """On whom the judged models are evaluated."""
    on = {run.summary["accuracy_of"]["clients"] for run in runs}
    held = any(run.summary.get("newcomers") for run in runs)
    whom = "clients" if on == {"all"} else "the round's participants" if on == {"participants"} else "those evaluated"
    return f"{whom} (newcomers are left out)" if held else whom


def _seen(runs: Sequence[Run]) -> str:
    every = sorted({run_settings(run)["eval.every"] for run in runs})
    return "" if every == [1] else f" (looked at every {' or '.join(map(str, every))} rounds)"
