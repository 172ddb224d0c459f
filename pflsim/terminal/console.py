"""What a run says on the terminal: a line per round or a live display, and a table at the end."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast, get_args

from pflsim.run_folder.environment import JOB
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import Model, Scope
from pflsim.run_folder.summary import Figure, NewcomerFigures, RunMeta, Summary
from pflsim.terminal.live import Live, Status
from pflsim.terminal.streams import IgnoreClosedPipe, can_print

if TYPE_CHECKING:
    from rich.table import Table

Progress = Literal["auto", "live", "plain", "quiet"]
WIDTH = 110
"""No line is longer than this, except one that ends in a path."""
ROWS = (("last", "last round"), ("best_val", "best by validation"), ("best_test_oracle", "best test round (oracle)"))
LINES, SHOWN = 20, 3
"""Lines of rounds that a live display leaves behind, about; best and worst clients at the end."""
WHEN = {"trained": "after local training", "received": "as received from the server"}


def format_bytes(count: float) -> str:
    """Bytes in three digits and a decimal unit, e.g. "1.20 MB"."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration in at most six characters below 100 hours: "40 ms", "0.8 s", "42 s", "3m20s", "2h05m"."""
    if 0 < seconds < 0.0995:
        return f"{max(round(seconds * 1000), 1)} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def command_to_go_on(folder: Path) -> str:
    """What takes a run up: a job of a cluster is taken up from where it was submitted, in its home there."""
    job = os.environ.get(JOB)
    command = f"submit --home-of {job} resume" if job else "resume"
    return f"python launch.py {command}={shlex.quote(str(folder))}"


class Console:
    """Prints a run's progress and result; bold, and a live display, only on a terminal.

    Args:
        meta: what the run is.
        progress: as in the settings.
        stream: where to; None: standard output.
        width: columns; None: the terminal's, or `WIDTH` where there is none.
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
        self.memory_of = "the driver; actors are not counted" if joined else "all processes together"
        self.stream = cast(
            TextIO, IgnoreClosedPipe(stream or sys.stdout)
        )  # the run goes on where nobody reads it any more
        self.terminal = self.stream.isatty()
        columns = shutil.get_terminal_size((WIDTH, 24)).columns if self.terminal else WIDTH
        self.width = min(width or columns, WIDTH)
        self.dash = "—" if can_print("—", self.stream) else "-"
        self._seconds: list[float] = []
        self.progress = ("live" if self.terminal else "plain") if progress == "auto" else progress
        self._status = Status(meta.rounds)
        self._best: tuple[float, int, float] | None = None
        self._live: Live | None = None
        self._part: int | None = None
        self._kept_at: str | None = None

    def start(self, folder: Path, done: int | None = None, kept_at: str | None = None) -> None:
        """Say what is about to run, where its results go and are kept beside, and which rounds are done already."""
        self._kept_at = kept_at
        if self.progress == "quiet":
            return
        meta = self.meta
        held = f" ({meta.newcomers} of them join after the last round)" if meta.newcomers else ""
        self._print(f"{meta.method} on {meta.data} ({meta.partition}), {meta.model}: {meta.clients} clients{held}, "
                    f"{meta.rounds} rounds, seed {meta.seed}")  # fmt: skip
        self._print(f"run folder {folder}{f', kept at {kept_at}' if kept_at else ''}")
        if done is not None:
            self._print(f"goes on after round {done}")
        self._print("accuracy: mean over clients, on their test data; worst: mean of the worst tenth of the clients")
        if self.progress == "live":
            self._live = Live(self._status, self.stream, self.width, format_seconds)

    def earlier(self, history: Sequence[RoundMetrics]) -> None:
        """Rounds of the sessions before this one, for the best so far; nothing is printed."""
        for metrics in history:
            self._status.lines = self._newest(metrics, 0.0)

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        """A phase of a round begins, for so many clients."""
        status = self._status
        status.round, status.phase, status.done, status.due = round_number, name, 0, due

    def clients_done(self, clients: int) -> None:
        """So many more clients are through with the phase."""
        self._status.done += clients

    def round(self, metrics: RoundMetrics, memory_mb: float = 0.0) -> None:
        """Print a round's line; the traffic is that of the round.

        A live display has room for the newest figures, so that about `LINES` lines of a run are enough there.

        Args:
            metrics: the round's figures.
            memory_mb: what all processes hold.
        """
        self._seconds.append(metrics.total_seconds)
        if self._live is not None:
            self._status.remaining = self._remaining(metrics.round)
            self._status.lines = self._newest(metrics, memory_mb)
        if self.progress != "quiet" and (self._live is None or self._left_behind(metrics)):
            self._print(self.line(metrics))

    def close(self) -> None:
        """Take the live display away, where there is one; nothing more moves on the terminal."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _left_behind(self, metrics: RoundMetrics) -> bool:
        """Whether a live display leaves the round's line behind: the first evaluated one of every so many, the last."""
        every = max(self.meta.rounds // LINES, 1)
        part = metrics.round // every
        if self._part is None:
            self._part = (metrics.round - 1) // every
        if metrics.round < self.meta.rounds and (part == self._part or not metrics.accuracy):
            return False
        self._part = part
        return True

    def _newest(self, metrics: RoundMetrics, memory_mb: float) -> list[str]:
        """The newest figures, for the live display."""
        reported = self.meta.reported_model
        scope = Scope(reported, "test", self.meta.phase(reported))
        stats, lines = metrics.accuracy.get(scope), self._status.lines
        if stats is not None:
            by = metrics.accuracy.get(scope._replace(split="val"), stats)
            if self._best is None or by.mean > self._best[0]:
                self._best = by.mean, metrics.round, stats.mean
            chosen = "by validation" if by is not stats else "on test data (oracle)"
            lines = [
                f"round {metrics.round}: {reported} accuracy {stats.mean:.3f}, worst tenth "
                f"{stats.worst_decile:.3f}; best so far {chosen} {self._best[2]:.3f} in round {self._best[1]}"
            ]
        up, down = format_bytes(metrics.traffic_total.up_bytes), format_bytes(metrics.traffic_total.down_bytes)
        held = f"memory {format_bytes(memory_mb * 1e6)}, " if memory_mb else ""
        took = f"the last round took {format_seconds(metrics.total_seconds)}"
        return [*lines[:1], f"traffic so far up {up}, down {down}; {held}{took}"]

    def line(self, metrics: RoundMetrics) -> str:
        """The richest form of a round's line that fits: first the two traffics merge, then they go, then more."""
        reported = self.meta.reported_model
        other: Model = "global" if reported == "personal" else "personal"
        head = f"round {metrics.round:>{len(str(self.meta.rounds))}}/{self.meta.rounds}"
        accuracy = (self._accuracy(metrics, reported, worst=True), self._accuracy(metrics, other, worst=False))
        loss = [f"{name} {_three_digits(value)}" for name, value in list(metrics.losses.items())[:1]]
        up, down = format_bytes(metrics.traffic.up_bytes), format_bytes(metrics.traffic.down_bytes)
        traffic = f"up {up:<7}  down {down:<7}"
        merged = f"traffic {format_bytes(metrics.traffic.up_bytes + metrics.traffic.down_bytes):<7}"
        took, eta = f"{format_seconds(metrics.total_seconds):>5}", self._eta(metrics.round)
        forms = (
            (head, *accuracy, *loss, traffic, took, eta),
            (head, *accuracy, *loss, merged, took, eta),
            (head, *accuracy, *loss, took, eta),
            (head, *accuracy, took, eta),
            (head, *accuracy, eta),
            (head, accuracy[0], eta),
            (head, accuracy[0]),
        )
        lines = ["  ".join(form) for form in forms]
        return next((line for line in lines if len(line) <= self.width), lines[-1][: self.width]).rstrip()

    def end(self, summary: Summary, folder: Path, rates: Mapping[int, float] | None = None) -> None:
        """Print the table of the run, where its files are and how to see its curves.

        Args:
            summary: what it came to.
            folder: the run folder.
            rates: every client's test accuracy when it was judged last.
        """
        from rich.console import Console as Rich

        self.close()
        self._print("")
        if not summary.complete:
            self._print(f"stopped after {summary.rounds} of {self.meta.rounds} rounds")
        rich = Rich(file=self.stream, width=self.width, force_terminal=self.terminal, highlight=False)
        with rich.capture() as captured:
            rich.print(self._table(summary))
        self._print("\n".join(line.rstrip() for line in captured.get().splitlines()))
        for line in self._extremes(rates or {}):
            self._print(line)
        rounds = sum(self._seconds)
        up, down = format_bytes(summary.traffic.up_bytes), format_bytes(summary.traffic.down_bytes)
        self._print(f"* {self.meta.method} is judged by its {self.meta.reported_model} model, "
                    f"{WHEN[self.meta.phase(self.meta.reported_model)]}")  # fmt: skip
        if summary.newcomers is not None:
            self._print(f"newcomers    {self._newcomers(summary.newcomers)}")
        self._print(f"traffic      up {up}, down {down}")
        self._print(f"time         {self._time(summary, rounds)}")
        self._print(f"peak memory  {format_bytes(summary.peak_rss_mb * 1e6)}, {self.memory_of}")
        self._print(f"run folder   {folder}{f', kept at {self._kept_at}' if self._kept_at else ''}")
        self._print(f"curves       {tensorboard_command(folder)}")
        if not summary.complete:
            self._print(f"go on with   {command_to_go_on(folder)}")

    def _extremes(self, rates: Mapping[int, float]) -> list[str]:
        """The best and the worst clients, where there are enough of them."""
        some = min(SHOWN, len(rates) // 2)
        ranked = sorted(rates.items(), key=lambda pair: (-pair[1], pair[0]))
        named = (("best clients ", ranked[:some]), ("worst clients", ranked[::-1][:some]))
        return [f"{name}  {', '.join(f'{c}: {rate:.4f}' for c, rate in found)}" for name, found in named if some]

    def _time(self, summary: Summary, rounds: float) -> str:
        """Where the time went; of a run that was taken up, all sessions together and the rounds of this one."""
        each = f", {format_seconds(rounds / len(self._seconds))} a round" if self._seconds else ""
        total = format_seconds(summary.seconds)
        if summary.resumed_after:
            return f"{total} in all sessions: the rounds of this one {format_seconds(rounds)}{each}"
        start = format_seconds(max(summary.seconds - rounds, 0))
        before = "start and waiting" if summary.actor_restarts else "start"
        return f"{total}: {before} {start}, rounds {format_seconds(rounds)}{each}"

    def _table(self, summary: Summary) -> Table:
        from rich import box
        from rich.table import Table

        whom = "all clients" if self.meta.evaluated_on == "all" else "the participants"
        title = f"Test accuracy of {self.meta.method} on {self.meta.data}, over {whom}"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("model")
        table.add_column("when")
        for name in ("round", "mean", "std", "worst decile"):
            table.add_column(name, justify="right")
        for model in get_args(Model):
            figures = summary.accuracy[model]
            mark = " *" if model == self.meta.reported_model else ""
            if figures.last is None:
                table.add_row(model + mark, *[self.dash] * 5, end_section=True)
                continue
            for number, (name, label) in enumerate(ROWS):
                cells = self._cells(getattr(figures, name))
                end = number == len(ROWS) - 1
                table.add_row(model + mark if number == 0 else "", label, *cells, end_section=end)
        return table

    def _cells(self, figure: Figure | None) -> Sequence[str]:
        if figure is None:
            return [self.dash] * 4
        stats = figure.stats
        return [str(figure.round), f"{stats.mean:.4f}", f"{stats.std:.4f}", f"{stats.worst_decile:.4f}"]

    def _newcomers(self, figures: NewcomerFigures) -> str:
        clients, epochs = self.meta.newcomers, self.meta.finetune_epochs
        received, trained = (
            self.dash if stats is None else f"{stats.mean:.4f}" for stats in (figures.received, figures.trained)
        )
        own = f"{epochs} epoch{'' if epochs == 1 else 's'} of their own"
        return f"{clients} client{'' if clients == 1 else 's'}: {received} as received, {trained} after {own}"

    def _accuracy(self, metrics: RoundMetrics, model: Model, worst: bool) -> str:
        stats = metrics.accuracy.get(Scope(model, "test", self.meta.phase(model)))
        if stats is None:
            return f"{model} {self.dash}".ljust(len(model) + (19 if worst else 6))
        return f"{model} {stats.mean:.3f}" + (f" (worst {stats.worst_decile:.2f})" if worst else "")

    def _eta(self, round_number: int) -> str:
        left = self._remaining(round_number)
        return " " * 9 if not left else f"eta {format_seconds(left):<5}"

    def _remaining(self, round_number: int) -> float | None:
        """Seconds to the end, going by the last rounds."""
        left, recent = self.meta.rounds - round_number, self._seconds[-10:]
        return max(left, 0) * sum(recent) / len(recent) if recent else None

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.print(text)
        else:
            print(text, file=self.stream, flush=True)


def _three_digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:<5.3g}"


def tensorboard_command(folder: Path) -> str:
    """The command that shows a run's curves; with the path of the program where the shell would not find it."""
    beside = Path(sys.executable).with_name("tensorboard")
    program = "tensorboard"
    if shutil.which(program) is None and beside.exists():
        here = Path.cwd()
        program = str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
    return f"{shlex.quote(program)} --logdir {shlex.quote(str(folder))}"
