"""Layouts on nodes that come and go, and joining a cluster, with nodes that are made up."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pflsim.config.settings import Placement
from pflsim.errors import RunError, SettingsError
from ray_actors.cluster import joined
from ray_actors.cluster.joined import JoinedRay, join
from ray_actors.placement import elastic
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node
from ray_actors.placement.elastic import ElasticLayout
from ray_actors.placement.layout import Layout, Supply, lay_out

WORK = (5, 3, 8, 1, 2, 6)
ONE = Node("1", "10.0.0.1", 1, 0, 1e6, here=True)
TWO, THREE = Node("2", "10.0.0.2", 2, 0, 1e6), Node("3", "10.0.0.3", 2, 0, 1e6)


class Time:
    """A clock that goes on while somebody sleeps, and nobody waits."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()
        self.then: list[Callable[[], object]] = []
        """What happens while somebody sleeps, one after the other."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        if self.then:
            self.then.pop(0)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(elastic, "time", made)
    return made


class Nodes:
    """A cluster of these nodes; what is alive may not be seen to be free yet."""

    def __init__(self, *nodes: Node):
        self.free = list(nodes)
        self.alive = {node.id for node in nodes}
        self.asked = 0

    def supply(self, placement: Placement) -> Supply:
        self.asked += 1
        return Supply.of(self.free, placement.cpus)

    def add(self, *nodes: Node) -> None:
        self.free += nodes
        self.alive |= {node.id for node in nodes}

    def lose(self, name: str) -> None:
        self.free = [node for node in self.free if node.id != name]
        self.alive -= {name}


def stand(monkeypatch: pytest.MonkeyPatch, nodes: Nodes, **placement: Any) -> ElasticLayout:
    monkeypatch.setattr(elastic, "alive_ids", lambda: frozenset(nodes.alive))
    return ElasticLayout(lambda asked: nodes.supply(asked), WORK, Placement(**placement), ((0, 1),))


def where(layout: Layout) -> list[str]:
    return [spec.node for spec in layout.specs]


def test_the_first_layout(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    nodes = Nodes(ONE, TWO)
    first = stand(monkeypatch, nodes).first()
    assert first == lay_out(WORK, Placement(), Supply.of([ONE, TWO]), ((0, 1),))
    assert where(first) == ["1", "2", "2"] and any({0, 1} <= set(group) for group in first.groups)
    assert not clock.slept


def test_nodes_are_waited_for(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    nodes = Nodes(replace(ONE, cpus=0))
    clock.then = [lambda: None, lambda: nodes.add(TWO)]
    assert where(stand(monkeypatch, nodes, wait_s=5.0).first()) == ["2", "2"]
    assert clock.slept == [elastic.POLL_INTERVAL_S] * 2


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    with pytest.raises(SettingsError, match=r"at least 1 CPU.*placement.wait_s.*10.0.0.1: 0 CPUs"):
        stand(monkeypatch, Nodes(replace(ONE, cpus=0)), wait_s=1.2).first()
    assert clock.slept == [elastic.POLL_INTERVAL_S] * 3
    clock.slept.clear()
    with pytest.raises(SettingsError):
        stand(monkeypatch, Nodes(replace(ONE, cpus=0)), wait_s=0).first()
    assert not clock.slept


def test_another_layout_on_what_is_left(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    nodes = Nodes(ONE, TWO, THREE)
    made = stand(monkeypatch, nodes, wait_s=1.0)
    assert where(made.first()) == ["1", "2", "2", "3", "3"]
    nodes.lose("2")
    assert where(made.lay_out()) == ["1", "3", "3"]
    nodes.lose("3")
    nodes.lose("1")
    with pytest.raises(RunError, match="nodes have left .*0 CPUs") as caught:
        made.lay_out()
    assert not isinstance(caught.value, SettingsError)
    clock.then = [lambda: nodes.add(TWO)]
    assert where(made.lay_out()) == ["2", "2"]


def test_nodes_that_join_are_used_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    for joins in (False, True):
        nodes = Nodes(ONE)
        made = stand(monkeypatch, nodes, elastic=joins)
        before = made.first()
        assert made.grown(before) is None and nodes.asked == 1
        nodes.add(TWO)
        grown = made.grown(before)
        assert (None if grown is None else where(grown)) == (["1", "2", "2"] if joins else None)
        assert made.grown(grown or before) is None and nodes.asked == 1 + joins  # they have joined already
        nodes.lose("2")
        assert made.grown(grown or before) is None and nodes.asked == 1 + joins  # that is for whoever misses them


@pytest.mark.parametrize(
    ("placement", "new", "gains"),
    [
        ({}, replace(TWO, cpus=0), False),
        ({}, replace(TWO, memory_mb=10), False),
        ({"actors": 1}, TWO, False),
        ({"actors": 2}, TWO, True),  # two on one CPU before, one on each of two nodes now
        ({"actors": 2, "cpus": 1}, TWO, False),
        ({"cpus": 2}, TWO, True),
        ({}, replace(TWO, cpus=1), True),
    ],
)
def test_only_where_something_is_gained(
    placement: dict[str, Any], new: Node, gains: bool, monkeypatch: pytest.MonkeyPatch, clock: Time
) -> None:
    nodes = Nodes(ONE)
    made = stand(monkeypatch, nodes, elastic=True, **placement)
    before = made.first()
    nodes.add(new)
    grown = made.grown(before)
    assert (grown is not None) == gains
    if grown is not None:
        assert set(where(grown)) == {"1", "2"}


def test_nodes_that_cannot_be_laid_out_on_leave_it_as_it_is(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    nodes = Nodes(ONE)
    made = stand(monkeypatch, nodes, elastic=True)
    before = made.first()
    nodes.lose("1")
    nodes.add(replace(TWO, cpus=0))
    assert made.grown(before) is None and not clock.slept


def test_a_node_that_joined_while_nodes_were_waited_for_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, clock: Time
) -> None:
    """It may have come when what is free had been asked for already."""
    nodes = Nodes(ONE)
    made = stand(monkeypatch, nodes, elastic=True)
    supply = nodes.supply

    def late(placement: Placement) -> Supply:
        found = supply(placement)
        nodes.add(TWO)
        return found

    monkeypatch.setattr(nodes, "supply", late)
    before = made.first()
    monkeypatch.setattr(nodes, "supply", supply)
    assert where(before) == ["1"]
    grown = made.grown(before)
    assert grown is not None and where(grown) == ["1", "2", "2"]


# What is waited for ---------------------------------------------------------------------------------------------------


def waiting(monkeypatch: pytest.MonkeyPatch, find: Callable[[], Layout], seconds: float) -> Layout:
    """The first layout, if this function computes it."""
    monkeypatch.setattr(ElasticLayout, "_compute", lambda self: find())
    return stand(monkeypatch, Nodes(), wait_s=seconds).first()


def test_a_layout_is_computed_again_until_it_can_be(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [SettingsError("first"), SettingsError("second"), SettingsError("third")]
    layout = Layout((), ())

    def find() -> Layout:
        if errors:
            raise errors.pop(0)
        return layout

    assert waiting(monkeypatch, find, 2.0) is layout and clock.slept == [elastic.POLL_INTERVAL_S] * 3


def test_the_last_error_is_raised(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Layout:
        raise SettingsError(f"after {clock.now - 100:g} s")

    with pytest.raises(SettingsError, match=r"after 1 s"):
        waiting(monkeypatch, find, 0.9)


def test_other_errors_are_not_waited_on(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Layout:
        raise ValueError("it is broken")

    with pytest.raises(ValueError, match="it is broken"):
        waiting(monkeypatch, find, 9.0)
    assert not clock.slept


# A cluster that is joined ---------------------------------------------------------------------------------------------


class FakePool:
    """Has client actors with these specs."""

    def __init__(self, *specs: ActorSpec):
        self.specs, self.wait_s, self.calls = specs, 10.0, list[Any]()

    def trim(self, specs: Any) -> None:
        self.calls.append(("trim", tuple(specs)))

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(up=True, calls=[])
    made.is_initialized = lambda: made.up
    made.shutdown = lambda: made.calls.append("shutdown")

    def init(**options: Any) -> SimpleNamespace:
        made.calls.append(options)
        return SimpleNamespace(address_info={"session_dir": "/tmp/ray/session_1"})

    made.init = init
    monkeypatch.setattr(joined, "ray", made)
    return made


def test_a_pool_is_trimmed_to_what_a_run_asks_for(fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool()
    monkeypatch.setattr(joined, "ActorPool", lambda: pool)
    layout = Layout(((0,), (1,)), (ActorSpec(1.0, 0.0, "1"), ActorSpec(1.0, 0.0, "2")))
    with JoinedRay("auto") as cluster:
        found: Any = cluster.pool(Placement(wait_s=7.5), layout)
        assert found is pool and pool.wait_s == 7.5
        assert pool.calls == [("trim", layout.specs)]
    assert pool.calls[-1] == "close" and fake_ray.calls == ["shutdown"]


def test_a_cluster_is_left_also_when_its_actors_cannot_be_ended(
    fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = FakePool()
    monkeypatch.setattr(joined, "ActorPool", lambda: pool)

    def broken() -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(pool, "close", broken)
    with pytest.raises(RuntimeError, match="no more"), JoinedRay("auto"):
        pass
    assert fake_ray.calls == ["shutdown"]


def test_what_its_actors_hold_counts_as_free(fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    held = (ActorSpec(1.0, 0.5, "1"), ActorSpec(0.5, 0.0, "1"), ActorSpec(1.0, 0.0, "gone"))
    monkeypatch.setattr(joined, "ActorPool", lambda: FakePool(*held))
    nodes = [
        {"NodeID": "1", "NodeManagerAddress": "10.0.0.1", "Alive": True},
        {"NodeID": "2", "NodeManagerAddress": "10.0.0.2", "Alive": True},
        {"NodeID": "gone", "NodeManagerAddress": "10.0.0.3", "Alive": False},
    ]
    free = {"1": {"CPU": 0.5, "memory": 2.0**30}}  # of the second nothing is known yet
    here = SimpleNamespace(get_node_id=lambda: "2")
    monkeypatch.setattr(
        "ray_actors.placement.nodes.ray", SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: here)
    )
    monkeypatch.setattr("ray_actors.placement.nodes.available_resources_per_node", lambda: free)
    supply = JoinedRay("auto").supply(Placement())
    assert supply.nodes == (
        Node("2", "10.0.0.2", 0, 0, 0, here=True),
        Node("1", "10.0.0.1", 2.0, 0.5, 1024 + 2 * ACTOR_MB),
    )


def test_a_cluster_is_joined_once(fake_ray: SimpleNamespace) -> None:
    JoinedRay("auto")
    assert fake_ray.calls == []
    fake_ray.up = False
    JoinedRay("auto")
    assert [call["address"] for call in fake_ray.calls] == ["auto"]


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError, OSError])
def test_a_cluster_that_cannot_be_joined(
    error: type[Exception], fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason in one line and not for ever, and what to do."""

    def refuse(**options: Any) -> None:
        raise error("no node\n  here " + 500 * "x")

    monkeypatch.setattr(fake_ray, "init", refuse)
    with pytest.raises(SettingsError, match=r"ray_address=auto: .*\(no node here x+\).*ray start.*submit") as caught:
        join("auto")
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_an_address_where_nothing_answers(fake_ray: SimpleNamespace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=f"ray_address={address}: nothing answers there .*ray start --head"):
            join(address)
    assert fake_ray.calls == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1:no", "127.0.0.1:", "127.0.0.1:99999999", "local", ":6379", "ray://127.0.0.1"]
)
def test_an_address_that_is_none(address: str, fake_ray: SimpleNamespace) -> None:
    with pytest.raises(SettingsError, match=f"ray_address={address}"):
        join(address)


def test_an_address_that_answers_is_rays_to_join(fake_ray: SimpleNamespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        join(f"127.0.0.1:{server.getsockname()[1]}")
    assert len(fake_ray.calls) == 1


def test_a_ray_that_another_run_has_started_for_itself_is_known(pool: Any) -> None:
    """The Ray of these tests is one."""
    context: Any = ray.init(ignore_reinit_error=True)
    session_dir = context.address_info["session_dir"]
    assert joined.belongs_to_a_run(session_dir) and not joined.belongs_to_a_run("/tmp/ray/session_1")


def test_the_ray_of_another_run_is_left(fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"session_dir": "/tmp/pflsim-ray-1-x/r/session_1"}
    monkeypatch.setattr(fake_ray, "init", lambda **options: SimpleNamespace(address_info=info))
    with pytest.raises(SettingsError, match=r"ray_address=auto: .*another run"):
        join("auto")
    assert fake_ray.calls == ["shutdown"]
