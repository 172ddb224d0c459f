"""Randomness is a function of (seed, purpose, client, round) and of nothing else; cohorts."""

import hashlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pflsim.errors import SettingsError
from pflsim.participation import Participation
from pflsim.seeding import cohort, cohort_size, evaluated, numpy_generator, seed_for, seeded_global, torch_generator


def test_seed_is_the_top_63_bits_of_blake2b_of_the_text() -> None:
    for text, args in {
        b"0|init|-1|-1": (0, "init"),
        b"7|batches|3|12": (7, "batches", 3, 12),
        b"-5|cohort|-1|2": (-5, "cohort", -1, 2),
    }.items():
        eight = hashlib.blake2b(text, digest_size=8).digest()
        assert seed_for(*args) == sum(byte << (8 * at) for at, byte in enumerate(eight)) // 2


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


counts = st.integers(1, 300)
fractions = st.floats(0.001, 1.0)


@given(st.integers(0, 2**31), st.integers(1, 1000), counts, fractions)
def test_cohort_is_a_sorted_draw_without_replacement(seed: int, t: int, clients: int, fraction: float) -> None:
    try:
        size = cohort_size(clients, fraction)
    except SettingsError:
        assert fraction * clients < 0.5 + 1e-9
        return
    drawn = cohort(seed, t, clients, fraction)
    assert len(drawn) == size and abs(size - fraction * clients) <= 0.5 + 1e-9
    assert list(drawn) == sorted(set(drawn)) and set(drawn) <= set(range(clients))
    assert all(type(client) is int for client in drawn)
    expected = numpy_generator(seed, "cohort", round_number=t).choice(clients, size=size, replace=False)
    assert drawn == (tuple(sorted(expected.tolist())) if size < clients else tuple(range(clients)))


def test_half_is_rounded_up() -> None:
    assert [cohort_size(25, f) for f in (0.1, 0.02, 0.5)] == [3, 1, 13]


def test_rounds_and_seeds_differ_and_every_client_is_drawn() -> None:
    rounds = [cohort(0, t, 20, 0.25) for t in range(1, 60)]
    assert len(set(rounds)) > 50
    assert set().union(*rounds) == set(range(20))
    assert rounds != [cohort(1, t, 20, 0.25) for t in range(1, 60)]


def test_poisson_sampling_draws_each_client_alone() -> None:
    """Mean and variance over rounds are within four standard errors of those of a binomial distribution."""
    n, q, t = 30, 0.1, 2000
    rounds = [cohort(0, number, n, q, Participation("poisson")) for number in range(1, t + 1)]
    sizes, var = np.array([*map(len, rounds)]), n * q * (1 - q)
    assert abs(sizes.mean() - n * q) < 4 * np.sqrt(var / t) and abs(sizes.var() - var) < 4 * var * np.sqrt(2 / t)
    counts, expected = np.bincount([c for drawn in rounds for c in drawn], minlength=n), q * t
    assert len(counts) == n and (abs(counts - expected) < 4 * np.sqrt(expected)).all() and sizes.min() == 0


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_groups_of_a_cycle_are_available_in_turn(sampling: Any) -> None:
    how = Participation(sampling, cycle=4, cycle_rounds=2)
    rounds = [cohort(3, t, 10, 1.0, how) for t in range(1, 17)]
    assert rounds[0::2] == rounds[1::2] and rounds[:8] == rounds[8:] and sorted(sum(rounds[:8:2], ())) == [*range(10)]
    assert sorted(map(len, rounds[:8:2])) == [2, 2, 3, 3]
    some = [{*cohort(3, t, 10, 0.5, how)} for t in range(1, 17)]
    assert all(drawn <= {*group} for drawn, group in zip(some, rounds, strict=True)) and some[:8] != some[8:]


@given(st.integers(1, 3000))
def test_a_fraction_that_selects_nobody_is_refused_with_one_that_works(clients: int) -> None:
    with pytest.raises(SettingsError, match="selects none") as caught:
        cohort_size(clients, 0.49 / clients)
    advised = re.search(r"one client is fraction=(\S+)", str(caught.value))
    assert advised and cohort_size(clients, float(advised[1])) == 1
