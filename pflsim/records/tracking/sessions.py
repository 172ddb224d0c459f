"""Prepares the records in a run folder for a resumed session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pflsim.errors import SettingsError
from pflsim.records.diagnostics import cut_diagnostics
from pflsim.records.summary import RunMeta, Summary
from pflsim.records.tracking import records


def resumed(folder: Path, meta: RunMeta, after: int) -> Summary:
    """Truncate metrics.jsonl, per_client.csv and diagnostics after a round, and return what is kept.

    The summary's seconds include rounds that are not kept, and its `resumed_after` the round of this session. Reads and
    checks all records first, and replaces each file atomically. A run that is interrupted meanwhile can be resumed
    again.

    Raises:
        SettingsError: records of rounds up to `after` are missing, or were written by another version.
    """
    found = records.read_records(folder)
    if found.last < after:
        raise SettingsError(
            f"the run cannot resume after round {after}: {records.METRICS} and {records.PER_CLIENT} are complete up to "
            f"round {found.last} only{f' ({found.reason})' if found.reason else ''}"
        )
    history, summary = [metrics for metrics in found.history if metrics.round <= after], _summary(folder)
    later = (metrics for metrics in found.lines if metrics.round > summary["rounds"])
    seconds = summary["seconds"] + sum(metrics.total_seconds for metrics in later)
    records.cut(folder, found.ends[len(history)])
    cut_diagnostics(folder, after)
    resumed_after = *summary["resumed_after"], after
    kept = {key: summary[key] for key in ("peak_rss_mb", "actor_restarts", "warnings")}
    return Summary(meta, history, False, seconds, resumed_after=resumed_after, **kept)


def _summary(folder: Path) -> dict[str, Any]:
    """Return the entries of the previous session's summary.json; the defaults if it is missing or invalid."""
    default = {
        "rounds": -1,
        "seconds": 0.0,
        "peak_rss_mb": 0.0,
        "resumed_after": (),
        "actor_restarts": 0,
        "warnings": (),
    }
    try:
        found = {**default, **json.loads((folder / "summary.json").read_text(encoding="utf-8"))}
        return {key: type(value)(found[key]) for key, value in default.items()}
    except (OSError, ValueError, TypeError):
        return default
