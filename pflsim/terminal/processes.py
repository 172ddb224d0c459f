"""Runs functions in processes of their own, several at once, for the runs of a sweep."""

import io
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import forkserver
from types import FrameType
from typing import Any

from pflsim.engine.interrupts import SIGNALS, Stopped
from pflsim.progress import doing
from pflsim.terminal.exit_status import exit_status

LONGEST_FOLDER = 60
"""Bytes of a folder for temporary files in which the path of a socket, 107 bytes at most, has room."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A function that has ended.

    Args:
        number: of the function, from 0.
        result: what it returned; None if it failed.
        output, errors: what it printed.
    """

    number: int
    result: Any
    output: str
    errors: str


def in_processes(functions: Iterable[Callable[[], Any]], parallel: int) -> Iterator[Ended]:
    """Call functions in other processes and yield them in the order of their ends.

    Each process has a pool of its own, because the death of a process ends all others of its pool. A signal is passed
    on to all processes, and no other function is started. If this process is killed, they get SIGTERM.

    Args:
        functions: can be pickled, as can what they return; errors are printed as `exit_status` does. The next one is
            taken when a process is free.
        parallel: the maximum number of processes.

    Raises:
        Stopped: after the end of all functions, if there was a signal.
    """
    context, others = multiprocessing.get_context("forkserver"), multiprocessing.active_children()
    received, idle = list[int](), list[ProcessPoolExecutor]()
    running: dict[Future[tuple[Any, str, str]], tuple[int, ProcessPoolExecutor]] = {}

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in multiprocessing.active_children():
            if process not in others and process.pid:
                os.kill(process.pid, signum)

    doing("")
    import_early()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, forward)
    try:
        waiting = enumerate(functions)
        while True:
            while len(running) < parallel and not received and (one := next(waiting, None)):
                pool = idle.pop() if idle else ProcessPoolExecutor(1, context, _begin, ([*before], {**os.environ}))
                running[pool.submit(_call, one[1])] = one[0], pool
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, pool = running.pop(future)
                try:
                    ended = Ended(number, *future.result())
                    idle.append(pool)
                except BrokenProcessPool:
                    ended = Ended(number, None, "", "its process was killed; sweep.parallel=1 needs less memory\n")
                yield ended
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for process in multiprocessing.active_children() if running else ():
            if process not in others:
                process.kill()
        for pool in [*idle, *(pool for _, pool in running.values())]:
            pool.shutdown()
    if received:
        raise Stopped(received[0])


def import_early() -> None:
    """Start the process from which `in_processes` forks, and have it import what runs need while this one goes on."""
    multiprocessing.set_forkserver_preload(["lightning_modules.quick_import", "ray_actors.run"])
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # new processes inherit this until `_begin`
    if len(os.fsencode(folder := tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    forkserver.ensure_running()
    tempfile.tempdir = folder
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _begin(signals: Sequence[int], environment: dict[str, str]) -> None:
    """Prepare a new process; a signal ends it, except during a run, which installs its own handlers."""
    os.environ.clear()
    os.environ.update(environment)
    os.setpgrp()  # Ctrl-C in a terminal reaches the parent only
    for signum in signals:
        signal.signal(signum, lambda received, frame: os._exit(128 + received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGTERM)


def _call(function: Callable[[], Any]) -> tuple[Any, str, str]:
    """Call the function; returns its result, or None if it failed, and what it printed."""
    found, output, errors = list[Any](), io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        exit_status(lambda: found.append(function()))
    if not multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
        os._exit(1)
    return found[0] if found else None, output.getvalue(), errors.getvalue()
