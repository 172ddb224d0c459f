"""Prepares the records in a run folder for a resumed session."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pflsim.run_folder.accounting import Ledger
from pflsim.run_folder.diagnostics import cut_diagnostics
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.tracking import event_files, records


@dataclass(frozen=True, slots=True)
class Earlier:
    """The records of earlier sessions; empty for a new run.

    Args:
        history: the metrics of the rounds that are kept.
        ledger: the traffic of the rounds that are kept.
        seconds: wall seconds, including rounds that are not kept.
        peak_mb: the peak memory, in MB (10⁶ bytes).
        resumed_after: the rounds after which earlier sessions resumed.
        restarts: the number of actors that were replaced.
    """

    history: list[RoundMetrics] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0
    peak_mb: float = 0.0
    resumed_after: tuple[int, ...] = ()
    restarts: int = 0


def resumed(folder: Path, after: int) -> Earlier:
    """Truncate metrics.jsonl, per_client.csv, event files and diagnostics after a round, and return what is kept.

    Reads and checks all records first, and replaces each file atomically. A run that is interrupted meanwhile can be
    resumed again.

    Raises:
        SettingsError: records of rounds up to `after` are missing, or were written by another version.
    """
    kept = records.read_records(folder).until(after)
    summary = _summary(folder)
    seconds, summarised = summary.get("seconds", 0.0), summary.get("rounds", -1) if "seconds" in summary else -1
    lines = (*kept.history, *kept.lost)
    earlier = Earlier(
        history=list(kept.history),
        ledger=kept.ledger(),
        seconds=seconds + sum(line.total_seconds for line in lines if line.round > summarised),
        peak_mb=summary.get("peak_rss_mb", 0.0),
        resumed_after=tuple(summary.get("resumed_after", ())),
        restarts=summary.get("actor_restarts", 0),
    )
    records.cut(folder, kept)
    event_files.cut(folder / "tb", kept.history)
    cut_diagnostics(folder, after)
    return earlier


def _summary(folder: Path) -> dict[str, Any]:
    """Return summary.json of the previous session; empty if it is missing or invalid."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    types = {"seconds": (int, float), "peak_rss_mb": (int, float), "rounds": int, "actor_restarts": int}
    if not isinstance(found, dict) or any(not isinstance(found.get(key, 0), kind) for key, kind in types.items()):
        return {}
    after = found.get("resumed_after", [])
    return found if isinstance(after, list) and all(isinstance(number, int) for number in after) else {}
