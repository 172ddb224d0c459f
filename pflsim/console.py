"""What a run says on the terminal: one line per round, and a table at the end."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, get_args

from pflsim.history import RoundMetrics
from pflsim.metrics import Model, Scope
from pflsim.streams import can_print
from pflsim.summary import Figure, NewcomerFigures, RunMeta, Summary

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 110
"""No line is longer than this, except one that ends in a path."""
ROWS = (("last", "last round"), ("best_val", "best by validation"), ("best_test_oracle", "best test round (oracle)"))
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


class Console:
    """Prints a run's progress and result as plain text; bold only on a terminal.

    Args:
        meta: what the run is.
        stream: where to; None: standard output.
        width: columns; None: the terminal's, or `WIDTH` where there is none.
    """

    def __init__(self, meta: RunMeta, stream: TextIO | None = None, width: int | None = None):
        self.meta = meta
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()
        columns = shutil.get_terminal_size((WIDTH, 24)).columns if self.terminal else WIDTH
        self.width = min(width or columns, WIDTH)
        self.dash = "—" if can_print("—", self.stream) else "-"
        self._seconds: list[float] = []

    def start(self, folder: Path, done: int | None = None) -> None:
        """Say what is about to run, where its results go, and which rounds are done already."""
        meta = self.meta
        held = f" ({meta.newcomers} of them join after the last round)" if meta.newcomers else ""
        self._print(f"{meta.method} on {meta.data} ({meta.partition}), {meta.model}: {meta.clients} clients{held}, "
                    f"{meta.rounds} rounds, seed {meta.seed}")  # fmt: skip
        self._print(f"run folder {folder}")
        if done is not None:
            self._print(f"goes on after round {done}")
        self._print("accuracy: mean over clients, on their test data; worst: mean of the worst tenth of the clients")

    def round(self, metrics: RoundMetrics) -> None:
        """Print a round's line; the traffic is that of the round."""
        self._seconds.append(metrics.total_seconds)
        self._print(self.line(metrics))

    def line(self, metrics: RoundMetrics) -> str:
        """The richest form of a round's line that fits: first the two traffics merge, then they go, then the loss."""
        judged = self.meta.judged_by
        other: Model = "global" if judged == "personal" else "personal"
        head = f"round {metrics.round:>{len(str(self.meta.rounds))}}/{self.meta.rounds}"
        accuracy = (self._accuracy(metrics, judged, worst=True), self._accuracy(metrics, other, worst=False))
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
        )
        lines = ["  ".join(form) for form in forms]
        return next((line for line in lines if len(line) <= self.width), lines[-1][: self.width]).rstrip()

    def end(self, summary: Summary, folder: Path) -> None:
        """Print the table of the run, where its files are and how to see its curves."""
        from rich.console import Console as Rich

        self._print("")
        if not summary.complete:
            self._print(f"stopped after {summary.rounds} of {self.meta.rounds} rounds")
        rich = Rich(file=self.stream, width=self.width, force_terminal=self.terminal, highlight=False)
        with rich.capture() as captured:
            rich.print(self._table(summary))
        self._print("\n".join(line.rstrip() for line in captured.get().splitlines()))
        rounds = sum(self._seconds)
        up, down = format_bytes(summary.traffic.up_bytes), format_bytes(summary.traffic.down_bytes)
        self._print(f"* {self.meta.method} is judged by its {self.meta.judged_by} model, "
                    f"{WHEN[self.meta.phase(self.meta.judged_by)]}")  # fmt: skip
        if summary.newcomers is not None:
            self._print(f"newcomers    {self._newcomers(summary.newcomers)}")
        self._print(f"traffic      up {up}, down {down}")
        self._print(f"time         {self._time(summary, rounds)}")
        self._print(f"peak memory  {format_bytes(summary.peak_rss_mb * 1e6)}, all processes together")
        self._print(f"run folder   {folder}")
        self._print(f"curves       {tensorboard_command(folder)}")
        if not summary.complete:
            self._print(f"go on with   python launch.py resume={shlex.quote(str(folder))}")

    def _time(self, summary: Summary, rounds: float) -> str:
        """Where the time went; of a run that was taken up, all sessions together and the rounds of this one."""
        each = f", {format_seconds(rounds / len(self._seconds))} a round" if self._seconds else ""
        total = format_seconds(summary.seconds)
        if summary.resumed_after:
            return f"{total} in all sessions: the rounds of this one {format_seconds(rounds)}{each}"
        start = format_seconds(max(summary.seconds - rounds, 0))
        return f"{total}: start {start}, rounds {format_seconds(rounds)}{each}"

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
            mark = " *" if model == self.meta.judged_by else ""
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
        left = self.meta.rounds - round_number
        recent = self._seconds[-10:]
        if left <= 0 or not recent:
            return " " * 9
        return f"eta {format_seconds(left * sum(recent) / len(recent)):<5}"

    def _print(self, text: str) -> None:
        with suppress(OSError):  # nobody reads it any more; the run goes on
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
