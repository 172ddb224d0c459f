"""Masks of entries, by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.fusion.masks import collaboration, from_bits, grown, largest, mean_of_sharers, overlaps, sensitive, to_bits


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def chosen(values: np.ndarray, count: int) -> set[int]:
    """The flat indices of the largest values; of equal ones the lowest."""
    flat = values.ravel()
    return set(sorted(range(flat.size), key=lambda e: (-flat[e], e))[:count])


def indices(mask: Tensor) -> set[int]:
    return set(np.flatnonzero(mask.numpy()).tolist())


def test_the_largest_entries_and_of_equal_ones_the_first() -> None:
    values = rng().integers(0, 4, (5, 7)).astype(float)
    for count in (0, 1, 8, 34, 35):
        found = largest(torch.from_numpy(values), count)
        assert found.shape == (5, 7) and indices(found) == chosen(values, count)


@pytest.mark.parametrize(("p", "alpha"), [(0.25, 0.8), (0.25, 0.3), (0.0, 1.0), (1.0, 1.0), (0.5, 0.0)])
def test_masks_grow_by_p_of_the_shared_entries_up_to_alpha(p: float, alpha: float) -> None:
    private, taken = torch.zeros(6, 9, dtype=torch.bool), set[int]()
    for step in range(8):
        change = rng(step).integers(0, 6, (6, 9)).astype(float)
        left = np.where(private.numpy(), -1, change)
        count = min(round(p * (54 - len(taken))), int(alpha * 54) - len(taken))
        taken |= chosen(left, max(count, 0))
        private = grown(private, torch.from_numpy(change), p, alpha)
        assert indices(private) == taken and len(taken) <= alpha * 54
    assert len(taken) == {0.8: 43, 0.3: 16, 0.0: 0, 1.0: 54 * (p > 0)}[alpha]


def test_an_unchanged_tensor_has_no_marks() -> None:
    start = rng().normal(size=(4, 5))
    end = start + rng(1).normal(size=(4, 5))
    for tau, count in ((0.0, 0), (0.33, 6), (1.0, 20)):
        found = sensitive(torch.from_numpy(start), torch.from_numpy(end), tau)
        assert indices(found) == chosen(abs((end - start) * end), count)
    assert not sensitive(torch.from_numpy(start), torch.from_numpy(start), 0.5).any()


def test_each_entry_is_the_uniform_mean_of_those_who_share_it() -> None:
    values, private = rng().normal(size=(3, 4, 5)), rng(1).random((3, 4, 5)) < 0.5
    private[:, 0, 0], old = True, rng(2).normal(size=(4, 5))
    sent = [torch.from_numpy(v[~m]) for v, m in zip(values, private, strict=True)]
    found = mean_of_sharers(sent, [torch.from_numpy(m) for m in private], torch.from_numpy(old))
    for e in np.ndindex(4, 5):
        own = [v[e] for v, m in zip(values, private, strict=True) if not m[e]]
        np.testing.assert_allclose(found[e], np.mean(own) if own else old[e], rtol=1e-14)
    assert found[0, 0] == old[0, 0]


def masks(count: int) -> list[dict[str, Tensor]]:
    shapes = {"a": (6, 5), "b": (7,)}
    return [{k: torch.from_numpy(rng(i).random(s) < 0.2 * (i + 1)) for k, s in shapes.items()} for i in range(count)]


def test_overlaps() -> None:
    found, flat = overlaps(masks(4)), [np.concatenate([m.numpy().ravel() for m in own.values()]) for own in masks(4)]
    for i, a in enumerate(flat):
        for j, b in enumerate(flat):
            np.testing.assert_allclose(found[i, j], 1 - (a ^ b).sum() / (a.sum() + b.sum()), rtol=1e-14)
    none = [{"a": torch.zeros(3, dtype=torch.bool)}] * 2
    assert not overlaps(none).any()


def test_collaborators_reach_a_threshold_that_rises() -> None:
    overlap = torch.tensor([[1, 0.2, 0.6, 0.4], [0.2, 1, 0.3, 0.5], [0.6, 0.3, 1, 0.1], [0.4, 0.5, 0.1, 1]]).double()
    for progress in (0.0, 0.3, 1.0, 1.5):
        threshold = 0.35 + progress * (0.6 - 0.35)
        found = collaboration(overlap, progress).numpy()
        for i in range(4):
            members = [j for j in range(4) if j == i or overlap[i, j] >= threshold]
            np.testing.assert_allclose(found[i], [(j in members) / len(members) for j in range(4)], rtol=1e-15)
    assert torch.equal(collaboration(overlap, 1.5), torch.eye(4).double())
    assert collaboration(overlap, 1.0)[0].tolist() == [0.5, 0, 0.5, 0]  # the largest overlap


def test_clients_with_equal_overlaps_stay_together() -> None:
    """Whatever the threshold; the mean of 0.1s is above 0.1."""
    assert torch.full((380,), 0.1, dtype=torch.float64).mean() != 0.1
    equal = torch.full((20, 20), 0.1, dtype=torch.float64)
    assert all((collaboration(equal, progress) == 1 / 20).all() for progress in (0.1, 1.0, 7.0))
    assert collaboration(torch.ones(1, 1).double(), 0.5).tolist() == [[1.0]]


def test_masks_as_bits() -> None:
    mask = torch.from_numpy(rng().random((3, 5, 2)) < 0.4)
    bits = to_bits(mask)
    assert bits.nbytes == 4 and torch.equal(from_bits(bits, (3, 5, 2)), mask)
    last = mask.new_tensor(rng().random((2, 3, 4, 4)) < 0.4).to(memory_format=torch.channels_last)
    assert torch.equal(from_bits(to_bits(last), last.shape), last)
    assert torch.equal(from_bits(to_bits(torch.tensor(True)), ()), torch.tensor(True))
