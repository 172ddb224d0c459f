"""The tracker, which writes the records of a run. It runs on the driver."""

import csv
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from pflsim.records.folder import read_summary
from pflsim.records.history import METRICS, RoundMetrics, Traffic, round_metrics, to_line
from pflsim.records.per_client import COLUMNS, PER_CLIENT, complete_rounds, cut, newcomer_rows, round_rows
from pflsim.records.scalars import Loggers, Scalars, client_scalars, memory_scalars
from pflsim.records.summary import RunMeta, Summary, write_summary
from pflsim.records.tensorboard import TensorBoard
from pflsim.records.trace import DIAGNOSTICS, RoundMatrices, named, read_matrices, write_matrices
from pflsim.types import NewcomerRecord, RoundRecord

logger = logging.getLogger(__name__)
EXPLODES = "training explodes"
MAX_LOSS = 100.0
"""A training cross-entropy above this multiple of that of random guesses gets a warning."""


class Tracker:
    """Writes metrics.jsonl, per_client.csv, diagnostics.safetensors, summary.json and the event file of a run.

    `history` holds the content of metrics.jsonl.

    Args:
        folder: the run folder. It must not contain these files, except when the run is resumed.
        meta: the attributes of the run.
        resume_after: resume the run after this round, which the records must include. Removes records of later rounds
            and of newcomers.
        hyperparameters: settings by dotted key, for TensorBoard's HPARAMS tab and the loggers.
        per_client: whether to log scalars of every client.
        loggers: functions that create further loggers, by name. They get the scalars of TensorBoard.
    """

    def __init__(
        self,
        folder: Path,
        meta: RunMeta,
        *,
        resume_after: int | None = None,
        hyperparameters: Mapping[str, float | str] | None = None,
        per_client: bool = False,
        loggers: Mapping[str, Callable[[], Any]] | None = None,
    ):
        resumes = resume_after is not None
        self._earlier = resumed(folder, meta, resume_after) if resumes else Summary(meta, [], False, 0.0, 0.0)
        self._now, self._closed = self._earlier, False
        self.folder, self.meta, self.history = folder, meta, self._earlier.history
        self.memory = MemorySampler()
        self._start = time.perf_counter()
        write_summary(folder, self._summarised())  # records the session even if it is killed
        mode = "a" if resumes else "x"
        self._lines = (folder / METRICS).open(mode, encoding="utf-8")
        self._per_client = (folder / PER_CLIENT).open(mode, newline="", encoding="utf-8")
        if not resumes:
            self._write_rows([(*COLUMNS, *meta.measures.columns, *["name"] * bool(meta.client_names))])
        self._tensorboard = TensorBoard(folder, meta.reported, resume_after, meta.measures.primary)
        self._scalars, self._of_clients = Scalars(meta.reported), per_client
        self._loggers = Loggers(loggers or {})
        if hyperparameters:
            self._tensorboard.hyperparameters(hyperparameters)
        self._loggers.hyperparameters(hyperparameters or {})
        for metrics in self.history:  # a resumed run logs its earlier rounds again
            self._loggers.scalars(self._scalars(metrics), metrics.round)

    def round(self, record: RoundRecord) -> RoundMetrics:
        """Write the records of a round, flush the files, and return the round's metrics."""
        earlier = self.history[-1].traffic_total if self.history else Traffic()
        metrics = round_metrics(record, earlier, self.meta.measures)
        self._lines.write(to_line(metrics) + "\n")
        self._lines.flush()
        self._write_rows(round_rows(record, self.meta))
        if record.diagnostics:
            record = replace(record, diagnostics=tuple(named(m, self.meta.client_names) for m in record.diagnostics))
            write_matrices(self.folder, RoundMatrices(record.round, record.diagnostics))
        scalars = self._scalars(metrics) | memory_scalars(record, self.memory.sample())
        scalars |= client_scalars(record, self.meta.client_names) if self._of_clients else {}
        self._tensorboard.write(record, scalars)
        self._loggers.scalars(scalars, record.round)
        self.history.append(metrics)
        guesses = math.log(max(self.meta.classes, 2))
        worst = [v for name, v in metrics.losses.items() if name.endswith("ce") and not v <= MAX_LOSS * guesses]
        signs = [f"cross-entropy is {v:.4g}, and {guesses:.3g} for random guesses" for v in worst]
        found = metrics.evaluations.get(self.meta.reported)
        if found and self.meta.task == "regression" and not math.isfinite(found.loss):
            signs.append(f"loss on test data is {found.loss}")
        if signs and not any(warning.startswith(EXPLODES) for warning in self._now.warnings):
            self.warn(f"{EXPLODES}: in round {record.round} the {signs[0]}; set {self.meta.remedy}")
        return metrics

    def warn(self, warning: str) -> None:
        """Log a warning and save it in summary.json, once per run."""
        if warning not in self._now.warnings:
            logger.warning(warning)
            self._now = replace(self._now, warnings=(*self._now.warnings, warning))
            self._save()

    def sync(self) -> None:
        """Fsync metrics.jsonl and per_client.csv. A checkpoint is usable only together with these records."""
        for file in (self._lines, self._per_client):
            os.fsync(file.fileno())

    def restarted(self, restarts: int) -> None:
        """Set the number of actors replaced in this session so far, and save it in summary.json."""
        if not self._closed:
            self._now = replace(self._now, actor_restarts=self._earlier.actor_restarts + restarts)
            self._save()

    def newcomers(self, record: NewcomerRecord) -> None:
        """Write the results of newcomers. No other metric includes them."""
        self._now = replace(self._now, newcomers=record)
        self._write_rows(newcomer_rows(record, self.meta))

    def close(self, complete: bool = True, states_saved: bool = True, stopped: str = "") -> Summary:
        """Write summary.json, close the files and return the summary. Further calls only return the summary.

        Args:
            complete: whether the run did everything that was planned.
            states_saved: whether a complete run has a checkpoint of its last round.
            stopped: why a callback ended the run, or "".
        """
        if not self._closed:
            self.memory.sample(force=True)
            ended = {"complete": complete, "states_saved": states_saved, "stopped": stopped}
            self._now, self._closed = replace(self._summarised(), **ended), True
            with self._per_client, self._lines, closing(self._tensorboard):  # also if the disk is full
                self._loggers.close(complete)
                write_summary(self.folder, self._now)
        return self._now

    def _save(self) -> None:
        with suppress(OSError):  # e.g. a full disk; `close` writes it again
            write_summary(self.folder, self._summarised())

    def _write_rows(self, rows: Iterable[tuple[Any, ...]]) -> None:
        csv.writer(self._per_client, lineterminator="\n").writerows(rows)
        self._per_client.flush()

    def _summarised(self) -> Summary:
        seconds = self._earlier.seconds + time.perf_counter() - self._start
        return replace(self._now, seconds=seconds, peak_rss_mb=max(self._earlier.peak_rss_mb, self.memory.peak_mb))


def resumed(folder: Path, meta: RunMeta, after: int) -> Summary:
    """Remove the records after a round, and return what is kept.

    The summary's seconds include rounds that are not kept, and its `resumed_after` the round of this session. Replaces
    each file atomically, so a run that is interrupted meanwhile can be resumed again.
    """
    history = complete_rounds(folder)
    summary = {"rounds": -1, "seconds": 0.0, "peak_rss_mb": 0.0, **read_summary(folder)}
    seconds = summary["seconds"] + sum(line.total_seconds for line in history if line.round > summary["rounds"])
    cut(folder, after)
    matrices = read_matrices(folder)
    if matrices is None or matrices.round > after:
        (folder / DIAGNOSTICS).unlink(missing_ok=True)
    return Summary(
        meta,
        [line for line in history if line.round <= after],
        complete=False,
        seconds=seconds,
        peak_rss_mb=summary["peak_rss_mb"],
        resumed_after=(*summary.get("resumed_after", ()), after),
        actor_restarts=summary.get("actor_restarts", 0),
        warnings=tuple(summary.get("warnings", ())),
    )


def held_mb() -> float:
    """Return the memory of this process and all its descendants, in MB (10⁶ bytes).

    Uses the proportional set size of each process on Linux (a page shared by k processes counts 1/k in each), elsewhere
    the resident set size, which counts shared pages in every process.
    """
    own = psutil.Process()
    held = 0
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            memory = process.memory_full_info()
            held += getattr(memory, "pss", memory.rss)
    return held / 1e6


class MemorySampler:
    """Samples memory use and keeps the peak. Peaks between two samples are missed.

    Args:
        share: the maximum share of the time to spend on sampling; calls that come too soon are skipped.
    """

    def __init__(self, share: float = 0.01):
        self.share = share
        self.last_mb = 0.0
        self.peak_mb = 0.0
        self._due = 0.0

    def sample(self, force: bool = False) -> float:
        """Take a sample unless it is too soon, and return the latest sample in MB."""
        start = time.perf_counter()
        if force or start >= self._due:
            self.last_mb = held_mb()
            self.peak_mb = max(self.peak_mb, self.last_mb)
            end = time.perf_counter()
            self._due = end + (end - start) / self.share
        return self.last_mb
