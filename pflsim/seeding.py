"""Randomness as a function of (run seed, purpose, client, round), and what a run draws from it for a round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pflsim.errors import SettingsError


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


def cohort_size(clients: int, fraction: float) -> int:
    """How many of `clients` take part in a round: fraction · clients, rounded half up.

    Raises:
        SettingsError: the fraction is outside (0, 1], or so small that nobody takes part.
    """
    if not 0 < fraction <= 1:
        raise SettingsError(f"fraction={fraction} is not in (0, 1]: it is the share of clients in a round")
    size = int(fraction * clients + 0.5)
    if size < 1:
        raise SettingsError(
            f"fraction={fraction} of {clients} clients selects nobody; one client is fraction={1 / clients:.3g}"
        )
    return size


def cohort(seed: int, round_number: int, clients: int, fraction: float) -> tuple[int, ...]:
    """The ids of the clients in a round, ascending, drawn without replacement; a function of (seed, round) alone."""
    size = cohort_size(clients, fraction)
    if size == clients:
        return tuple(range(clients))
    drawn = numpy_generator(seed, "cohort", round_number=round_number).choice(clients, size=size, replace=False)
    return tuple(sorted(int(i) for i in drawn))


def coin(seed: int, round_number: int, p: float) -> bool:
    """A round's coin, true with probability p: the same for the server and all clients, without a message."""
    return bool(numpy_generator(seed, "coin", round_number=round_number).random() < p)


def sample_faults(seed: int, purpose: str, round_number: int, clients: Iterable[int], p: float) -> tuple[int, ...]:
    """Those of a round's clients whom something befalls, each with probability p.

    A function of (seed, purpose, round, client): it does not matter who else takes part.

    Args:
        seed: the run's seed.
        purpose: "dropout" or "straggler".
        round_number: from 1.
        clients: who takes part.
        p: probability for each.
    """
    if p <= 0:
        return ()
    return tuple(c for c in clients if numpy_generator(seed, purpose, c, round_number).random() < p)
