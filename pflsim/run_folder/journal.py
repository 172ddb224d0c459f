"""What went wrong in a run and how it was dealt with: a line for each on standard error and in the run folder."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from pflsim.types import Fault

LOG = "run.log"


class Journal:
    """Takes notes; nothing that it writes decides a result.

    Args:
        folder: the run folder, in which run.log is made when there is something to say; None: there is none yet.
        stream: where lines go beside the file; None: standard error.
    """

    def __init__(self, folder: Path | None = None, stream: TextIO | None = None):
        self.folder, self._stream = folder, stream
        self.restarts = 0
        self.counted: Callable[[int], None] = lambda restarts: None
        """Is told how many actors had to be replaced, whenever one more had to."""
        self._faults: dict[int, Fault] = {}
        self._traces: Counter[str] = Counter()

    def say(self, text: str) -> None:
        """A line."""
        self._print(f"warning: {text}")
        self._write(text)

    def note(self, text: str) -> None:
        """A line about nothing that went wrong."""
        self._print(text)
        self._write(text)

    def ended(self, text: str) -> None:
        """With what the run has ended; for the file alone, since it is told elsewhere."""
        self._write(text)

    def failure(self, text: str, trace: str) -> None:
        """A line, and below it the traceback; one that was shown before is not shown again."""
        self._traces[trace] += 1
        if trace and self._traces[trace] == 1:
            text = f"{text}\n{trace.rstrip()}"
        self.say(text)

    def restarted(self, text: str = "") -> None:
        """An actor had to be replaced; the text says so, where nothing else does."""
        self.restarts += 1
        if text:
            self.say(text)
        self.counted(self.restarts)

    def fault(self, clients: Iterable[int], kind: Fault) -> None:
        """Something befell clients in this round."""
        self._faults.update(dict.fromkeys(clients, kind))

    def take_faults(self) -> dict[int, Fault]:
        """What befell whom since this was last asked for."""
        taken, self._faults = self._faults, {}
        return taken

    def _print(self, text: str) -> None:
        with suppress(OSError):  # nobody reads it any more; it is in the file
            print(text, file=self._stream or sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self.folder is None:
            return
        with suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8") as file:  # a full disk, for example
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
