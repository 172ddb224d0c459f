"""The tracker: the one object, on the driver, that writes down what happened."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from pflsim.memory import MemorySampler
from pflsim.run_folder.accounting import Ledger
from pflsim.run_folder.diagnostics import Diagnostics, write_diagnostics
from pflsim.run_folder.history import RoundMetrics, round_metrics, to_line
from pflsim.run_folder.summary import NewcomerFigures, RunMeta, Summary, newcomer_figures, summarise, write_summary
from pflsim.run_folder.tracking.per_client import PerClientFile
from pflsim.run_folder.tracking.sessions import Earlier, resumed
from pflsim.run_folder.tracking.tensorboard import TensorBoard
from pflsim.types import NewcomerRecord, RoundRecord


class Tracker:
    """Writes metrics.jsonl, per_client.csv, views.safetensors, tb/ and summary.json of a run.

    As a context manager it closes itself: `complete` unless an exception leaves the block. Its memory is `history`
    (what metrics.jsonl says) and `ledger` (what per_client.csv says); nothing else decides the summary but the clock.

    Args:
        folder: the run folder, in which none of these files exists yet, unless a run is taken up.
        meta: what the figures are about.
        watch: called with every round's figures once they are written, e.g. `Console.round`.
        resume_after: take up the run in the folder after this round; what its files hold of later ones goes, and so
            do its newcomers.
        hyperparameters: the settings by dotted name, for TensorBoard's table of runs.
        per_client: whether every client gets curves of its own in TensorBoard.

    Raises:
        SettingsError: the files of a run to be taken up have not all rounds up to that one; nothing was changed.
    """

    def __init__(
        self,
        folder: Path,
        meta: RunMeta,
        watch: Callable[[RoundMetrics], None] | None = None,
        *,
        resume_after: int | None = None,
        hyperparameters: Mapping[str, bool | float | str] | None = None,
        per_client: bool = False,
    ):
        resumes = resume_after is not None
        self._earlier = resumed(folder, resume_after) if resumes else Earlier([], Ledger())
        self._resumed_after = (*self._earlier.resumed_after, resume_after) if resumes else ()
        self.folder, self.meta = folder, meta
        self.history = self._earlier.history
        self.ledger = self._earlier.ledger
        self.memory = MemorySampler()
        self._watch = watch
        self._start = time.perf_counter()
        self.rates: dict[int, float] = {}
        """Every client's test accuracy when it was judged last."""
        self.restarts = 0
        """How many actors had to be replaced in this session."""
        self._summary: Summary | None = None
        self._newcomers: NewcomerFigures | None = None
        write_summary(folder, self._summarised(complete=False))  # so that others know of this session however it ends
        self._lines = (folder / "metrics.jsonl").open("a" if resumes else "x", encoding="utf-8")
        self._per_client = PerClientFile(folder / "per_client.csv", append=resumes)
        self._tensorboard = TensorBoard(folder / "tb", resume_after, hyperparameters, per_client)

    def round(self, record: RoundRecord) -> RoundMetrics:
        """Write a round down and return its figures. Everything is on its way to the disk when this returns.

        Raises:
            ValueError: the round is not later than the one before.
        """
        if self.history and record.round <= self.history[-1].round:
            raise ValueError(f"round {record.round} comes after round {self.history[-1].round}")
        metrics = round_metrics(record, self.ledger.add(record), self.ledger.total)
        self._lines.write(to_line(metrics) + "\n")
        self._lines.flush()
        self._per_client.write(record)
        if record.diagnostics:
            write_diagnostics(self.folder, Diagnostics(record.round, record.diagnostics))
        self._tensorboard.write(record, metrics, self.memory.sample())
        self.rates = reported_rates(record, self.meta) or self.rates
        self.history.append(metrics)
        if self._watch is not None:
            self._watch(metrics)
        return metrics

    def sync(self) -> None:
        """Force the lines and rows so far to the disk: a checkpoint is of use only where they are not lost."""
        os.fsync(self._lines.fileno())
        self._per_client.sync()

    def restarted(self, restarts: int) -> None:
        """So many actors had to be replaced by now; written down at once, for this process may be killed too."""
        self.restarts = restarts
        if self._summary is None:
            with suppress(OSError):  # a full disk, for example
                write_summary(self.folder, self._summarised(complete=False))

    def newcomers(self, record: NewcomerRecord) -> NewcomerFigures:
        """Write down what newcomers came to and return it; it is no part of any other figure, nor of the traffic."""
        self._newcomers = newcomer_figures(record)
        self._per_client.write_newcomers(record)
        self._tensorboard.write_newcomers(self._newcomers, record.round)
        return self._newcomers

    def close(self, complete: bool) -> Summary:
        """Write summary.json and close the files; a second call changes nothing and returns the same summary.

        Args:
            complete: whether all that was planned is done; False after an interruption.
        """
        if self._summary is None:
            self.memory.sample(force=True)
            self._summary = self._summarised(complete)
            with ExitStack() as last:  # closed even where the disk is full
                for file in (self._per_client, self._lines):
                    last.callback(file.close)
                last.callback(self._tensorboard.close, self._summary)
                write_summary(self.folder, self._summary)
        return self._summary

    def _summarised(self, complete: bool) -> Summary:
        seconds = self._earlier.seconds + time.perf_counter() - self._start
        peak = max(self._earlier.peak_mb, self.memory.peak_mb)
        figures = summarise(self.meta, self.history, complete, seconds, peak, self._newcomers, self._resumed_after)
        return replace(figures, actor_restarts=self._earlier.restarts + self.restarts)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=kind is None)


def reported_rates(record: RoundRecord, meta: RunMeta) -> dict[int, float]:
    """Every client's test accuracy with the model that the method is judged by."""
    reported = meta.reported_model, meta.phase(meta.reported_model), "test"
    rows = [row for row in record.evaluations if (row.model, row.phase, row.split) == reported and row.total > 0]
    return {row.client: row.correct / row.total for row in rows}
