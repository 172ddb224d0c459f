"""Stopping a run by SIGINT, SIGTERM or SIGHUP."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pflsim.errors import RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(RunError):
    """A signal stopped the run; its states are saved."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupts:
    """Handles signals: the first one requests a stop, the second one raises KeyboardInterrupt at once.

    A request raises KeyboardInterrupt inside an `abandonable` block (Ray passes no other exception on while it waits).
    Outside of such blocks it only sets `requested`. A signal that was ignored before (nohup, a background job) remains
    ignored. Outside the main thread no handler is installed.

    Attributes:
        requested: the first signal; None: no stop is requested.
        count: the number of signals so far.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self.count = 0
        self._abandonable = 0
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Install the handlers, also again after Ray has replaced them when it started."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if self._before.setdefault(signum, signal.getsignal(signum)) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Allow that the block is interrupted at any point."""
        self._abandonable += 1
        try:
            if self.requested is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._abandonable -= 1

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        first, self.requested = self.requested is None, self.requested or signum
        if self._abandonable or not first:
            raise KeyboardInterrupt

    @contextmanager
    def signals_blocked(self) -> Iterator[None]:
        """Ignore all signals inside the block."""
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)
        try:
            yield
        finally:
            self.install()

    def release(self) -> None:
        """Install the handlers that were there before."""
        for signum, before in self._before.items():
            signal.signal(signum, before)  # type: ignore[arg-type]
        self._before = {}
