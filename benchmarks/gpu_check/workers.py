"""Processes that answer messages, without Ray."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

Ask = Callable[[Sequence[Any]], list[Any]]
"""Sends each process a message, and returns their answers in the same order."""


@contextmanager
def workers(make: Callable[..., Callable[[Any], Any]], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Ask]:
    """Start a process for each tuple of arguments; they end with the block.

    Args:
        make: called in the process with its arguments; returns the function that answers a message.
        arguments: of each process. These, messages and answers are pickled as bytes: as shared memory, tensors would
            need a file descriptor each.

    Raises:
        RuntimeError: from a call of `Ask`, if a process failed; the message is its traceback.
    """
    spawn, pipes, processes = multiprocessing.get_context("spawn"), list[Connection](), []

    def ask(messages: Sequence[Any]) -> list[Any]:
        for pipe, message in zip(pipes, messages, strict=True):
            pipe.send_bytes(pickle.dumps(message))
        answers = [pickle.loads(pipe.recv_bytes()) for pipe in pipes]
        failures = [answer for succeeded, answer in answers if not succeeded]
        if failures:
            raise RuntimeError(failures[0])
        return [answer for _, answer in answers]

    try:
        for given in arguments:
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(there, make, pickle.dumps(given)), daemon=True)
            process.start()
            there.close()  # or the end of the process would not end the pipe
            processes.append(process)
            pipes.append(here)
        yield ask
    finally:
        for process in processes:
            process.kill()


def _serve(pipe: Connection, make: Callable[..., Callable[[Any], Any]], given: bytes) -> None:
    answer: Callable[[Any], Any] | None = None
    while True:
        message = pickle.loads(pipe.recv_bytes())
        try:
            answer = answer or make(*pickle.loads(given))
            result = True, answer(message)
        except Exception:
            result = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(result))
