"""Random streams as a function of (run seed, purpose, client, round), and the draws of a round."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pflsim.errors import SettingsError
from pflsim.participation import Participation

SAMPLED = Participation()


def seed_for(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> int:
    """Derive a 63-bit seed by a stable hash (BLAKE2b), the same on every machine and Python version.

    Args:
        seed: the run's seed.
        purpose: names the stream, e.g. "batches".
        client: client id, or -1 for streams that belong to no client.
        round_number: the round from 1, or -1 for streams that belong to no round.
    """
    text = f"{seed}|{purpose}|{client}|{round_number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> torch.Generator:
    """Return a CPU torch generator with the seed of `seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, client, round_number))


def numpy_generator(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> np.random.Generator:
    """Return a NumPy generator with the seed of `seed_for`."""
    return np.random.Generator(np.random.PCG64(seed_for(seed, purpose, client, round_number)))


@contextmanager
def seeded_global(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python inside the block and restore them after it.

    Initialisers of torch.nn modules and dropout need this, since they take no generator; a user's code may use any.
    """
    with restored_generators():
        seed_generators(seed, purpose, client, round_number)
        yield


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python after the block."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=_devices()):
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def seed_generators(seed: int, purpose: str, client: int = -1, round_number: int = -1) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    number = seed_for(seed, purpose, client, round_number)
    random.seed(number)
    np.random.seed(number % 2**32)
    # torch.manual_seed stores a stack trace for each unused kind of device and never frees it.
    torch.default_generator.manual_seed(number)
    if _devices():
        torch.cuda.manual_seed_all(number)


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def cohort_size(clients: int, fraction: float) -> int:
    """Return how many of `clients` take part in a round: fraction · clients, rounded half up.

    Raises:
        SettingsError: the fraction selects no client.
    """
    size = int(fraction * clients + 0.5)
    if size < 1:
        least = f"fraction={1 / clients:.3g}"
        raise SettingsError(f"fraction={fraction} selects none of {clients} clients; one client is {least}")
    return size


def cohort(
    seed: int, round_number: int, clients: int, fraction: float, how: Participation = SAMPLED
) -> tuple[int, ...]:
    """Draw the clients of a round without replacement, as a function of (seed, round); ids ascend."""
    available = np.arange(clients)
    if how.cycle > 1:
        groups = np.array_split(numpy_generator(seed, "cycle").permutation(clients), how.cycle)
        available = np.sort(groups[(round_number - 1) // how.cycle_rounds % how.cycle])
    if how.sampling == "poisson":
        return sampled(seed, "participation", round_number, available.tolist(), fraction)
    size = cohort_size(len(available), fraction)
    if size < len(available):
        generator = numpy_generator(seed, "cohort", round_number=round_number)
        available = np.sort(generator.choice(available, size=size, replace=False))
    return tuple(available.tolist())


def past_cohort(
    size: int, seed: int, round_number: int, clients: int, fraction: float, how: Participation = SAMPLED
) -> tuple[int, ...]:
    """Return the clients of a past round: all, if it had `size` of them, or those that `cohort` draws."""
    return tuple(range(clients)) if size == clients else cohort(seed, round_number, clients, fraction, how)


def evaluated(asked: str | int, seed: int, clients: int, participants: tuple[int, ...]) -> tuple[int, ...]:
    """Return which clients a round evaluates, by `eval.clients`: all, the participants, or N that the seed chooses."""
    if isinstance(asked, int):
        chosen = numpy_generator(seed, "evaluated").choice(clients, asked, replace=False)
        return tuple(sorted(chosen.tolist()))
    return tuple(range(clients)) if asked == "all" else participants


def newcomer_rows(seed: int, client: int, rows: int) -> torch.Tensor:
    """Return the order in which a newcomer uses its training rows, if it may use few of them."""
    return torch.randperm(rows, generator=torch_generator(seed, "newcomer", client))


def coin(seed: int, round_number: int, p: float) -> bool:
    """Toss the coin of a round, true with probability p; server and clients get the same result without a message."""
    return bool(numpy_generator(seed, "coin", round_number=round_number).random() < p)


def sampled(seed: int, purpose: str, round_number: int, clients: Iterable[int], p: float) -> tuple[int, ...]:
    """Draw clients for a round, each with probability p: those that take part, or have a simulated fault.

    A draw is a function of (seed, purpose, round, client), independent of the other clients.

    Args:
        seed: the run's seed.
        purpose: "participation", "dropout" or "straggler".
        round_number: from 1.
        clients: of whom they are drawn.
        p: the probability.
    """
    if p <= 0:
        return ()
    return tuple(c for c in clients if numpy_generator(seed, purpose, c, round_number).random() < p)
