"""Runs functions in processes of their own, several at once, for the runs of a sweep."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import FrameType
from typing import IO, Any

from pflsim.engine.interrupts import SIGNALS, Stopped
from pflsim.terminal.exit_status import exit_status

PR_SET_PDEATHSIG = 1
"""Of `prctl` on Linux: the signal that a process gets when its parent dies."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended.

    Args:
        number: of its function, from 0.
        status: its exit status; −n if signal n killed it.
        result: what the function returned; None if it failed.
        output, errors: what it printed.
    """

    number: int
    status: int
    result: Any
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class _Running:
    number: int
    process: ForkProcess
    result: Connection
    files: tuple[IO[str], IO[str]]

    def ended(self) -> Ended:
        self.process.join()
        with suppress(EOFError):
            result = self.result.recv() if self.result.poll() else None
        for file in self.files:
            file.seek(0)
        output, errors = (file.read() for file in self.files)
        return Ended(self.number, self.process.exitcode or 0, result, output, errors)


def in_processes(functions: Sequence[Callable[[], Any]], parallel: int) -> Iterator[Ended]:
    """Call each function in a forked process and yield the processes in the order of their ends.

    A signal is passed on to the running processes, and no other process is started. If this process is killed, they get
    SIGTERM.

    Args:
        functions: return values that can be pickled; errors are printed as `exit_status` does.
        parallel: the maximum number of processes at the same time.

    Raises:
        Stopped: after the end of all processes, if there was a signal.
    """
    running: dict[int, _Running] = {}
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for one in running.values():
            os.kill(one.process.pid or 0, signum)

    before = {signum: signal.getsignal(signum) for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, forward)
    try:
        waiting = list(enumerate(functions))
        while running or (waiting and not received):
            while waiting and len(running) < parallel and not received:
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal must find the new process in `running`
                started = _start(*waiting.pop(0))
                running[started.process.sentinel] = started
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            for sentinel in wait(list(running)):
                yield running.pop(sentinel).ended()  # type: ignore[call-overload]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for one in running.values():
            one.process.kill()
    if received:
        raise Stopped(received[0])


def _start(number: int, function: Callable[[], Any]) -> _Running:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    process = multiprocessing.get_context("fork").Process(target=_work, args=(function, sender, files))
    process.start()
    sender.close()
    return _Running(number, process, receiver, files)


def _work(function: Callable[[], Any], sender: Connection, files: tuple[IO[str], IO[str]]) -> None:
    """Call the function in the new process, with its output in files."""
    os.setpgrp()  # Ctrl-C in a terminal reaches the parent only
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number, file in enumerate(files, start=1):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = files
    sys.exit(exit_status(lambda: sender.send(function())))
