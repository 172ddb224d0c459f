"""Which clients live on which actor, and what actors request, without starting anything."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.layout import ACTOR_MB, STEPS, Layout, Node, ResourcesMissing, balance, lay_out

works = st.lists(st.integers(0, 50), min_size=1, max_size=60)


def node(cpus: float, gpus: float = 0, memory_mb: float = 1e6) -> Node:
    return Node("10.0.0.1", cpus, gpus, memory_mb)


def place(work: int | list[int], *nodes: Node, stacks: Any = (), **placement: Any) -> Layout:
    return lay_out([10] * work if isinstance(work, int) else work, Placement(**placement), nodes, stacks)


def alone(work: list[int]) -> list[tuple[int, ...]]:
    return [(client,) for client in range(len(work))]


@given(works, st.data())
def test_balance(work: list[int], data: st.DataObject) -> None:
    """Every client once, nobody idle, loads at most one client's work apart; the same every time."""
    count = data.draw(st.integers(1, len(work)))
    groups = balance(work, count, None, alone(work))
    assert len(groups) == count and all(groups)
    assert sorted(client for group in groups for client in group) == list(range(len(work)))
    assert all(list(group) == sorted(group) for group in groups)
    loads = [sum(max(work[client], 1) for client in group) for group in groups]
    assert max(loads) - min(loads) <= max(max(work), 1)
    assert groups == balance(list(work), count, None, alone(work))


def test_longest_first() -> None:
    work = [1, 9, 1, 1, 5, 3]
    assert balance(work, 2, None, alone(work)) == ((1, 2), (0, 3, 4, 5))


@given(works, st.integers(1, 20))
def test_clients_per_actor_is_kept_whatever_the_work(work: list[int], per_actor: int) -> None:
    groups = place(work, node(4), clients_per_actor=per_actor).groups
    assert len(groups) == -(-len(work) // per_actor)
    assert all(1 <= len(group) <= per_actor for group in groups)
    assert sorted(client for group in groups for client in group) == list(range(len(work)))


@pytest.mark.parametrize(
    ("clients", "nodes", "placement", "actors"),
    [
        (3, [node(4)], {}, 3),  # one each while there is room
        (100, [node(4)], {}, 4),
        (100, [node(64, memory_mb=10 * ACTOR_MB - 1)], {}, 9),  # memory is the bound
        (100, [node(4, memory_mb=0)], {}, 1),  # one is tried in any case
        (8, [node(4, memory_mb=0)], {"clients_per_actor": 1}, 8),
        (8, [node(4, memory_mb=0)], {"actors": 3}, 3),
        (20, [node(1), node(2), node(4.5)], {}, 7),
        (20, [node(1), node(2), node(4)], {"cpus": 3}, 3),
        (20, [node(8, memory_mb=2.5 * ACTOR_MB), node(2)], {}, 4),
        (20, [], {"actors": 4}, 4),  # Ray may start nodes for them
    ],
)
def test_number_of_actors_on_cpus(clients: int, nodes: list[Node], placement: dict[str, Any], actors: int) -> None:
    layout = place(clients, *nodes, **placement)
    assert (len(layout.groups), layout.gpus) == (actors, 0)
    assert layout.host_of() == {c: at for at, group in enumerate(layout.groups) for c in group}
    assert set(layout.host_of()) == set(range(clients))


@given(st.lists(st.integers(0, 16), min_size=1, max_size=4).filter(any), st.integers(1, 100))
def test_cpu_requests_fit(cpus: list[int], clients: int) -> None:
    """One CPU each, or shares that Ray can count and that fit on the nodes; no larger share would."""
    share = place(clients, *map(node, cpus), clients_per_actor=1).cpus * STEPS
    assert share == pytest.approx(round(share), abs=1e-6)

    def fit(steps: int) -> int:
        return sum(count * STEPS // steps for count in cpus)

    assert fit(round(share)) >= clients
    assert share == STEPS or fit(round(share) + 1) < clients


@pytest.mark.parametrize(
    ("clients", "nodes", "placement", "expected"),
    [
        (10, [node(8, 1)], {"gpus": 1}, (1, 1.0, 1.0)),
        (10, [node(8, 2)], {"gpus": 2, "actors_per_gpu": 3}, (6, 1.0, 0.3333)),  # rounded down, so that three fit
        (3, [node(8, 2)], {"gpus": 2, "actors_per_gpu": 4}, (3, 1.0, 0.5)),  # no GPU is idle
        (2, [node(8, 2)], {"gpus": 2, "actors_per_gpu": 4}, (2, 1.0, 1.0)),
        (9, [node(2, 1)], {"gpus": 1, "actors_per_gpu": 8}, (8, 0.25, 0.125)),
        (2, [node(0, 1)], {"gpus": 1}, (1, 0.0, 1.0)),  # a machine without CPUs for Ray
        (10, [node(64), node(1, 1), node(8, 2)], {"gpus": 3, "actors_per_gpu": 2}, (6, 0.5, 0.5)),
        (9, [node(8, 1, memory_mb=2 * ACTOR_MB)], {"gpus": 1, "actors_per_gpu": 3}, (2, 1.0, 0.5)),
        (9, [node(8, 2)], {}, (8, 1.0, 0.0)),  # GPUs that are not asked for are not used
    ],
)
def test_gpu_shares(clients: int, nodes: list[Node], placement: dict[str, Any], expected: tuple[float, ...]) -> None:
    layout = place(clients, *nodes, **placement)
    assert (len(layout.groups), layout.cpus, layout.gpus) == expected


def test_stacks_stay_whole() -> None:
    stacks, work = ((0, 1, 2), (3, 4)), [5, 1, 1, 4, 4, 9, 1]
    assert sorted(place(work, node(3), stacks=stacks).groups) == [(0, 1, 2, 6), (3, 4), (5,)]
    assert place(work, node(16), stacks=stacks).groups == ((5,), (3, 4), (0, 1, 2), (6,))
    assert place(work, node(2), stacks=stacks, clients_per_actor=3).groups == ((5,), (3, 4, 6), (0, 1, 2))


@pytest.mark.parametrize(
    ("clients", "nodes", "placement", "words"),
    [
        (4, [node(4, 1)], {"gpus": 2}, ["placement.gpus=2", "1 GPUs", "10.0.0.1: 4 CPUs, 1 GPUs"]),
        (4, [node(4, 0.5), node(4, 0.5)], {"gpus": 1}, ["placement.gpus=1", "0 GPUs"]),
        (4, [node(0)], {}, ["at least 1 CPU", "10.0.0.1: 0 CPUs"]),
        (9, [node(4, 2)], {"gpus": 2, "actors_per_gpu": 2, "clients_per_actor": 1}, ["9 client", "actors_per_gpu=2"]),
        (5, [node(8)], {"actors": 3, "stacks": ((0, 1, 2), (3, 4))}, ["actors=3", "than 2", "lockstep_clients"]),
        (5, [node(8)], {"clients_per_actor": 2, "stacks": ((0, 1, 2),)}, ["clients_per_actor=2", "3 clients"]),
    ],
)
def test_errors_name_demand_and_supply(
    clients: int, nodes: list[Node], placement: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        place(clients, *nodes, **placement)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, ResourcesMissing) == ("10.0.0.1" in str(caught.value))
