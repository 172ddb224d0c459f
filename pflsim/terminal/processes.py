"""Runs functions in processes of their own, several at once, for the runs of a sweep."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any, cast

from pflsim.engine.interrupts import SIGNALS, Stopped
from pflsim.terminal.exit_status import exit_status


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
    process: ForkServerProcess
    result: Connection
    files: tuple[Path, Path]

    def ended(self) -> Ended:
        """Return what the process left, after its end."""
        self.process.join()
        result = None
        with self.result, suppress(EOFError):
            result = self.result.recv()
        output, errors = (file.read_text() if file.exists() else "" for file in self.files)
        return Ended(self.number, self.process.exitcode or 0, result, output, errors)


def in_processes(functions: Iterable[Callable[[], Any]], parallel: int, imports: Sequence[str] = ()) -> Iterator[Ended]:
    """Call each function in a process of its own and yield the processes in the order of their ends.

    The processes are forked from a server process, because a process cannot be forked after torch's autograd has run in
    it. A signal is passed on to the running processes, and no other process is started. If this process is killed, they
    get SIGTERM.

    Args:
        functions: can be pickled, as can what they return; errors are printed as `exit_status` does. The next one is
            taken when a process may start.
        parallel: the maximum number of processes at the same time.
        imports: modules that the server imports once for all processes.

    Raises:
        Stopped: after the end of all processes, if there was a signal.
    """
    running: dict[int, _Running] = {}
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for one in running.values():
            os.kill(cast(int, one.process.pid), signum)

    before = {signum: signal.getsignal(signum) for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, signal.SIG_IGN)  # the server outlives a closed terminal
    multiprocessing.set_forkserver_preload([*imports])
    with _same_import_path():
        forkserver.ensure_running()
    for signum in before:
        signal.signal(signum, forward)
    folder = tempfile.TemporaryDirectory()
    try:
        waiting = enumerate(functions)
        while True:
            while len(running) < parallel and not received and (one := next(waiting, None)):
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal must find the new process in `running`
                started = None if received else _start(*one, Path(folder.name), [*before])
                if started:
                    running[started.process.sentinel] = started
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            if not running:
                break
            for sentinel in wait(list(running)):
                yield running.pop(sentinel).ended()  # type: ignore[call-overload]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for one in running.values():
            one.process.kill()
        folder.cleanup()
    if received:
        raise Stopped(received[0])


@contextmanager
def _same_import_path() -> Iterator[None]:
    """Make new Python processes import from this one's `sys.path`; of a fork server, Python 3.11 passes it on later."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["PYTHONSAFEPATH"] = "1"  # not from the working directory
    try:
        yield
    finally:
        _restore_environment(before)


def _restore_environment(before: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _start(number: int, function: Callable[[], Any], folder: Path, signals: Sequence[int]) -> _Running:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    files = folder / f"{number}.out", folder / f"{number}.err"
    process = multiprocessing.get_context("forkserver").Process(
        target=_work, args=(function, sender, files, signals, dict(os.environ))
    )
    process.start()
    sender.close()
    return _Running(number, process, receiver, files)


def _work(
    function: Callable[[], Any],
    sender: Connection,
    files: tuple[Path, Path],
    signals: Sequence[int],
    environment: Mapping[str, str],
) -> None:
    """Call the function in the new process, with its output in files."""
    _restore_environment(environment)
    os.setpgrp()  # Ctrl-C in a terminal reaches the parent only
    for signum in signals:
        signal.signal(signum, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout, sys.stderr = streams = [file.open("w") for file in files]
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
    sys.exit(exit_status(lambda: sender.send(function())))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
