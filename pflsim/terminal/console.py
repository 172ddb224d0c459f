"""Prints a run's progress and result."""

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from rich.console import Console as Rich
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pflsim.display.formats import NONE, WIDTH, flowed, format_bytes, format_seconds, in_text, who_is_evaluated, wrapped
from pflsim.progress import doing
from pflsim.records.evaluation import Scope
from pflsim.records.history import RoundMetrics
from pflsim.records.summary import RunMeta, Summary
from pflsim.terminal.result import accuracy_table, headline, result_lines, resume_command, tensorboard_command
from pflsim.terminal.status import Status, sparkline, watching
from pflsim.types import ModelKind

Progress = Literal["auto", "live", "plain", "quiet", "none"]
LIVE_LINES = 20
"""Approximate number of round lines that a run with a live display prints."""
SILENCE = 60.0
"""Seconds without a line after which a long phase of a round without a live display prints one."""
RATE = 2
"""Refreshes per second of the display, which takes less than 1% of a core."""


class IgnoreClosedPipe:
    """Wraps a stream and drops its output once the reader is gone, e.g. a closed terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; ignore errors of the operating system."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore errors of the operating system."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_printed: set[str] = set()


def print_card(card: object, progress: str, stream: TextIO | None = None) -> None:
    """Print what was read, a `pflsim.data.dataset.Card`, unless it was printed before or `progress` wants no output."""
    if (text := str(card)) and progress not in ("quiet", "none") and text not in _printed:
        _printed.add(text)
        print(text, file=IgnoreClosedPipe(stream or sys.stdout), flush=True)


class Console:
    """Prints a run's progress and result; colours and the live display need a terminal.

    If the run is watched (`pflsim.terminal.status.watching`), it prints the command that resumes it, and nothing else.

    Args:
        meta: the run's description.
        stream: output stream; default: standard output.
        width: number of columns; default: the terminal's, or `WIDTH` without one.
        progress: the setting `progress`.
        joined: whether the run uses a Ray cluster that was already running; memory is then the driver's only.
    """

    def __init__(
        self,
        meta: RunMeta,
        stream: TextIO | None = None,
        width: int | None = None,
        progress: Progress = "auto",
        joined: bool = False,
    ):
        self.meta = meta
        self.memory_of = "driver process only" if joined else "all processes"
        self.stream = cast(TextIO, IgnoreClosedPipe(stream or sys.stdout))  # a closed terminal does not end the run
        self.terminal = self.stream.isatty()
        self.width = width or (shutil.get_terminal_size((WIDTH, 24)).columns if self.terminal else WIDTH)
        self.progress = ("live" if self.terminal else "plain") if progress == "auto" else progress
        self._watch = watching.get()
        if self._watch:
            self.progress = "none"
        self.status = Status(meta.rounds, meta.measures.primary)
        self._round_seconds: list[float] = []
        self._best_score: float | None = None
        self._memory_mb = 0.0
        self._round, self._phase, self._done, self._due = 0, "starting", 0, 0
        self._begun = self._since = self._said = time.monotonic()
        forced = self.terminal or progress == "live"
        self._rich = Rich(file=self.stream, width=self.width, force_terminal=forced, highlight=False)
        self._live = Live(console=self._rich, get_renderable=self._shown, refresh_per_second=RATE, transient=True)
        self._last_line = 0
        self._url: str | None = None

    def start(self, folder: Path, done: int | None = None, kept_at: str | None = None, card: object = "") -> None:
        """Print what runs, what was read, and where results go.

        Args:
            folder: the run folder.
            done: the last finished round of a resumed run.
            kept_at: URL of the remote copy.
            card: what was read, see `print_card`.
        """
        doing("")
        self._url = kept_at
        if self._watch:
            self._watch(self.status)
        if self.progress in ("quiet", "none"):
            return
        self._print(wrapped(headline(self.meta), self.width))
        self._print(f"run folder {folder}{self._copy()}")
        if done is not None:
            self._print(f"resumed after round {done}")
        primary = self.meta.measures.primary
        if self.meta.loss:
            task = f"task {self.meta.task} (from the targets), loss {self.meta.loss}, primary metric {primary}"
            self._print(wrapped(task, self.width))
        name, clients = in_text(primary), who_is_evaluated(self.meta.evaluated_on, bool(self.meta.attack))
        about = f"{name}: mean over {clients}, on their test data; worst: mean of the worst decile of these"
        self._print(wrapped(about, self.width))
        print_card(card, self.progress, self.stream)
        if self.progress == "live":
            self._live.start()

    def earlier(self, history: Sequence[RoundMetrics]) -> None:
        """Add rounds of earlier sessions to the status, without printing them."""
        for metrics in history:
            self._update(metrics)

    def waiting(self, what: str) -> None:
        """Show what the run waits for before its first round, e.g. "starting Ray"."""
        self._phase = what
        if self.progress == "plain":
            self._print(what)

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        """Start a phase of a round with `due` clients."""
        if round_number != self._round:
            self._since = time.monotonic()
        self._round, self._phase, self._done, self._due = round_number, name, 0, due

    def clients_done(self, clients: int) -> None:
        """Add to the number of clients that have finished the phase."""
        self._done += clients
        if self.progress == "plain" and time.monotonic() - self._said > SILENCE:
            self._print(f"round {self._round}/{self.meta.rounds}: {self._doing}")

    @property
    def _doing(self) -> str:
        return self._phase + (f" {self._done} of {self._due} clients" if self._due else "")

    def round(self, metrics: RoundMetrics, memory_mb: float = 0.0) -> None:
        """Print a round's line, or update the live display, which prints about `LIVE_LINES` lines per run.

        Args:
            metrics: the round's figures.
            memory_mb: memory of all processes in MB.
        """
        self._round_seconds.append(metrics.total_seconds)
        self._memory_mb = memory_mb
        self._update(metrics)
        if self._watch:
            self._watch(self.status)
        printed = self.progress == "plain"
        if self.progress == "live":
            due = self._last_line + max(self.meta.rounds // LIVE_LINES, 1)
            printed = metrics.round == self.meta.rounds or (metrics.round >= due and bool(metrics.evaluations))
        if printed:
            self._last_line = metrics.round
            self._print(self.line(metrics))

    def close(self) -> None:
        """Remove the live display."""
        self._live.stop()

    def end(self, summary: Summary, folder: Path, resumable: bool = True) -> None:
        """Print the run's result, where its files are, and how to see its curves or resume it.

        Args:
            summary: the run's summary.
            folder: the run folder.
            resumable: whether resuming an incomplete run can complete it.
        """
        self.close()
        resume = f"resume with  {resume_command(folder, self._url)}"
        if self.progress == "none":
            if self._watch and resumable and not summary.complete:
                self.stream.write(f"{resume}\n")  # above the table of the sweep, which rich itself would write over
            return
        self._print("")
        if not summary.complete:
            self._print(f"stopped after {summary.rounds} of {self.meta.rounds} rounds")
        elif summary.stopped_early:
            self._print(f"stopped early in round {summary.rounds} of {self.meta.rounds}: {summary.stopped_early}")
        self._rich.print(accuracy_table(summary))
        for line in result_lines(summary, folder):
            self._print(line)
        self._print(f"peak memory  {format_bytes(summary.peak_rss_mb * 1e6)}, {self.memory_of}")
        self._print(f"run folder   {folder}{self._copy()}")
        self._print(f"curves       {tensorboard_command(folder)}")
        if resumable and not (summary.complete and summary.states_saved):
            self._print(resume)

    def _copy(self) -> str:
        return f", remote copy {self._url}" if self._url else ""

    def line(self, metrics: RoundMetrics) -> str:
        """Return a round's line; a narrow terminal lacks loss and traffic, and a narrower one the other model."""
        other: ModelKind = "global" if self.meta.reported_model == "personal" else "personal"
        head = f"round {metrics.round:>{len(str(self.meta.rounds))}}/{self.meta.rounds}"
        own, others = self._accuracy(metrics, self.meta.reported_model, worst=True), self._accuracy(metrics, other)
        loss = [f"{name} {value:.3f}" for name, value in list(metrics.losses.items())[:1]]
        up, down = metrics.traffic.up_bytes, metrics.traffic.down_bytes
        took, left = f"{format_seconds(metrics.total_seconds):>5}", self.status.left
        eta = f"eta {format_seconds(left):<5}" if left else " " * 9
        traffic = f"up {format_bytes(up):<7}  down {format_bytes(down):<7}"
        forms = (head, own, others, *loss, traffic, took, eta), (head, own, others, eta), (head, own, eta), (head, own)
        lines = ["  ".join(form).rstrip() for form in forms]
        return next((line for line in lines if len(line) <= self.width), lines[-1])

    def _accuracy(self, metrics: RoundMetrics, model: ModelKind, worst: bool = False) -> str:
        stats = metrics.evaluations.get(Scope(model, "test", self.meta.phase(model)))
        if stats is None:
            return f"{model} {NONE}".ljust(len(model) + (19 if worst else 6))
        missing = f" ({stats.primary.undefined} undefined)" if stats.primary.undefined else ""
        return f"{model} {stats.mean:.3f}{missing}" + (f" (worst {stats.primary.worst_decile:.2f})" if worst else "")

    def _update(self, metrics: RoundMetrics) -> None:
        """Add a round to the status."""
        status, recent = self.status, self._round_seconds[-10:]
        status.round, status.seconds = metrics.round, sum(recent) / len(recent) if recent else None
        status.up, status.down = metrics.traffic_total.up_bytes, metrics.traffic_total.down_bytes
        stats = metrics.evaluations.get(self.meta.reported)
        if stats is None:
            return
        status.values.append(stats.mean)
        status.worst = stats.primary.worst_decile
        score = metrics.evaluations.get(self.meta.reported._replace(split="val"), stats)
        status.by_validation = score is not stats
        if self._best_score is None or score.score > self._best_score:
            self._best_score, status.best, status.best_round = score.score, stats.mean, metrics.round

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        self._rich.print(text, markup=False, emoji=False, soft_wrap=True)

    def _shown(self) -> Group:
        """Return the live display."""
        now, rounds, status = time.monotonic(), self.meta.rounds, self.status
        share = self._done / self._due if self._due and self._phase == "train" else 0.0
        place = f"round {self._round}/{rounds}" if self._round else ""
        row, bar = Table.grid(padding=(0, 2, 0, 0)), ProgressBar(rounds, max(self._round - 1, 0) + share)
        for no_wrap in (True, False, True):  # the bar takes what is left
            row.add_column(no_wrap=no_wrap)
        row.add_row(Text(place, style="bold"), bar, Text(self._doing))
        results, costs = list[str](), list[str]()
        if status.values:
            line = sparkline(status.values, max(self.width // 4, 8))
            results.append(f"{self.meta.reported_model} {in_text(status.primary)} {status.values[-1]:.3f} {line}")
            results.append(f"worst decile {status.worst:.3f}")
            chosen = "by validation" if status.by_validation else "on test data (oracle)"
            results.append(f"best {chosen} {status.best:.3f} in round {status.best_round}")
        if status.seconds is not None:
            costs.append(f"{format_seconds(status.seconds)} a round")
            costs.append(f"{format_seconds(max((status.left or 0.0) - (now - self._since), 0.0))} left")
        costs.append(f"{format_seconds(now - self._begun)} elapsed")
        if status.round:
            costs.append(f"up {format_bytes(status.up)}, down {format_bytes(status.down)}")
        if self._memory_mb:
            costs.append(f"memory {format_bytes(self._memory_mb * 1e6)}")
        return Group(row, *map(Text, (*flowed(results, self.width), *flowed(costs, self.width))))
