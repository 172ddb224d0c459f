"""A run from where it is begun or taken up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pflsim.engine.execution import Executor
from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint import Checkpoint, check_header, newest_checkpoint
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.remote_copy.remote_copy import RemoteCopy
from pflsim.run_folder.tracking.records import read_records
from ray_actors.prepare import PreparedRun


@dataclass(frozen=True, slots=True)
class Session:
    """A run from where it is begun or taken up.

    Args:
        job: the run.
        folder: its folder.
        journal: in that folder.
        take_up: whether there was a session before.
        checkpoint: where it goes on; None: at the beginning.
        remote_copy: keeps the folder elsewhere too; None: it is kept in its folder alone.
    """

    job: PreparedRun
    folder: Path
    journal: Journal
    resumed: bool = False
    checkpoint: Checkpoint | None = None
    remote_copy: RemoteCopy | None = None

    @property
    def done(self) -> int | None:
        """The last round that is done; None where not even the opening is."""
        return None if self.checkpoint is None else self.checkpoint.round

    @property
    def resume_after(self) -> int | None:
        """The last round whose records stay, -1 for none of them; None where there are no records."""
        if not self.resumed or not _has_records(self.folder):
            return None
        return -1 if self.done is None else self.done

    def restore(self, executor: Executor) -> None:
        """Give the executor the states that the run goes on with.

        Raises:
            SettingsError: they are not of this version of the method.
        """
        if self.checkpoint is not None:
            try:
                executor.restore(self.checkpoint.server(), self.checkpoint.clients())
            except ValueError as error:
                raise SettingsError(f"{self.checkpoint.path} does not fit this run: {error}") from error


def resume_point(job: PreparedRun, folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole and whose rounds are in the records; None: begin again.

    Args:
        job: the run.
        folder: its folder, in which no result is touched.
        report: called with one line for each thing that is not as it was.

    Raises:
        SettingsError: it is of another run.
    """
    records = read_records(folder) if _has_records(folder) else None
    until = -1 if records is None else records.last
    found = newest_checkpoint(folder / "checkpoints", report, until)
    if (
        found is None
        and any((folder / "checkpoints").glob("round_*"))
        and newest_checkpoint(folder / "checkpoints", lambda line: None)
    ):
        why = f" ({records.reason})" if records is not None and records.reason else ""
        raise SettingsError(
            f"metrics.jsonl and per_client.csv of {folder} are whole up to round {max(until, 0)} only{why}, and all "
            f"checkpoints are later: bring the files back, or remove {folder / 'checkpoints'} to begin again"
        )
    if found is None:
        report(f"{folder} has no checkpoint to go on from: the run begins again")
    else:
        check_header(found, {"method": job.plan.method, **(job.plan.header or {})}, report)
    return found


def _has_records(folder: Path) -> bool:
    """Whether a round was written down."""
    lines = folder / "metrics.jsonl"
    return lines.exists() and lines.stat().st_size > 0


def remove_empty_records(folder: Path) -> None:
    """A run that was killed before its first round has begun its files perhaps; they are begun again."""
    if not _has_records(folder):
        for path in (folder / "metrics.jsonl", folder / "per_client.csv"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder / "tb", ignore_errors=True)
