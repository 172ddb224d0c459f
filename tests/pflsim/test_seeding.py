"""Randomness is a function of (seed, purpose, client, round) and of nothing else."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch

from pflsim.seeding import evaluated, numpy_generator, seed_for, seeded_global, torch_generator


def test_seed_is_the_top_63_bits_of_blake2b_of_the_text() -> None:
    for text, args in {
        b"0|init|-1|-1": (0, "init"),
        b"7|batches|3|12": (7, "batches", 3, 12),
        b"-5|cohort|-1|2": (-5, "cohort", -1, 2),
    }.items():
        eight = hashlib.blake2b(text, digest_size=8).digest()
        assert seed_for(*args) == sum(byte << (8 * at) for at, byte in enumerate(eight)) // 2


def test_seed_never_changes() -> None:
    """Written down, so that a result of today can be had again in years."""
    assert seed_for(0, "init") == 2302344847443564332
    assert seed_for(7, "batches", 3, 12) == 4493896169798987371


def test_every_part_matters() -> None:
    grid = list(itertools.product(range(3), ("batches", "train", "init"), range(-1, 12), range(-1, 12)))
    seeds = {seed_for(*args) for args in grid}
    assert len(seeds) == len(grid)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_repeat_and_leave_the_global_ones_alone() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    a, b, c = (torch.randperm(50, generator=torch_generator(1, "x", client)) for client in (2, 2, 3))
    d, e, f = (numpy_generator(1, "x", client).permutation(50) for client in (2, 2, 3))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert (d == e).all() and not (d == f).all()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # type: ignore[index]


def test_seeded_global_does_not_depend_on_what_was_drawn_before() -> None:
    drawn = []
    for warm in (0, 5):
        torch.rand(warm)
        with seeded_global(3, "init", 1):
            drawn.append(torch.nn.Linear(4, 4).weight.detach().clone())
    assert torch.equal(*drawn)


@pytest.mark.parametrize("fails", [False, True])
def test_seeded_global_puts_the_state_back(fails: bool) -> None:
    torch.rand(3)
    before = torch.get_rng_state()
    try:
        with seeded_global(0, "train", 1, 2):
            torch.rand(7)
            if fails:
                raise KeyError("on purpose")
    except KeyError:
        assert fails
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_chooses_which_clients_are_evaluated() -> None:
    chosen = [evaluated(5, seed, 100, (1, 2)) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2] and all(len({*own}) == 5 for own in chosen)
