"""Errors of clients, with the client, the round and the phase in the message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pflsim.errors import ClientError

GPU_MEMORY_ADVICE = (
    "lower placement.actors_per_gpu so that each actor has a larger share of a GPU; if it is 1, lower "
    "lockstep_clients, batch_size or eval.batch_size"
)


@contextmanager
def client_errors(
    client: int, round_number: int, phase: str, suspects: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Raise an error inside the block as a `ClientError` with these arguments."""
    try:
        yield
    except Exception as error:
        raise ClientError(client, round_number, phase, in_words(error), suspects) from error


def in_words(error: Exception) -> str:
    """Return an error as one line. If GPU memory ran out, the advice is this project's instead of torch's."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return f"{type(error).__name__}: {error}"
    wanted = [part for part in str(error).split(". ") if part.startswith("Tried to allocate")]
    return f"out of memory on the GPU{''.join(f' (t{part[1:]})' for part in wanted)}: {GPU_MEMORY_ADVICE}"
