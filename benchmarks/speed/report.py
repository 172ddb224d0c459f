"""Writes the tables of docs/performance.md from the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.cases import BASELINES, CASES, OURS, WAYS
from benchmarks.speed import per_client
from benchmarks.speed.results import Results, growth, middle_rates
from benchmarks.speed.targets import verdicts

EMPTY = "not measured yet"
COMPARED = [name for name, case in CASES.items() if "plain" in case.ways]
PACKAGES = ("python", "torch", "lightning", "ray", "numpy")


def tables(results: Results) -> dict[str, str]:
    """Return all tables by the name of their place in the page."""
    return {
        "machine": machine(results),
        "targets": targets(results),
        "seconds": across(results, lambda case, way: _number(results.seconds(case, way))),
        "memory": across(results, lambda case, way: _figure(results, case, way, "peak_mb", 1e-3)),
        "work": work(results),
        "further": further(results),
    }


def put(text: str, made: dict[str, str]) -> str:
    """Return the text with each table between its markers.

    Raises:
        ValueError: the markers of a table are missing, or occur twice.
    """
    for name, table in made.items():
        begin, end = f"<!-- bench:{name}:begin -->", f"<!-- bench:{name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected {begin} and {end} once each")
        text = re.sub(
            f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, t=f"{begin}\n{table}\n{end}": t, text, flags=re.S
        )
    return text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, or `EMPTY` without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *lines]) if lines else EMPTY


def machine(results: Results) -> str:
    """Return the table of the machine and the versions."""
    if not results.environment:
        return EMPTY
    machine, versions = results.environment["machine"], results.environment["versions"]
    every = [found for ways in results.cases.values() for found in ways.values()]
    commits = {str(found["commit"])[:7] + (" and changes" if found["dirty"] else "") for found in every}
    days = sorted({found["at"][:10] for found in every})
    rates = {
        f"float32 matrix products, {words}": f"{middle:.0f} GFLOP/s (between cases {low:.0f} to {high:.0f})"
        for (middle, low, high), words in zip(middle_rates(results).values(), ("one core", "two at once"), strict=False)
    }
    rows = {
        "commit": ", ".join(sorted(commits)),
        "date": ", ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        "processor": f"{machine['processor']}, {machine['cpus_usable']} cores",
        "memory": f"{machine['memory_mb'] / 1e3:.0f} GB",
        "versions": ", ".join(f"{name} {versions[name]}" for name in PACKAGES),
        **rates,
    }
    return table(("what", ""), rows.items())


def targets(results: Results) -> str:
    """Return the table of the targets."""
    if not results.cases:
        return EMPTY
    rows = []
    for v in verdicts(results):
        verdict = "met" if v.met else f"**missed** ({v.by:.2f} of it)" if v.measured else ""
        rows.append((v.what, v.target, v.measured or EMPTY, verdict))
    return table(("what", "target", "measured", ""), rows)


def across(results: Results, cell: Callable[[str, str], str]) -> str:
    """Return a table with a row per case and a column per way."""
    ways = [*BASELINES, *OURS, "bf16"]
    rows = [(name, *(cell(name, way) for way in ways)) for name in COMPARED if name in results.cases]
    return table(("case", *(WAYS[way] for way in ways)), rows)


def work(results: Results) -> str:
    """Return the table of the work in a round of each case."""
    rows = []
    for name in CASES:
        found = results.way(name, "ray2")
        if found is not None:
            middle = found["round"]
            counts = [f"{middle[key]:,.0f}" for key in ("steps", "examples", "evaluated")]
            figures = (
                found["gflop_train"],
                found["gflop_evaluate"],
                middle["up_bytes"] / 1e6,
                middle["down_bytes"] / 1e6,
            )
            rows.append((name, CASES[name].about, *counts, *map(_number, figures)))
    head = ("case", "what", "steps", "examples trained", "examples evaluated", "GFLOP training", "GFLOP evaluation")
    return table((*head, "MB up", "MB down"), rows)


def further(results: Results) -> str:
    """Return the table of memory growth, many clients, the server and the start."""
    rows = []
    for name in ("memory-mlp", "memory-cnn"):
        if (found := results.way(name, "ray2")) is not None:
            held, (slope, noise) = found["held_mb"], growth(found["held_mb"])
            what = f"{held[0]:.0f} MB after round 1, {held[-1]:.0f} MB after round {len(held)}"
            rows.append((CASES[name].about, f"{what}; {slope:+.2f} MB a round, noise {noise:.2f}; {_round(found)}"))
    for name in ("thousand", "pfedla"):
        if (found := results.way(name, "ray2")) is not None:
            server = f"server {found['round']['server'] / found['round']['total']:.0%} of it"
            rows.append((CASES[name].about, f"{_round(found)}, {server}; peak {found['peak_mb'] / 1e3:.2f} GB"))
    if (found := results.way("start", "start")) is not None:
        rows.append(("`launch.py --help`", f"{found['help']:.2f} s"))
        rows.append(
            ("20 clients on the digits, from launch to the first round's line", f"{found['first_round']:.1f} s")
        )
    small = results.way("per-client", "small") or {}
    for model in [name for name in per_client.MODELS if name in small]:
        parts = (f"{part} {_number(value)}" for part, value in small[model].items())
        rows.append((f"{CASES['per-client'].about}: {model}, ms and operations per client", ", ".join(parts)))
    rows += [(f"{case}, {WAYS[way]}", f"failed: {error.replace('|', '/')}") for case, way, error in results.errors()]
    return table(("what", "measured"), rows)


def _round(found: dict[str, Any]) -> str:
    return f"{_number(found['round']['total'])} s a round"


def _number(value: float | None) -> str:
    """Format with three digits."""
    if value is None:
        return ""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _figure(results: Results, case: str, way: str, key: str, scale: float = 1.0) -> str:
    found = results.way(case, way)
    return "" if found is None else _number(found[key] * scale)
