"""Errors of clients: whose they are, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pflsim.errors import ClientError

LESS = (
    "lower placement.actors_per_gpu, for a larger share of a GPU to each actor; at 1, a smaller lockstep_clients, "
    "batch_size or eval.batch_size takes less"
)


@contextmanager
def client_errors(
    client: int, round_number: int, phase: str, suspects: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Say of an error whose it was."""
    try:
        yield
    except Exception as error:
        raise ClientError(client, round_number, phase, in_words(error), suspects) from error


def in_words(error: Exception) -> str:
    """An error in a line; of a GPU that has no memory left, without torch's own advice but with ours."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return f"{type(error).__name__}: {error}"
    wanted = [part for part in str(error).split(". ") if part.startswith("Tried to allocate")]
    return f"out of memory on the GPU{''.join(f' (t{part[1:]})' for part in wanted)}: {LESS}"
