"""Taking up a run where it was left: what there is to build on, and the files cut back to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflsim.run_folder.accounting import Ledger
from pflsim.run_folder.diagnostics import cut_diagnostics
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.tracking import event_files, records


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the sessions before left: nothing, for a new run.

    Args:
        history, ledger: of the rounds that stay.
        seconds: wall seconds spent so far, those on rounds that are lost included.
        peak_mb: the most memory, MB of 10⁶ bytes.
        resumed_after: after which rounds the run was continued before this.
        restarts: how many actors had to be replaced.
    """

    history: list[RoundMetrics]
    ledger: Ledger
    seconds: float = 0.0
    peak_mb: float = 0.0
    resumed_after: tuple[int, ...] = ()
    restarts: int = 0


def resumed(folder: Path, after: int) -> Earlier:
    """Cut metrics.jsonl, per_client.csv, the curves and the matrices back to a round, and say what stays.

    All is read and checked before anything is cut; each file is replaced at once, so that a run that is ended in the
    middle of this can be taken up again.

    Raises:
        SettingsError: the files have not all rounds up to that one, or are not what this version writes.
    """
    found = records.read_records(folder)
    kept = found.until(after)
    summary = _summary(folder)
    seconds, done = summary.get("seconds", 0.0), summary.get("rounds", -1) if "seconds" in summary else -1
    lines = (*kept.history, *kept.lost)
    earlier = Earlier(
        history=list(kept.history),
        ledger=kept.ledger(),
        seconds=seconds + sum(line.total_seconds for line in lines if line.round > done),
        peak_mb=summary.get("peak_rss_mb", 0.0),
        resumed_after=tuple(summary.get("resumed_after", ())),
        restarts=summary.get("actor_restarts", 0),
    )
    records.cut(folder, kept)
    event_files.cut(folder / "tb", kept.history)
    cut_diagnostics(folder, after)
    return earlier


def _summary(folder: Path) -> dict[str, Any]:
    """summary.json of the session before, empty where there is none or it cannot be read."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = {"seconds": (int, float), "peak_rss_mb": (int, float), "rounds": int, "actor_restarts": int}
    if not isinstance(found, dict) or any(not isinstance(found.get(key, 0), kind) for key, kind in known.items()):
        return {}
    after = found.get("resumed_after", [])
    fits = isinstance(after, list) and all(isinstance(number, int) for number in after)
    return found if fits else {}
