"""Randomness as a function of (run seed, purpose, client, round): no worker, order or global state has a say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> int:
    """Derive a 63-bit seed by a stable hash (BLAKE2b), the same on every machine and Python version.

    Args:
        seed: the run's seed.
        purpose: what the numbers are for, e.g. "batches"; two purposes never share a stream.
        client: client id, or -1 where no client is meant.
        round_number: the round from 1, or -1 where no round is meant.
    """
    text = f"{seed}|{purpose}|{client}|{round_number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> torch.Generator:
    """A CPU torch generator with the seed of `seed_for`."""
    generator = torch.Generator()
    generator.manual_seed(seed_for(seed, purpose, client, round_number))
    return generator


def numpy_generator(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> np.random.Generator:
    """A NumPy generator with the seed of `seed_for`."""
    return np.random.Generator(np.random.PCG64(seed_for(seed, purpose, client, round_number)))


@contextmanager
def seeded_global(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> Iterator[None]:
    """Seed torch's global generators inside the block and put them back after it.

    For what cannot take a generator: initialisers of torch.nn modules, dropout.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    number = seed_for(seed, purpose, client, round_number)
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed leaves a note with a stack trace, for good, for each kind of device that is not in use.
        torch.default_generator.manual_seed(number)
        if devices:
            torch.cuda.manual_seed_all(number)
        yield
