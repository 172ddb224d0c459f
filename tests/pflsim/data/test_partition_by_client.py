"""Dirichlet proportions of each client's own."""

import numpy as np
import pytest

from pflsim.data.partitions import dirichlet_by_client

LABELS = np.repeat(np.arange(10), 6000)


def counts(clients: int = 100, seed: int = 0, labels: np.ndarray = LABELS, **settings: float) -> np.ndarray:
    parts = dirichlet_by_client(labels, 10, clients, np.random.default_rng(seed), None, **settings)  # type: ignore[arg-type]
    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt), "no example twice"
    return np.stack([np.bincount(labels[p], minlength=10) for p in parts])


@pytest.mark.parametrize("alpha", [0.001, 0.1, 10.0])
def test_sizes_are_those_of_the_paper(alpha: float) -> None:
    sizes = counts(alpha=alpha).sum(1)
    assert sizes.tolist() == [120] * 10 + [300] * 30 + [600] * 30 + [900] * 20 + [1200] * 10


def test_balanced_sizes() -> None:
    assert set(counts(balanced=True, used=1.0).sum(1).tolist()) == {600}


def test_skew_falls_with_alpha() -> None:
    largest = [(c.max(1) / c.sum(1)).mean() for c in (counts(alpha=a) for a in (0.001, 0.1, 1.0, 100.0))]
    assert largest == sorted(largest, reverse=True)
    assert largest[0] > 0.9 and largest[-1] < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_everything_can_be_given_out(seed: int) -> None:
    assert (counts(seed=seed, alpha=1e-4, used=1.0).sum(0) == 6000).all()


def test_few_clients_and_missing_classes() -> None:
    labels = np.repeat([0, 3, 7], 50)
    for clients in (1, 2, 3, 7):
        found = counts(clients=clients, labels=labels, used=1.0)
        assert (found.sum(1) > 0).all() and found.sum() == 150
