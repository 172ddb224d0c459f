"""Allocates the official test examples to clients in split=official."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from pflsim.errors import SettingsError


def own_test_counts(held: np.ndarray, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the number of test examples per client and class, close to each client's own label distribution.

    Client i has D_ij training examples of class j; T_j test examples of class j exist. Each client receives about
    `rho · D_ij` examples, with `rho = min_j T_j / Σ_i D_ij` over the classes that have both. Quotas are rounded down.
    The remaining examples of a class go to the clients with the largest accumulated rounding loss.
    A client with no test example then receives one of a class it holds, if necessary from another client.

    Args:
        held: [N, C] int, the D_ij.
        available: [C] int, the T_j.
        rng: breaks ties between clients.

    Returns:
        [N, C] int. Column sums are at most T_j, entries are zero where D_ij is zero, and every row sum is at least 1.

    Raises:
        SettingsError: there is no allocation that gives every client a test example.
    """
    totals = held.sum(axis=0)
    usable = np.flatnonzero((totals > 0) & (available > 0))
    counts = np.zeros_like(held)
    if len(usable):
        rho = min(Fraction(int(available[j]), int(totals[j])) for j in usable)
        deficit = np.zeros(len(held))
        for j in usable:
            deficit = _round_fairly(counts, held, int(j), int(rho * int(totals[j])), deficit, rng)
    for client in np.flatnonzero(counts.sum(axis=1) == 0):
        if not _give_one(counts, held, available, int(client), set()):
            raise SettingsError(
                f"split=official: no test example of its own classes is left for client {client}: {len(held)} clients "
                f"share {available.sum()} official test examples; use fewer clients, or split=merged"
            )
    return counts


def _round_fairly(
    counts: np.ndarray, held: np.ndarray, j: int, total: int, deficit: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Distribute `total` examples of class j in proportion to held[:, j], in place; return the accumulated losses.

    Each client receives its quota rounded down. The remaining examples go to the clients with the largest accumulated
    rounding loss. Largest remainders per class would favour the same clients in every class if many quotas are equal.
    """
    weights, whole = held[:, j].astype(np.int64), int(held[:, j].sum())
    counts[:, j], remainder = np.divmod(weights * total, whole)
    deficits = deficit + remainder / whole
    candidates = np.flatnonzero(remainder)
    order = candidates[np.lexsort((rng.random(len(candidates)), -deficits[candidates].round(9)))]
    receivers = order[: total - int(counts[:, j].sum())]
    counts[receivers, j] += 1
    deficits[receivers] -= 1
    return deficits


def _give_one(counts: np.ndarray, held: np.ndarray, available: np.ndarray, client: int, tried: set[int]) -> bool:
    """Give a client one more test example, in place: an unused one, one of another client, or one by a chain of swaps.

    This searches an augmenting path over the classes. `tried` prevents visiting a class twice.
    """
    own = [int(j) for j in np.argsort(-held[client], kind="stable") if held[client, j] > 0 and j not in tried]
    for j in own:
        if counts[:, j].sum() < available[j]:
            counts[client, j] += 1
            return True
    sizes = counts.sum(axis=1)
    for j in own:
        donor = int(np.argmax(np.where(counts[:, j] > 0, sizes, 0)))
        if counts[donor, j] > 0 and sizes[donor] > 1:
            counts[donor, j] -= 1
            counts[client, j] += 1
            return True
    for j in own:
        tried.add(j)
        for donor in np.flatnonzero(counts[:, j]):
            if donor != client and _give_one(counts, held, available, int(donor), tried):
                counts[donor, j] -= 1
                counts[client, j] += 1
                return True
    return False
