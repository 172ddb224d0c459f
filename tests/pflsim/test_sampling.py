"""Cohorts: the right number, nobody twice, the same for every method."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pflsim.errors import SettingsError
from pflsim.seeding import cohort, cohort_size

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
    assert drawn == cohort(seed, t, clients, fraction)


def test_half_is_rounded_up() -> None:
    assert [cohort_size(25, f) for f in (0.1, 0.02, 0.5)] == [3, 1, 13]


def test_rounds_and_seeds_differ_and_every_client_is_drawn() -> None:
    rounds = [cohort(0, t, 20, 0.25) for t in range(1, 60)]
    assert len(set(rounds)) > 50
    assert set().union(*rounds) == set(range(20))
    assert rounds != [cohort(1, t, 20, 0.25) for t in range(1, 60)]


@given(st.integers(1, 3000))
def test_a_fraction_that_selects_nobody_is_refused_with_one_that_works(clients: int) -> None:
    with pytest.raises(SettingsError, match="selects none") as caught:
        cohort_size(clients, 0.49 / clients)
    advised = re.search(r"one client is fraction=(\S+)", str(caught.value))
    assert advised and cohort_size(clients, float(advised[1])) == 1
