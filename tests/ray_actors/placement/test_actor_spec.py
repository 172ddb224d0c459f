"""How many actors come to be on which node, without starting anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_actors.placement.actor_spec import ACTOR_MB, Node, actors_per_node, share
from ray_actors.placement.layout import Supply

ENOUGH = 1e6


def node(name: str, cpus: float = 4, gpus: float = 0, memory_mb: float = ENOUGH, here: bool = False) -> Node:
    return Node(name, f"10.0.0.{name}", cpus, gpus, memory_mb, here)


@pytest.mark.parametrize(
    ("cpus", "gpus", "memory_mb", "others", "slots"),
    [
        (4, 0, ENOUGH, 0, 4),
        (3.9, 2, ENOUGH, 0, 3),  # GPUs that are not asked for are not counted
        (0.5, 0, ENOUGH, 0, 0),
        (4, 2, ENOUGH, 3, 1),
        (4, 2, ENOUGH, 5, 0),
        (16, 0, 3 * ACTOR_MB, 0, 3),
        (16, 0, 3 * ACTOR_MB - 1, 0, 2),
        (16, 0, 3 * ACTOR_MB, 2, 1),
        (16, 0, 0, 0, 0),
        (-1, 0, ENOUGH, 0, 0),
        (4, 0, -100, 0, 0),
    ],
)
def test_slots(cpus: float, gpus: float, memory_mb: float, others: int, slots: int) -> None:
    assert node("1", cpus, gpus, memory_mb).slots(others) == slots


def test_a_node_with_a_message() -> None:
    assert str(node("1", 4, 0, 2048)) == "10.0.0.1: 4 CPUs, 2.0 GiB"
    assert str(node("1", 0.5, 2, 1536)) == "10.0.0.1: 0.5 CPUs, 2 GPUs, 1.5 GiB"


@pytest.mark.parametrize(
    ("room", "actors", "here", "pack", "spread"),
    [
        ([4, 4, 4], 6, None, [4, 2, 0], [2, 2, 2]),
        ([4, 4, 4], 6, 2, [2, 0, 4], [2, 2, 2]),  # the driver's node first
        ([2, 8, 4], 6, None, [0, 6, 0], [0, 4, 2]),  # then the one with most room
        ([2, 8, 4], 6, 0, [2, 4, 0], [1, 4, 1]),
        ([2, 8, 4], 13, None, [1, 8, 4], [1, 8, 4]),
        ([2, 8, 4], 14, None, [2, 8, 4], [2, 8, 4]),
        ([2, 8, 4], 28, None, [4, 16, 8], [4, 16, 8]),  # more than there is room for: in proportion
        ([1, 0, 1], 4, 1, [2, 0, 2], [2, 0, 2]),  # where there is no room there is nobody
        ([3, 3], 1, 1, [0, 1], [0, 1]),
        ([5], 3, None, [3], [3]),
    ],
)
def test_by_hand(room: list[int], actors: int, here: int | None, pack: list[int], spread: list[int]) -> None:
    nodes = [node(str(n), here=n == here) for n in range(len(room))]
    assert actors_per_node(nodes, room, actors, "pack") == pack
    assert actors_per_node(nodes, room, actors, "spread") == spread


@pytest.mark.parametrize(
    ("room", "most", "actors", "pack", "spread"),
    [
        ([2, 4], [10, 4], 8, [4, 4], [4, 4]),  # what one cannot take the other does
        ([2, 4], [10, 4], 6, [2, 4], [2, 4]),
        ([2, 4], [3, 4], 9, [3, 4], [3, 4]),  # nobody has a place for all
        ([4, 4], [1, 9], 5, [1, 4], [1, 4]),
        ([4, 4], [0, 9], 5, [0, 5], [0, 5]),
        ([4, 0], [5, 9], 7, [5, 0], [5, 0]),
        ([0, 0], [5, 9], 7, [0, 0], [0, 0]),
    ],
)
def test_no_node_gets_more_than_it_may(
    room: list[int], most: list[int], actors: int, pack: list[int], spread: list[int]
) -> None:
    nodes = [node(str(n)) for n in range(len(room))]
    assert actors_per_node(nodes, room, actors, "pack", most) == pack
    assert actors_per_node(nodes, room, actors, "spread", most) == spread


rooms = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
strategies = st.sampled_from(["pack", "spread"])


@st.composite
def clusters(draw: st.DrawFn, fits: bool = True) -> tuple[list[Node], list[int], int]:
    """Nodes, of which one may have the driver, their room, and actors, which have room or not."""
    room = draw(rooms)
    here = draw(st.integers(-1, len(room) - 1))
    total = sum(room)
    actors = draw(st.integers(0, total) if fits else st.integers(total + 1, 4 * total))
    return [node(str(n), here=n == here) for n in range(len(room))], room, actors


@given(clusters(), strategies)
def test_all_are_placed_and_no_node_gets_more_than_it_has_room_for(
    drawn: tuple[list[Node], list[int], int], strategy: str
) -> None:
    nodes, room, actors = drawn
    counts = actors_per_node(nodes, room, actors, strategy)
    assert sum(counts) == actors
    assert all(0 <= count <= most for count, most in zip(counts, room, strict=True))


@given(clusters())
def test_pack_uses_the_fewest_nodes_beside_the_drivers(drawn: tuple[list[Node], list[int], int]) -> None:
    nodes, room, actors = drawn
    counts = actors_per_node(nodes, room, actors, "pack")
    mine = sum(most for most, n in zip(room, nodes, strict=True) if n.here)
    assert sum(count for count, n in zip(counts, nodes, strict=True) if n.here) == min(mine, actors)
    left, fewest = actors - min(mine, actors), 0
    for most in sorted((most for most, n in zip(room, nodes, strict=True) if not n.here), reverse=True):
        fewest += left > 0
        left -= min(most, left)
    assert sum(count > 0 for count, n in zip(counts, nodes, strict=True) if not n.here) == fewest


@given(clusters())
def test_spread_gives_each_as_large_a_part_of_its_room(drawn: tuple[list[Node], list[int], int]) -> None:
    """No node's load could be lowered by giving one of its actors to another; loads are one actor's part apart."""
    nodes, room, actors = drawn
    counts = actors_per_node(nodes, room, actors, "spread")
    used = [(count, most) for count, most in zip(counts, room, strict=True) if most]
    for count, most in used:
        for other, others_room in used:
            assert count / most <= (other + 1) / others_room + 1e-12


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 54))
def test_equal_nodes_differ_by_one_at_most(count: int, most: int, actors: int) -> None:
    counts = actors_per_node([node(str(n)) for n in range(count)], [most] * count, min(actors, count * most), "spread")
    assert max(counts) - min(counts) <= 1


@given(clusters(fits=False), strategies)
def test_more_than_there_is_room_for_is_shared_out(drawn: tuple[list[Node], list[int], int], strategy: str) -> None:
    nodes, room, actors = drawn
    counts = actors_per_node(nodes, room, actors, strategy)
    assert sum(counts) == actors
    for count, most in zip(counts, room, strict=True):
        assert (count == 0) == (most == 0)
        assert abs(count - actors * most / sum(room)) <= len(room)


@given(st.one_of(clusters(), clusters(fits=False)), strategies, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_is_nothing(
    drawn: tuple[list[Node], list[int], int], strategy: str, order: random.Random
) -> None:
    nodes, room, actors = drawn
    counts = dict(zip((n.id for n in nodes), actors_per_node(nodes, room, actors, strategy), strict=True))
    shuffled = list(zip(nodes, room, strict=True))
    order.shuffle(shuffled)
    again = actors_per_node([n for n, _ in shuffled], [most for _, most in shuffled], actors, strategy)
    assert dict(zip((n.id for n, _ in shuffled), again, strict=True)) == counts


@pytest.mark.parametrize(
    ("cpus", "actors", "each"), [(4, 4, 1.0), (4, 5, 0.8), (2, 3, 0.6666), (1, 8, 0.125), (0, 2, 0.0), (2.5, 2, 1.0)]
)
def test_shares_of_cpus(cpus: float, actors: int, each: float) -> None:
    assert share(cpus, actors) == each


# What there is to place on --------------------------------------------------------------------------------------------


def cpus(nodes: Sequence[Node]) -> list[tuple[str, float]]:
    return [(n.id, n.cpus) for n in nodes]


def test_a_supply_of_nodes() -> None:
    """The driver's node first, then those with most CPUs; what there is altogether."""
    supply = Supply.of([node("1", 2), node("2", 8, 1), node("3", 4, 2, here=True)])
    assert cpus(supply.nodes) == [("3", 4), ("2", 8), ("1", 2)]
    assert (supply.cpus, supply.gpus, supply.free_mb) == (14, 3, None)
    assert str(supply).count("; ") == 2 and str(supply).startswith("10.0.0.3: 4 CPUs, 2 GPUs")


def test_parts_on_several_nodes_are_no_whole() -> None:
    supply = Supply.of([node("1", 1.5, 0.5), node("2", 2.5, 1.5), node("3", -0.5)])
    assert (supply.cpus, supply.gpus) == (3, 1)
    assert [(n.cpus, n.gpus) for n in supply.nodes] == [(2.5, 1.5), (1.5, 0.5), (-0.5, 0)]


@pytest.mark.parametrize(
    ("most", "left"),
    [
        (20, [4, 8, 2]),
        (14, [4, 8, 2]),
        (13, [4, 8, 1]),
        (5, [4, 1, 0]),
        (4, [4, 0, 0]),
        (1, [1, 0, 0]),
        (0, [0, 0, 0]),
    ],
)
def test_no_more_cpus_than_are_to_be_used(most: int, left: list[int]) -> None:
    supply = Supply.of([node("1", 2), node("2", 8), node("3", 4, here=True)], most)
    assert [n.cpus for n in supply.nodes] == left
    assert supply.cpus == min(most, 14)


@given(
    st.lists(st.floats(0, 64), min_size=1, max_size=6), st.integers(0, 100), st.integers(0, 5),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_supply_is_the_same_in_any_order(free: list[float], most: int, here: int, order: random.Random) -> None:
    nodes = [node(str(n), round(c, 4), here=n == here) for n, c in enumerate(free)]
    supply = Supply.of(nodes, most)
    assert supply.cpus <= most + 1e-9 and {n.id for n in supply.nodes} == {n.id for n in nodes}
    before = {n.id: n for n in nodes}
    assert all(replace(n, cpus=before[n.id].cpus) == before[n.id] for n in supply.nodes)
    assert all(0 <= n.cpus <= before[n.id].cpus for n in supply.nodes)
    order.shuffle(nodes)
    assert Supply.of(nodes, most) == supply
