"""Where a run resumes: its newest usable checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint.meta import Checkpoint
from pflsim.run_folder.checkpoint.read import check_header, newest_checkpoint
from pflsim.run_folder.tracking.records import read_records
from ray_actors.prepare import PreparedRun


def resume_point(prepared: PreparedRun, folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest complete checkpoint whose rounds are in the records; None: the run starts from the beginning.

    Args:
        prepared: the run.
        folder: its run folder; nothing in it is changed.
        report: called with a line for each difference and each damaged file.

    Raises:
        SettingsError: the checkpoint is of another run, or the records of all checkpoints' rounds are lost.
    """
    records = read_records(folder) if has_records(folder) else None
    until, checkpoints = -1 if records is None else records.last, folder / "checkpoints"
    found = newest_checkpoint(checkpoints, report, until)
    if found is not None:
        check_header(found, {"method": prepared.plan.method, **(prepared.plan.header or {})}, report)
        return found
    if any(checkpoints.glob("round_*")) and newest_checkpoint(checkpoints, lambda line: None):
        why = f" ({records.reason})" if records is not None and records.reason else ""
        raise SettingsError(
            f"metrics.jsonl and per_client.csv of {folder} are complete up to round {max(until, 0)} only{why}, and all "
            f"checkpoints are later: restore these files, or remove {checkpoints} to start from the beginning"
        )
    report(f"{folder} has no checkpoint to resume from: the run starts from the beginning")
    return None


def has_records(folder: Path) -> bool:
    """Return whether the folder has the record of a round."""
    lines = folder / "metrics.jsonl"
    return lines.exists() and lines.stat().st_size > 0


def remove_empty_records(folder: Path) -> None:
    """Remove the files that a run without a finished round has left; they are created again."""
    if not has_records(folder):
        for path in (folder / "metrics.jsonl", folder / "per_client.csv"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder / "tb", ignore_errors=True)  # of older versions
        for path in folder.glob("*tfevents*"):
            path.unlink()
