"""Who lives where, without starting anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, Node, share
from ray_actors.placement.balance import balance
from ray_actors.placement.layout import Layout, Supply, lay_out

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
    assert (len(layout.groups), layout.specs[0].cpus, layout.specs[0].gpus) == (actors, 1.0, 0)
    assert layout.host_of() == {c: at for at, group in enumerate(layout.groups) for c in group}
    assert set(layout.host_of()) == set(range(clients))


def test_what_is_asked_for_is_done_whatever_the_memory() -> None:
    assert len(place(8, free_mb=1, clients_per_actor=1).groups) == 8
    assert len(place(8, free_mb=1, actors=3).groups) == 3


@given(st.integers(1, 64), st.integers(1, 300))
def test_cpu_requests_fit(cpus: int, clients: int) -> None:
    """One CPU each, or shares that Ray can count (in ten-thousandths) and that fit together."""
    layout = place(clients, cpus, clients_per_actor=1)
    parts = layout.specs[0].cpus * 10_000
    assert parts == pytest.approx(round(parts), abs=1e-6)
    assert round(parts) * clients <= cpus * 10_000
    assert layout.specs[0].cpus == 1 or cpus / clients - layout.specs[0].cpus < 1.01e-4


@pytest.mark.parametrize(
    ("clients", "gpus", "per_gpu", "actors", "share"),
    [
        (10, 1, 1, 1, 1.0),
        (10, 2, 1, 2, 1.0),
        (10, 2, 3, 6, 0.3333),  # rounded down, so that three fit on one
        (3, 2, 4, 3, 0.5),  # two on one GPU and one on the other: none is idle, and nobody has less than it could
        (2, 2, 4, 2, 1.0),
        (9, 1, 7, 7, 0.1428),
    ],
)
def test_gpu_shares(clients: int, gpus: int, per_gpu: int, actors: int, share: float) -> None:
    layout = lay_out([10] * clients, Placement(gpus=gpus, actors_per_gpu=per_gpu), Supply(cpus=8, gpus=gpus))
    assert (len(layout.groups), layout.specs[0].gpus, layout.specs[0].cpus) == (actors, share, 1.0)


@given(st.integers(1, 1000))
def test_as_many_as_share_a_gpu_fit_on_it(per_gpu: int) -> None:
    """Counted as Ray does, in ten-thousandths; less than one of them is lost to each."""
    part = round(share(1, per_gpu) * 10_000, 6)
    assert part == int(part) and 10_000 - per_gpu < part * per_gpu <= 10_000


# A mix of devices


def test_the_faster_get_more() -> None:
    """Four times as fast: 24 and 8 in the time 8 / 1 = 32 / 4, then two more of 4 that are done sooner there."""
    assert balance([8, 8, 8, 8, 4, 4], 2, speeds=[4, 1]) == ((0, 1, 2, 4, 5), (3,))
    assert balance([9, 1, 1, 1], 2, speeds=[8, 1]) == ((0, 2, 3), (1,))


def test_the_slow_are_not_left_without_anything() -> None:
    """They get the shortest."""
    assert balance([1, 1, 1], 2, speeds=[8, 1]) == ((0, 1), (2,))
    assert balance([5, 3, 2], 3, speeds=[100, 100, 1]) == ((0,), (1,), (2,))


@given(works, st.data())
def test_speeds_that_are_alike_change_nothing(work: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(work)))
    assert balance(work, count, speeds=[2.5] * count) == balance(work, count)


MIX = Placement(gpus=2, actors_per_gpu=2, cpu_actors=3, gpu_speed=4.0)


def test_cpu_actors_beside_gpus() -> None:
    layout = lay_out([8] * 20, MIX, Supply(cpus=8, gpus=2))
    assert [spec.gpus for spec in layout.specs] == [0.5] * 4 + [0] * 3
    assert {spec.cpus for spec in layout.specs} == {1.0}
    assert [len(group) for group in layout.groups] == [5, 4, 4, 4, 1, 1, 1]  # 17 and 3 in 5 · 8 / 4 = 10 units of time
    assert sorted(client for group in layout.groups for client in group) == list(range(20))


def test_which_client_is_on_which_device_follows_from_the_settings() -> None:
    """Not from memory or CPUs that happen to be free, nor from the nodes."""
    work = [3, 9, 4, 4, 12, 7, 1, 5, 5, 6]
    seen = {
        lay_out(work, MIX, supply).groups
        for supply in (
            Supply(8, 2),
            Supply(2, 2, free_mb=1.0),
            Supply(64, 4),
            Supply.of([node("a", 4, 1), node("b", 4, 1)]),
        )
    }
    assert len(seen) == 1


def test_a_number_of_actors_counts_both_kinds() -> None:
    layout = lay_out([1] * 9, Placement(gpus=1, actors_per_gpu=2, cpu_actors=1, actors=2), Supply(8, 1))
    assert [spec.gpus for spec in layout.specs] == [1.0, 0]


def test_stacks_may_be_too_few_for_a_mix() -> None:
    with pytest.raises(SettingsError, match=r"placement.cpu_actors=3 .* 3 stacks .*lockstep_clients"):
        lay_out([1] * 6, MIX, Supply(8, 2), ((0, 1), (2, 3), (4, 5)))
    with pytest.raises(SettingsError, match="0 CPUs"):
        lay_out([1] * 6, MIX, Supply(0, 2))


# GPUs of nodes


def node(name: str, cpus: float, gpus: float, memory_mb: float = 1e6, here: bool = False) -> Node:
    return Node(name, f"10.0.0.{ord(name)}", cpus, gpus, memory_mb, here)


def taken(layout: Layout) -> list[tuple[str, float]]:
    """Node and GPU of every actor."""
    return [(spec.node, spec.gpus) for spec in layout.specs]


def over(nodes: list[Node], clients: int = 30, **placement: Any) -> Layout:
    return lay_out([1] * clients, Placement(**placement), Supply.of(nodes))


FOUR_AND_TWO = [node("a", 8, 4), node("b", 8, 2)]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"gpus": 2}, [("a", 1.0)] * 2),  # no more GPUs than asked for
        ({"gpus": 5}, [("a", 1.0)] * 4 + [("b", 1.0)]),
        ({"gpus": 6, "actors_per_gpu": 3, "actors": 7}, [("a", 0.5)] * 5 + [("b", 1.0)] * 2),  # no GPU is idle
        ({"gpus": 6, "actors_per_gpu": 3, "actors": 6}, [("a", 1.0)] * 4 + [("b", 1.0)] * 2),  # each has one of its own
        ({"gpus": 3, "strategy": "spread"}, [("a", 1.0)] * 2 + [("b", 1.0)]),
        ({"gpus": 2, "cpu_actors": 9}, [("a", 1.0)] * 2 + [("b", 0)] * 8 + [("a", 0)]),
    ],
)
def test_gpus_over_nodes(placement: dict[str, Any], expected: list[tuple[str, float]]) -> None:
    assert sorted(taken(over(FOUR_AND_TWO, **placement))) == sorted(expected)


def test_a_node_whose_memory_holds_nothing_gives_no_gpu() -> None:
    full = [node("a", 8, 1, memory_mb=ACTOR_MB - 1, here=True), node("b", 8, 1)]
    assert taken(over(full, gpus=1, actors_per_gpu=2)) == [("b", 0.5)] * 2


def test_no_more_share_a_gpu_than_must() -> None:
    """Two on each, though the memory of one node holds no more."""
    nodes = [node("a", 8, 1, memory_mb=2 * ACTOR_MB), node("b", 8, 1)]
    assert sorted(taken(over(nodes, gpus=2, actors_per_gpu=3, actors=4))) == [("a", 0.5)] * 2 + [("b", 0.5)] * 2


def test_where_memory_is_short_more_share_a_gpu_elsewhere() -> None:
    """Four actors on two GPUs would be two on each, but one node holds a single one."""
    nodes = [node("a", 8, 1, memory_mb=ACTOR_MB), node("b", 8, 1)]
    assert sorted(taken(over(nodes, gpus=2, actors_per_gpu=3, actors=4))) == [("a", 1.0)] + [("b", 0.3333)] * 3
    with pytest.raises(SettingsError, match="6 client actors need .* GiB of memory"):
        over(nodes, gpus=2, actors_per_gpu=3, actors=6)


@pytest.mark.parametrize("strategy", ["pack", "spread"])
def test_gpus_are_used_where_memory_holds_the_actors_that_share_them(strategy: str) -> None:
    nodes = [node("a", 8, 2, memory_mb=700, here=True), node("b", 8, 2, memory_mb=48_000)]
    two: dict[str, Any] = {"gpus": 2, "actors_per_gpu": 2, "strategy": strategy}
    for more in ({"actors": 4}, {}):
        assert taken(over(nodes, **two, **more)) == [("b", 0.5)] * 4
    assert sorted(taken(over(nodes, **two | {"gpus": 3}))) == [("a", 1.0)] + [("b", 0.5)] * 4
    with pytest.raises(SettingsError, match="6 client actors need .* GiB of memory"):
        over(nodes, **two | {"gpus": 3}, actors=6)


def test_a_gpu_that_memory_fills_in_part_is_used_before_one_with_less() -> None:
    nodes = [node("a", 8, 1, memory_mb=ACTOR_MB, here=True), node("b", 8, 1, memory_mb=2 * ACTOR_MB), node("c", 8, 1)]
    assert sorted(taken(over(nodes, gpus=2, actors_per_gpu=3))) == [("b", 0.5)] * 2 + [("c", 0.3333)] * 3


def test_gpus_beyond_what_memory_fills_are_used_for_fewer_to_share_one() -> None:
    nodes = [node("a", 8, 2, memory_mb=2 * ACTOR_MB), node("b", 8, 2)]
    assert sorted(taken(over(nodes, gpus=4, actors_per_gpu=2, actors=6))) == [("a", 1.0)] * 2 + [("b", 0.5)] * 4


def test_gpus_that_are_not_asked_for_are_not_used() -> None:
    assert place(10, cpus=4, gpus=2).specs[0].gpus == 0


def test_more_gpu_actors_than_cpus_share_them() -> None:
    layout = lay_out([1] * 8, Placement(gpus=1, actors_per_gpu=8), Supply(cpus=2, gpus=1))
    assert (len(layout.groups), layout.specs[0].cpus) == (8, 0.25)


def test_a_machine_without_cpus_for_ray_is_not_asked_for_any() -> None:
    assert lay_out([1] * 2, Placement(gpus=1), Supply(cpus=0, gpus=1)).specs[0].cpus == 0


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
            ["9 client actors", "placement.gpus=2", "placement.actors_per_gpu=2", "allows 4", "clients_per_actor"],
        ),
        (9, Supply(4, 1), Placement(gpus=1, actors=2), ["2 client actors", "allows 1"]),
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
        (Placement(clients_per_actor=2), r"clients_per_actor=2, but 3 clients .*lockstep_clients"),
        (Placement(actors=3), r"actors=3 .* 2 stacks .*lockstep_clients"),
    ],
)
def test_stacks_that_cannot_stay_whole_are_refused(placement: Placement, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        lay_out((1, 1, 1, 1, 1), placement, Supply(8, 0), ((0, 1, 2), (3, 4)))


# On the nodes of a cluster --------------------------------------------------------------------------------------------


def node(name: str, cpus: float, gpus: float = 0, memory_mb: float = 1e6, here: bool = False) -> Node:
    return Node(name, f"10.0.0.{name}", cpus, gpus, memory_mb, here)


def on_nodes(clients: int, *nodes: Node, stacks: Any = (), **placement: Any) -> Layout:
    return lay_out([10] * clients, Placement(**placement), Supply.of(nodes, placement.get("cpus")), stacks)


def cpus_per_node(layout: Layout) -> dict[str, list[float]]:
    """The CPUs of the actors on each node."""
    found: dict[str, list[float]] = {}
    for spec in layout.specs:
        found.setdefault(spec.node, []).append(spec.cpus)
    return found


HEAD, TWO, FOUR = node("1", 1, here=True), node("2", 2), node("3", 4)


@pytest.mark.parametrize(
    ("clients", "placement", "expected"),
    [
        (20, {}, {"1": [1.0], "3": [1.0] * 4, "2": [1.0] * 2}),
        (3, {}, {"1": [1.0], "3": [1.0] * 2}),
        (3, {"strategy": "spread"}, {"3": [1.0] * 2, "2": [1.0]}),
        (20, {"actors": 5}, {"1": [1.0], "3": [1.0] * 4}),
        (20, {"actors": 14}, {"1": [0.5] * 2, "3": [0.5] * 8, "2": [0.5] * 4}),
        (20, {"clients_per_actor": 10, "strategy": "spread"}, {"3": [1.0] * 2}),
        (20, {"clients_per_actor": 4, "strategy": "spread"}, {"1": [1.0], "3": [1.0] * 3, "2": [1.0]}),
        (20, {"cpus": 3}, {"1": [1.0], "3": [1.0] * 2}),
        (20, {"cpus": 1}, {"1": [1.0]}),
    ],
)
def test_actors_on_nodes(clients: int, placement: dict[str, Any], expected: dict[str, list[float]]) -> None:
    layout = on_nodes(clients, TWO, FOUR, HEAD, **placement)
    assert cpus_per_node(layout) == expected
    assert all(spec.gpus == 0 for spec in layout.specs) and len(layout.specs) == len(layout.groups)


def test_memory_of_a_node_is_the_bound() -> None:
    small = node("2", 8, memory_mb=2.5 * ACTOR_MB)
    assert cpus_per_node(on_nodes(20, small)) == {"2": [1.0] * 2}
    assert cpus_per_node(on_nodes(20, small, node("3", 2))) == {"2": [1.0] * 2, "3": [1.0] * 2}
    assert cpus_per_node(on_nodes(20, node("1", 8, memory_mb=10, here=True), node("3", 2))) == {"3": [1.0] * 2}


@pytest.mark.parametrize("strategy", ["pack", "spread"])
def test_where_cpus_are_shared_a_node_gets_no_more_than_its_memory_holds(strategy: str) -> None:
    nodes = node("1", 2, memory_mb=10 * ACTOR_MB), node("2", 4, memory_mb=4 * ACTOR_MB)
    assert cpus_per_node(on_nodes(20, *nodes, actors=8, strategy=strategy)) == {"1": [0.5] * 4, "2": [1.0] * 4}
    assert cpus_per_node(on_nodes(20, *nodes, actors=14, strategy=strategy)) == {"1": [0.2] * 10, "2": [1.0] * 4}
    with pytest.raises(SettingsError, match="15 client actors need 8.8 GiB of memory"):
        on_nodes(20, *nodes, actors=15, strategy=strategy)


def test_beside_actors_on_gpus_there_is_as_much_memory_less() -> None:
    nodes = node("1", 2, gpus=2, memory_mb=3 * ACTOR_MB, here=True), node("2", 2)
    layout = on_nodes(20, *nodes, gpus=2, cpu_actors=5)
    assert sorted(taken(layout)) == [("1", 0), ("1", 1.0), ("1", 1.0)] + [("2", 0)] * 4


def test_gpu_actors_are_where_gpus_are() -> None:
    """And the others have none; CPUs are shared where there are fewer."""
    nodes = node("1", 8, here=True), node("2", 1, gpus=1), node("3", 4, gpus=2)
    layout = on_nodes(20, *nodes, gpus=3, actors_per_gpu=2)
    assert cpus_per_node(layout) == {"2": [0.5] * 2, "3": [1.0] * 4}
    assert {spec.gpus for spec in layout.specs} == {0.5}
    assert cpus_per_node(on_nodes(20, *nodes, gpus=1, actors_per_gpu=2)) == {"3": [1.0] * 2}
    assert cpus_per_node(on_nodes(20, *nodes)) == {"1": [1.0] * 8, "3": [1.0] * 4, "2": [1.0]}


@pytest.mark.parametrize(
    ("nodes", "clients", "placement", "said"),
    [
        ([HEAD, node("2", 4, gpus=1)], 9, {"gpus": 2}, ["placement.gpus=2", "1 GPUs", "10.0.0.2: 4 CPUs, 1 GPUs"]),
        ([node("1", 0, here=True)], 4, {}, ["at least 1 CPU", "Ray has 0 CPUs", "10.0.0.1: 0 CPUs"]),
        ([HEAD, TWO], 4, {"cpus": 0}, ["at least 1 CPU", "Ray has 0 CPUs"]),
        ([node("1", 8, memory_mb=100)], 4, {}, ["1 client actors need 0.6 GiB", "600 MiB each", "8 CPUs, 0.1 GiB"]),
        (
            [node("1", 8, memory_mb=2048)], 9, {"actors": 5},
            ["5 client actors need 2.9 GiB", "placement.actors", "10.0.0.1: 8 CPUs, 2.0 GiB"],
        ),
        ([node("2", 4, gpus=1)], 9, {"gpus": 1, "actors": 2}, ["2 client actors", "placement.gpus=1", "allows 1"]),
        ([HEAD], 3, {"actors": 4}, ["placement.actors=4", "clients=3"]),
        (
            [node("1", 4, gpus=0.5), node("2", 4, gpus=0.5)], 9, {"gpus": 1},
            ["placement.gpus=1", "0 GPUs", "10.0.0.1: 4 CPUs, 0.5 GPUs"],
        ),
        ([node("1", 0.5), node("2", 0.5)], 9, {}, ["at least 1 CPU", "Ray has 0 CPUs", "10.0.0.1: 0.5 CPUs"]),
    ],
)  # fmt: skip
def test_errors_on_nodes_name_demand_and_supply(
    nodes: list[Node], clients: int, placement: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        on_nodes(clients, *nodes, **placement)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@given(
    works,
    st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(any),
    st.sampled_from(["pack", "spread"]),
    st.data(),
)
def test_nodes_do_not_change_who_is_with_whom(
    work: list[int], cpus: list[int], strategy: str, data: st.DataObject
) -> None:
    """Beyond the number of actors; and all that they ask for together fits on their nodes."""
    ids = list(range(len(work)))
    size = data.draw(st.integers(1, len(work)))
    stacks = [tuple(ids[k : k + size]) for k in range(0, len(ids), size)] if data.draw(st.booleans()) else []
    nodes = [node(str(n), count, here=n == 0) for n, count in enumerate(cpus)]
    actors = data.draw(st.none() | st.integers(1, len(stacks) or len(work)))
    placement = Placement(strategy=strategy, actors=actors)
    layout = lay_out(work, placement, Supply.of(nodes), stacks)
    alone = lay_out(work, Placement(actors=actors), Supply(sum(cpus), 0), stacks)
    assert layout.groups == alone.groups
    for found in nodes:
        asked = sum(round(spec.cpus * 10_000) for spec in layout.specs if spec.node == found.id)
        assert asked <= found.cpus * 10_000
    assert {spec.node for spec in layout.specs} <= {found.id for found in nodes if found.cpus}
