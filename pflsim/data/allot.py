"""How many official test examples of each class a client gets."""

from __future__ import annotations

import numpy as np

from pflsim.errors import SettingsError


def own_test_counts(held: np.ndarray, there: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Test examples per client and class in each client's own label distribution.

    With D_ij training examples of class j at client i and T_j test examples of class j,
    `rho = min_j T_j / Σ_i D_ij` over the classes that have both, and client i gets about `rho · D_ij` of class j: the
    products are rounded down, and what is left of a class goes, one each, to the clients furthest behind their share
    of all classes so far (see `_round_fairly`); no class is exceeded, and no client id is favoured.
    A client that this leaves with nothing gets one example of a class it holds, spare or taken from another client.

    Args:
        held: [N, C] int, the D_ij.
        there: [C] int, the T_j.
        rng: decides between clients that are equally far behind.

    Returns:
        [N, C] int, column sums at most T_j, zero where D_ij is zero, every row sum at least 1.

    Raises:
        SettingsError: no way to give every client a test example.
    """
    totals = held.sum(axis=0)
    usable = np.flatnonzero((totals > 0) & (there > 0))
    counts = np.zeros_like(held)
    if len(usable):
        # compare the fractions T_j / Σ_i D_ij by cross multiplication (Python integers): floats could tie wrongly
        tight = int(usable[0])
        for j in usable[1:]:
            if int(there[j]) * int(totals[tight]) < int(there[tight]) * int(totals[j]):
                tight = int(j)
        behind = np.zeros(len(held))
        for j in usable:
            take = int(there[tight]) * int(totals[j]) // int(totals[tight])
            behind = _round_fairly(counts, held, int(j), take, behind, rng)
    for client in np.flatnonzero(counts.sum(axis=1) == 0):
        if not _give_one(counts, held, there, int(client), set()):
            raise SettingsError(
                f"split=official: no test example for client {client}: {len(held)} clients share {there.sum()} "
                "official test examples, each of a class the client holds; use fewer clients, or split=merged"
            )
    return counts


def _round_fairly(
    counts: np.ndarray, held: np.ndarray, j: int, take: int, behind: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Share `take` examples of class j out in proportion to held[:, j] (in place); returns how far each is behind now.

    Everyone gets the quota rounded down, and one more those who have lost most to rounding up to and including this
    class. Rounding class by class to the largest remainders would, where many quotas are equal, give the same clients
    the spare example in every class.
    """
    weights, whole = held[:, j].astype(np.int64), int(held[:, j].sum())
    counts[:, j], remainder = np.divmod(weights * take, whole)
    owed = behind + remainder / whole
    able = np.flatnonzero(remainder)
    order = able[np.lexsort((rng.random(len(able)), -owed[able].round(9)))]
    lucky = order[: take - int(counts[:, j].sum())]
    counts[lucky, j] += 1
    owed[lucky] -= 1
    return owed


def _give_one(counts: np.ndarray, held: np.ndarray, there: np.ndarray, client: int, tried: set[int]) -> bool:
    """Give a client one more test example, in place: spare, from a client with several, or by a chain of swaps.

    An augmenting path over the classes; `tried` keeps it from visiting a class twice, so it ends within C steps.
    """
    own = [int(j) for j in np.argsort(-held[client], kind="stable") if held[client, j] > 0 and j not in tried]
    for j in own:
        if counts[:, j].sum() < there[j]:
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
            if donor != client and _give_one(counts, held, there, int(donor), tried):
                counts[donor, j] -= 1
                counts[client, j] += 1
                return True
    return False
