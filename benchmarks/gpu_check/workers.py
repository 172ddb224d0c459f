"""Processes that answer messages, without Ray."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

Ask = Callable[[Sequence[Any]], list[Any]]
"""Sends each process a message, and returns their answers in the same order; an error in a process is raised."""
_answer: Callable[[Any], Any]


@contextmanager
def workers(make: Callable[..., Callable[[Any], Any]], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Ask]:
    """Start a process for each tuple of arguments; they end with the block.

    Args:
        make: called in the process with its arguments; returns the function that answers a message.
        arguments: of each process. These, messages and answers are pickled as bytes: as shared memory, tensors would
            need a file descriptor each.
    """
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in arguments]

        def ask(function: Callable[..., bytes], messages: Sequence[Any]) -> list[Any]:
            pairs = zip(pools, messages, strict=True)
            sent = [pool.submit(function, pickle.dumps(message)) for pool, message in pairs]
            return [pickle.loads(found.result()) for found in sent]

        ask(_made, [(make, given) for given in arguments])
        yield lambda messages: ask(_answered, messages)


def _made(given: bytes) -> bytes:
    global _answer
    make, arguments = pickle.loads(given)
    _answer = make(*arguments)
    return pickle.dumps(None)


def _answered(message: bytes) -> bytes:
    return pickle.dumps(_answer(pickle.loads(message)))
