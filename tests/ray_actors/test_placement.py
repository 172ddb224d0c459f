"""Who lives where, without starting anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pflsim.errors import SettingsError
from pflsim.settings import Placement
from ray_actors.placement import Layout, Supply, balance, lay_out
from ray_actors.seats import ACTOR_MB

works = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@given(works, st.data())
def test_balance(work: list[int], data: st.DataObject) -> None:
    """Every client once, nobody idle, loads at most one client's work apart; the same every time."""
    count = data.draw(st.integers(1, len(work)))
    groups = balance(work, count)
    assert len(groups) == count and all(groups)
    assert sorted(client for group in groups for client in group) == list(range(len(work)))
    assert all(list(group) == sorted(group) for group in groups)
    loads = [sum(max(work[client], 1) for client in group) for group in groups]
    assert max(loads) - min(loads) <= max(max(work), 1)
    assert groups == balance(list(work), count)


@given(st.integers(1, 60), st.integers(1, 12))
def test_equal_clients_are_spread_evenly(clients: int, count: int) -> None:
    sizes = [len(group) for group in balance([3] * clients, min(count, clients))]
    assert max(sizes) - min(sizes) <= 1


def test_longest_first() -> None:
    assert balance([1, 9, 1, 1, 5, 3], 2) == ((1, 2), (0, 3, 4, 5))


@given(works, st.integers(1, 20))
def test_clients_per_actor_is_kept_whatever_the_work(work: list[int], per_actor: int) -> None:
    groups = lay_out(work, Placement(clients_per_actor=per_actor), Supply(4, 0)).groups
    assert len(groups) == -(-len(work) // per_actor)
    assert all(1 <= len(group) <= per_actor for group in groups)
    assert sorted(client for group in groups for client in group) == list(range(len(work)))


def place(clients: int, cpus: float = 4, gpus: float = 0, free_mb: float | None = None, **placement: Any) -> Layout:
    return lay_out([10] * clients, Placement(**placement), Supply(cpus, gpus, free_mb))


@pytest.mark.parametrize(
    ("clients", "cpus", "free_mb", "actors"),
    [
        (3, 4, None, 3),  # one each while there is room
        (4, 4, None, 4),
        (100, 4, None, 4),
        (100, 4, 1e6, 4),
        (100, 64, 10 * ACTOR_MB, 10),  # memory is the bound
        (100, 64, 10 * ACTOR_MB - 1, 9),
        (100, 4, 0, 1),  # one is tried in any case
    ],
)
def test_auto_without_gpus(clients: int, cpus: float, free_mb: float | None, actors: int) -> None:
    layout = place(clients, cpus, free_mb=free_mb)
    assert (len(layout.groups), layout.seats[0].cpus, layout.seats[0].gpus) == (actors, 1.0, 0)
    assert layout.host_of() == {c: at for at, group in enumerate(layout.groups) for c in group}
    assert set(layout.host_of()) == set(range(clients))


def test_what_is_asked_for_is_done_whatever_the_memory() -> None:
    assert len(place(8, free_mb=1, clients_per_actor=1).groups) == 8
    assert len(place(8, free_mb=1, actors=3).groups) == 3


@given(st.integers(1, 64), st.integers(1, 300))
def test_cpu_requests_fit(cpus: int, clients: int) -> None:
    """One CPU each, or shares that Ray can count (in ten-thousandths) and that fit together."""
    layout = place(clients, cpus, clients_per_actor=1)
    parts = layout.seats[0].cpus * 10_000
    assert parts == pytest.approx(round(parts), abs=1e-6)
    assert round(parts) * clients <= cpus * 10_000
    assert layout.seats[0].cpus == 1 or cpus / clients - layout.seats[0].cpus < 1.01e-4


@pytest.mark.parametrize(
    ("clients", "gpus", "per_gpu", "actors", "share"),
    [(10, 1, 1, 1, 1.0), (10, 2, 1, 2, 1.0), (10, 2, 3, 6, 1 / 3), (3, 2, 4, 3, 0.25)],
)
def test_gpu_shares(clients: int, gpus: int, per_gpu: int, actors: int, share: float) -> None:
    layout = lay_out([10] * clients, Placement(gpus=gpus, actors_per_gpu=per_gpu), Supply(cpus=8, gpus=gpus))
    assert (len(layout.groups), layout.seats[0].gpus, layout.seats[0].cpus) == (actors, pytest.approx(share), 1.0)


def test_gpus_that_are_not_asked_for_are_not_used() -> None:
    assert place(10, cpus=4, gpus=2).seats[0].gpus == 0


def test_more_gpu_actors_than_cpus_share_them() -> None:
    layout = lay_out([1] * 8, Placement(gpus=1, actors_per_gpu=8), Supply(cpus=2, gpus=1))
    assert (len(layout.groups), layout.seats[0].cpus) == (8, 0.25)


def test_a_machine_without_cpus_for_ray_is_not_asked_for_any() -> None:
    assert lay_out([1] * 2, Placement(gpus=1), Supply(cpus=0, gpus=1)).seats[0].cpus == 0


@pytest.mark.parametrize(
    ("clients", "supply", "placement", "said"),
    [
        (4, Supply(4, 1), Placement(gpus=2), ["placement.gpus=2", "has 1 GPU"]),
        (4, Supply(0, 0), Placement(), ["0 CPUs", "at least 1"]),
        (4, Supply(4, 0), Placement(actors=5), ["placement.actors=5", "clients=4"]),
        (4, Supply(4, 0), Placement(actors=0), ["placement.actors=0", "between 1 and"]),
        (
            9,
            Supply(4, 2),
            Placement(gpus=2, actors_per_gpu=2, clients_per_actor=1),
            ["9 client actors", "placement.gpus=2", "placement.actors_per_gpu=2", "gives 4", "clients_per_actor"],
        ),
        (9, Supply(4, 1), Placement(gpus=1, actors=2), ["2 client actors", "gives 1"]),
    ],
)
def test_errors_name_demand_and_supply(clients: int, supply: Supply, placement: Placement, said: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        lay_out([1] * clients, placement, supply)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_stacks_stay_whole() -> None:
    stacks = ((0, 1, 2), (3, 4))
    work = (5, 1, 1, 4, 4, 9, 1)
    groups = lay_out(work, Placement(), Supply(3, 0), stacks).groups
    assert sorted(groups) == [(0, 1, 2, 6), (3, 4), (5,)]
    assert lay_out(work, Placement(), Supply(16, 0), stacks).groups == ((5,), (3, 4), (0, 1, 2), (6,))
    assert lay_out(work, Placement(clients_per_actor=3), Supply(2, 0), stacks).groups == ((5,), (3, 4, 6), (0, 1, 2))


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (Placement(clients_per_actor=2), r"clients_per_actor=2, but 3 clients train in lockstep.*lockstep_clients"),
        (Placement(actors=3), r"actors=3, but clients train in lockstep.*stacks: 2.*lockstep_clients"),
    ],
)
def test_stacks_that_cannot_stay_whole_are_refused(placement: Placement, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        lay_out((1, 1, 1, 1, 1), placement, Supply(8, 0), ((0, 1, 2), (3, 4)))
