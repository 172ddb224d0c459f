"""Room on a node of a real Ray, which has one: reserved as a whole, refused with a message, and given back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util import placement_group_table

from pflsim.errors import SettingsError
from ray_actors.executor import actor_pool as pools
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement import reservations
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.nodes import alive_nodes
from ray_actors.placement.reservations import bundle, release, reserve

pytestmark = pytest.mark.slow

CPU = 0.01
"""Little, for other tests' actors hold what there is."""
PATIENCE_S = 180.0


@pytest.fixture
def node(pool: ActorPool) -> str:
    """The id of the only node."""
    return ray.get_runtime_context().get_node_id()


@pytest.fixture
def made(node: str) -> Iterator[ActorPool]:
    """A pool of its own."""
    made = ActorPool(PATIENCE_S)
    yield made
    made.close()


def free(name: str) -> float:
    return ray.available_resources().get(name, 0.0)


def until(happens: Callable[[], bool]) -> None:
    """Ray takes a moment to give things back; looks again and again, but not for ever."""
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end, "it never came"


def about(one: float, other: float) -> bool:
    return abs(one - other) < 1e-6


def reserved_now() -> int:
    """How many reservations hold something, or wait for it."""
    return sum(entry["state"] != "REMOVED" for entry in placement_group_table().values())


def test_the_bundle_of_an_actor() -> None:
    memory = float(ACTOR_MB * 2**20)
    assert bundle(ActorSpec(0.5, 0.25, "1")) == {"CPU": 0.5, "GPU": 0.25, "memory": memory}
    assert bundle(ActorSpec(1.0, 0.0, "1")) == {"CPU": 1.0, "memory": memory}
    assert bundle(ActorSpec(0.0, 1.0, "1")) == {"GPU": 1.0, "memory": memory}


def test_what_is_reserved_is_missing_until_it_is_released(node: str) -> None:
    cpus, memory = free("CPU"), free("memory")
    groups = reserve([ActorSpec(CPU, 0.0, node), ActorSpec(2 * CPU, 0.0, node)], PATIENCE_S)
    assert len(groups) == 2
    until(lambda: about(cpus - free("CPU"), 3 * CPU) and about(memory - free("memory"), 2 * ACTOR_MB * 2**20))
    release(groups)
    until(lambda: about(free("CPU"), cpus) and about(free("memory"), memory))
    release(groups)  # nothing is left to give back


@pytest.mark.parametrize("wait_s", [0.0, 0.5, 1.0])
def test_free_resources_are_reserved_whatever_the_timeout(wait_s: float, node: str) -> None:
    cpus = free("CPU")
    release(reserve([ActorSpec(CPU, 0.0, node)], wait_s))
    until(lambda: free("CPU") > cpus - 1e-6)


def test_nothing_is_reserved_for_nobody(node: str) -> None:
    before = reserved_now()
    assert reserve([], 0.0) == [] and reserved_now() == before


def test_all_or_nothing_and_the_refusal_names_demand_and_supply(node: str) -> None:
    (found,) = (one for one in alive_nodes() if one.id == node)
    cpus, before = free("CPU"), reserved_now()
    with pytest.raises(SettingsError) as caught:
        reserve([ActorSpec(CPU, 0.0, node), ActorSpec(99.0, 5.0, node)], 1.0)
    words = str(caught.value)
    asked = f"{found.address}: 99.01 CPUs, 5 GPUs, {2 * ACTOR_MB / 1024:.1f} GiB"
    assert "within 1 s" in words and asked in words and f"Free: {found.address}: " in words
    assert all(name in words for name in ("placement.actors", "placement.cpus", "placement.wait_s"))
    until(lambda: free("CPU") > cpus - 1e-6 and reserved_now() == before)


def test_a_node_that_is_not_there_has_no_room(node: str) -> None:
    before = reserved_now()
    with pytest.raises(SettingsError, match="Requested: a node that has left: 0.01 CPUs"):
        reserve([ActorSpec(CPU, 0.0, "0" * 56)], 0.2)
    until(lambda: reserved_now() == before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("waiting", [False, True])
def test_whatever_goes_wrong_all_is_given_back(
    error: type[BaseException], waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, back = list[Any](), list[Any]()

    class Group:
        def wait(self, seconds: int) -> bool:
            if waiting and self is made[1]:
                raise error("no answer")
            return True

    def create(bundles: Any, **more: Any) -> Group:
        if not waiting and len(made) == 2:
            raise error("no answer")
        made.append(Group())
        return made[-1]

    monkeypatch.setattr(reservations, "placement_group", create)
    monkeypatch.setattr(reservations, "remove_placement_group", back.append)
    with pytest.raises(error, match="no answer"):
        reserve([ActorSpec(CPU, 0.0, "1")] * 3, 1.0)
    assert back == made and len(made) == 2 + waiting


# Actors on what is reserved -------------------------------------------------------------------------------------------


def pid(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE_S)


def test_actors_are_reused_trimmed_and_replaced_where_they_are(node: str, made: ActorPool) -> None:
    cpus, before = free("CPU"), reserved_now()
    spec, other = ActorSpec(CPU, 0.0, node), ActorSpec(2 * CPU, 0.0, node)
    one, two = made.hosts([spec, other])
    assert reserved_now() == before + 2 and made.specs == (spec, other)
    pids = [pid(actor) for actor in (one, two)]
    until(lambda: about(cpus - free("CPU"), 3 * CPU))
    assert {host.spec.node for host in made._hosts} == {node}

    assert made.hosts([other, spec]) == [two, one] and made.started == 2  # the same, in the order of their specs
    assert reserved_now() == before + 2

    new = made.replace(one)
    assert new is not one and reserved_now() == before + 2  # in the reservation of the one before
    assert pid(new) not in pids
    with pytest.raises(RayActorError):
        pid(one)
    assert made.hosts([spec, other]) == [new, two]

    made.trim([spec])
    assert made.specs == (spec,) and reserved_now() == before + 1
    with pytest.raises(RayActorError):
        pid(two)
    until(lambda: about(cpus - free("CPU"), CPU))
    made.trim([spec, spec])  # nothing is too much
    assert made.hosts([spec]) == [new]

    made.close()
    assert made.started == 0 and reserved_now() == before
    with pytest.raises(RayActorError):
        pid(new)
    until(lambda: about(free("CPU"), cpus))


def test_actors_that_cannot_be_had_start_nothing_and_leave_the_others(
    node: str, made: ActorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on nodes nor anywhere else."""
    started: list[ActorSpec] = []
    monkeypatch.setattr(pools, "_start", lambda spec, reserved: started.append(spec) or object())
    monkeypatch.setattr(pools.ray, "kill", lambda actor: None)
    spec, before = ActorSpec(CPU, 0.0, node), reserved_now()
    (kept,) = made.hosts([spec])
    made.wait_s = 0.2
    with pytest.raises(SettingsError, match="cannot be met"):
        made.hosts([spec, ActorSpec(CPU, 0.0), spec, ActorSpec(99.0, 0.0, node)])
    assert started == [spec] and made.specs == (spec,) and made.hosts([spec]) == [kept]
    until(lambda: reserved_now() == before + 1)
    made.close()


def test_what_was_reserved_for_actors_that_do_not_start_is_given_back(
    node: str, made: ActorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ActorSpec] = []

    def start(spec: ActorSpec, reserved: Any) -> object:
        if started:
            raise RuntimeError("no more")
        started.append(spec)
        return object()

    monkeypatch.setattr(pools, "_start", start)
    monkeypatch.setattr(pools.ray, "kill", lambda actor: None)
    before = reserved_now()
    with pytest.raises(RuntimeError, match="no more"):
        made.hosts([ActorSpec(CPU, 0.0, node)] * 3)
    assert made.started == 1 and reserved_now() == before + 1
    made.close()
    assert reserved_now() == before


def test_nothing_is_reserved_on_a_single_machine(node: str, made: ActorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[ActorSpec, bool]] = []
    monkeypatch.setattr(pools, "_start", lambda spec, reserved: given.append((spec, reserved is not None)) or object())
    monkeypatch.setattr(pools.ray, "kill", lambda actor: None)
    specs = [ActorSpec(1.0, 0.0), ActorSpec(CPU, 0.0, node), ActorSpec(1.0, 0.0)]
    before = reserved_now()
    made.hosts(specs)
    assert given == list(zip(specs, [False, True, False], strict=True)) and reserved_now() == before + 1
    made.trim([ActorSpec(1.0, 0.0)])
    assert made.specs == (ActorSpec(1.0, 0.0),) and reserved_now() == before
    made.close()
