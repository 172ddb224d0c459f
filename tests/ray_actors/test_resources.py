"""Resources on a real Ray with one node: reserved as a whole, refused with a message, used again, and given back."""

import argparse
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util import placement_group_table
from support import refusing

from pflsim.config.settings import Placement
from pflsim.errors import RunError, SettingsError
from ray_actors import cluster, resources
from ray_actors.layout import ACTOR_MB, Layout, Node
from ray_actors.resources import ActorPool

SOME = Layout(((0,), (1,)), 0.01, 0.0)
"""Little, for other tests' actors hold what there is."""


def until(happens: Callable[[], bool]) -> None:
    """Ray takes a moment to give things back."""
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end, "it never came"


def reserved_now() -> int:
    """How many placement groups hold something, or wait for it."""
    return sum(entry["state"] != "REMOVED" for entry in placement_group_table().values())


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_actors_are_reserved_used_again_and_given_back(
    joined: bool, pool: ActorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "ClientActor", argparse.Namespace)  # starts faster
    before, free = reserved_now(), ray.available_resources()
    made = ActorPool(joined)
    actors = made.start(SOME)
    until(lambda: free["CPU"] - ray.available_resources()["CPU"] > 0.02 - 1e-6)
    memory = free["memory"] - ray.available_resources()["memory"]
    assert memory == pytest.approx(2 * ACTOR_MB * 2**20 * joined)
    assert made.start(Layout(((0, 1),), 0.01, 0.0)) == actors[:1]
    assert made.start(Layout(((0,), (1,), (2,)), 0.01, 0.0))[:2] == actors
    assert sum(made.on_nodes().values()) == 3 and made.free()[0].cpus == pytest.approx(free["CPU"])
    assert not {*made.start(Layout(((0,),), 0.02, 0.0))} & {*actors}
    made.close()
    until(lambda: reserved_now() == before and ray.available_resources()["CPU"] == pytest.approx(free["CPU"]))


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_stays_reserved(pool: ActorPool) -> None:
    made, before = ActorPool(joined=True), reserved_now()
    made.wait_s = 1.0
    words = ["2 client actors", "99 CPUs and 0.5 GPUs and 600 MiB", "Free", "placement.actors", "placement.wait_s=1 "]
    with refusing(*words, kind=RunError):
        made.start(Layout(((0,), (1,)), 99.0, 0.5))
    until(lambda: reserved_now() == before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that a test sets."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(resources, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def waiting(monkeypatch: pytest.MonkeyPatch, nodes: dict[int, str]) -> ActorPool:
    """A pool of two actors on these nodes, of which b is lost."""
    made = ActorPool(joined=True)
    made.wait_s, made.actors, made._groups, made._bundle = 10.0, [1, 2], [1], {"CPU": 1.0, "memory": 1.0}
    table = {"bundles": {0: {}, 1: {}}, "bundles_to_node_id": nodes}
    monkeypatch.setattr(resources, "placement_group_table", lambda group: table)
    monkeypatch.setattr(resources, "alive_ids", lambda: frozenset("a"))
    monkeypatch.setattr(made, "free", lambda: [Node("10.0.0.1", 0.0, 0.0, 2048)])
    return made


def test_actors_of_a_lost_node_are_waited_for_and_not_longer(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {0: "a", 1: "b"}
    made, until = waiting(monkeypatch, nodes), clock.now + 10
    while clock.now <= until:
        made.check()
        clock.now += 1
    words = "1 client actors, each with 1 CPUs .*wait_s=10 .*10.0.0.1: 0 CPUs.*resume with placement.actors=1"
    with pytest.raises(RunError, match=words):
        for _ in range(3):
            made.check()
            clock.now += 1
    nodes[1] = "a"
    clock.now += 2
    made.check()


def test_waiting_begins_when_somebody_waits(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    made = waiting(monkeypatch, {0: "a", 1: "b"})
    made.check()
    clock.now += 100
    made.check()


class FakeCluster(cluster.JoinedRay):
    """Has these nodes, one more at each look."""

    def __init__(self, *nodes: Node):
        self.found, self.looks = nodes, 0

    def nodes(self, placement: Placement) -> list[Node]:
        self.looks += 1
        return list(self.found[: self.looks])


def prepared(**placement: Any) -> Any:
    settings = SimpleNamespace(placement=Placement(**placement))
    return SimpleNamespace(settings=settings, batches_per_round=[1] * 4, factory=SimpleNamespace(groups=()))


@pytest.mark.parametrize(
    ("placement", "looks"), [({}, 2), ({"nodes": 3}, 3), ({"gpus": 1}, 3), ({"actors": 2}, 1), ({"nodes": 1}, 2)]
)
def test_nodes_are_waited_for(placement: dict[str, Any], looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    found = FakeCluster(Node("1", 0, 0, 1e6), Node("2", 2, 0, 1e6), Node("3", 2, 1, 1e6))
    cluster.plan(prepared(**placement), found)
    assert found.looks == looks


@pytest.mark.parametrize(("placement", "words"), [({"nodes": 3}, "3.*2 nodes"), ({"gpus": 1}, "gpus=1.*0 GPUs")])
def test_what_a_cluster_lacks_ends_the_run(placement: dict[str, Any], words: str) -> None:
    found = FakeCluster(Node("1", 0, 0, 1e6), Node("2", 2, 0, 1e6))
    with pytest.raises(RunError, match=f"{words}.*wait_s=0.6") as caught:
        cluster.plan(prepared(**placement, wait_s=0.6), found)
    assert not isinstance(caught.value, SettingsError)


def test_what_contradicts_itself_is_refused_at_once() -> None:
    found = FakeCluster(Node("1", 4, 0, 1e6))
    with pytest.raises(SettingsError, match=re.escape("placement.actors=5")):
        cluster.plan(prepared(actors=5), found)
    assert found.looks == 1
