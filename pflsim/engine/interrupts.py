"""Being told to stop: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pflsim.errors import RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(RunError):
    """A run was told to stop and has saved what there was to save."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupts:
    """Turns the first signal into a request to stop, and the second into KeyboardInterrupt at once.

    A request breaks off what stands in an `abandonable` block, with KeyboardInterrupt (the one exception that Ray lets
    through while it waits). Anywhere else it waits until somebody asks `requested`. A signal that is ignored stays so
    (nohup, a background job), and outside the main thread all are left to whoever has them.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self.count = 0
        self.lost: str | None = None
        """What the run stands on and is gone, in words."""
        self._breaking = False
        self._abandonable = 0
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Take the signals, again if somebody else (Ray, when it starts) has taken them meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if self._before.setdefault(signum, signal.getsignal(signum)) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """What stands in here may be broken off at any point without harm."""
        self._abandonable += 1
        try:
            if self.requested is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._abandonable -= 1

    def give_up(self, reason: str) -> None:
        """Break off whatever the main thread is doing, with KeyboardInterrupt; for other threads."""
        self.lost, self._breaking = reason, True
        heard = [signum for signum in SIGNALS if signal.getsignal(signum) == self._handle]
        if heard:  # one that is ignored would do nothing
            _thread.interrupt_main(heard[0])

    def begin(self) -> None:
        """Another run begins, on something new."""
        self.lost, self._breaking = None, False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._breaking:
            self._breaking = False
            raise KeyboardInterrupt
        self.count += 1
        first, self.requested = self.requested is None, self.requested or signum
        if self._abandonable or not first:
            raise KeyboardInterrupt

    @contextmanager
    def signals_blocked(self) -> Iterator[None]:
        """No signal has any effect inside the block."""
        mine = self._handle
        self._handle = lambda signum, frame: None  # type: ignore[method-assign]
        self.install()
        try:
            yield
        finally:
            self._handle = mine  # type: ignore[method-assign]
            self.install()

    def release(self) -> None:
        """Give the signals back to whoever had them."""
        for signum, before in self._before.items():
            signal.signal(signum, before)  # type: ignore[arg-type]
        self._before = {}
