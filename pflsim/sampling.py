"""What a run draws for a round: who takes part, and coins that are common to all."""

from __future__ import annotations

from collections.abc import Iterable

from pflsim.errors import SettingsError
from pflsim.seeding import numpy_generator


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


def befallen(seed: int, purpose: str, round_number: int, clients: Iterable[int], p: float) -> tuple[int, ...]:
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
