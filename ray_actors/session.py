"""One session of a run: from its beginning, or from the checkpoint at which it resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pflsim.engine.execution import Executor
from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint import Checkpoint, check_header, newest_checkpoint
from pflsim.run_folder.remote_copy.remote_copy import RemoteCopy
from pflsim.run_folder.tracking.records import read_records
from ray_actors.prepare import PreparedRun


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a run.

    Args:
        job: the run.
        folder: its run folder.
        resumed: whether there was an earlier session.
        checkpoint: where the run resumes; None: at the beginning.
        remote_copy: copies the run folder to a URL; None: there is no copy.
    """

    job: PreparedRun
    folder: Path
    resumed: bool = False
    checkpoint: Checkpoint | None = None
    remote_copy: RemoteCopy | None = None

    @property
    def done(self) -> int | None:
        """The last finished round; None: no round."""
        return None if self.checkpoint is None else self.checkpoint.round

    @property
    def resume_after(self) -> int | None:
        """The last round whose records are kept, -1 if none are; None: there are no records."""
        if not self.resumed or not _has_records(self.folder):
            return None
        return -1 if self.done is None else self.done

    def restore(self, executor: Executor) -> None:
        """Load the checkpoint into the executor.

        Raises:
            SettingsError: the checkpoint is of another version of the method.
        """
        if self.checkpoint is not None:
            try:
                executor.restore(self.checkpoint.server(), self.checkpoint.clients())
            except ValueError as error:
                raise SettingsError(f"{self.checkpoint.path} does not fit this run: {error}") from error


def resume_point(job: PreparedRun, folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest complete checkpoint whose rounds are in the records; None: the run starts from the beginning.

    Args:
        job: the run.
        folder: its run folder; nothing in it is changed.
        report: called with a line for each difference and each damaged file.

    Raises:
        SettingsError: the checkpoint is of another run, or the records of all checkpoints' rounds are lost.
    """
    records = read_records(folder) if _has_records(folder) else None
    until, checkpoints = -1 if records is None else records.last, folder / "checkpoints"
    found = newest_checkpoint(checkpoints, report, until)
    if found is not None:
        check_header(found, {"method": job.plan.method, **(job.plan.header or {})}, report)
        return found
    if any(checkpoints.glob("round_*")) and newest_checkpoint(checkpoints, lambda line: None):
        why = f" ({records.reason})" if records is not None and records.reason else ""
        raise SettingsError(
            f"metrics.jsonl and per_client.csv of {folder} are complete up to round {max(until, 0)} only{why}, and all "
            f"checkpoints are later: restore these files, or remove {checkpoints} to start from the beginning"
        )
    report(f"{folder} has no checkpoint to resume from: the run starts from the beginning")
    return None


def _has_records(folder: Path) -> bool:
    """Return whether the folder has the record of a round."""
    lines = folder / "metrics.jsonl"
    return lines.exists() and lines.stat().st_size > 0


def remove_empty_records(folder: Path) -> None:
    """Remove the files that a run without a finished round has left; they are created again."""
    if not _has_records(folder):
        for path in (folder / "metrics.jsonl", folder / "per_client.csv"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder / "tb", ignore_errors=True)
