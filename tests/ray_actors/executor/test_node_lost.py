"""What is lost with a node, and how that is found out; a whole run that loses one, on a real Ray that has one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from failing_executor import PLAN, alike, bare
from failure_runs import SIZES as FIVE
from failure_runs import on_ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OwnerDiedError,
    RayTaskError,
)
from support import Records, World, dropout_mlp, states, world

from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.training import Training
from pflsim.config.settings import Placement
from pflsim.engine.execution import NodeLost, TrainTask
from pflsim.engine.simulation import Simulation
from pflsim.records.folder import LOG, run_log
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from ray_actors.executor import actor_group as actor_group
from ray_actors.executor import deaths
from ray_actors.executor import ray_executor as remote
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import check_lost, is_alive
from ray_actors.placement.actor_spec import ActorSpec
from ray_actors.placement.layout import Layout, Supply, lay_out
from ray_actors.placement.nodes import alive_ids

pytestmark = [pytest.mark.slow, pytest.mark.ray]

LOST = ObjectLostError("ab" * 28, None, "")
AWAY = ActorUnavailableError("out of reach", b"0" * 16)


@pytest.mark.parametrize("error", [LOST, OwnerDiedError("ab" * 28, None, "")])
def test_a_lost_object_is_known_for_one(error: Exception) -> None:
    """Also where a call was given it."""
    for met in (error, RayTaskError("train", "a traceback", error)):
        with pytest.raises(NodeLost, match="objects on a node that left"):
            check_lost(met)


@pytest.mark.parametrize("error", [ValueError("no"), AWAY, ActorDiedError(), GetTimeoutError("late")])
def test_other_errors_are_not_a_loss(error: Exception) -> None:
    check_lost(error)
    check_lost(RayTaskError("train", "a traceback", error))


# An actor that cannot be reached --------------------------------------------------------------------------------------


class Fake:
    """An actor that answers with these, one after the other; the last one stays."""

    def __init__(self, *answers: Any):
        self.answers, self.asked = list(answers), 0
        self.__ray_ready__ = SimpleNamespace(remote=lambda: self)

    def answer(self) -> Any:
        self.asked += 1
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that goes on while somebody waits, and nobody does."""
    made = SimpleNamespace(now=0.0, monotonic=lambda: made.now)

    def sleep(seconds: float) -> None:
        made.now += seconds

    def get(actor: Fake, timeout: float) -> Any:
        try:
            return actor.answer()
        except GetTimeoutError:
            made.now += timeout
            raise

    made.sleep = sleep
    monkeypatch.setattr(deaths, "time", made)
    monkeypatch.setattr(deaths, "ray", SimpleNamespace(get=get))
    return made


DEAD, LATE = ActorDiedError(), GetTimeoutError("at work")


@pytest.mark.parametrize(
    ("answers", "alive", "asked"),
    [
        ([7], True, 1),
        ([AWAY, AWAY, 7], True, 3),
        ([LATE], True, 1),  # it is at work
        ([AWAY, AWAY, LATE], True, 3),
        ([DEAD], False, 1),
        ([AWAY, AWAY, DEAD], False, 3),
    ],
)
def test_whether_it_is_alive_is_waited_for(answers: list[Any], alive: bool, asked: int, clock: SimpleNamespace) -> None:
    actor = Fake(*answers)
    assert is_alive(actor, AWAY) == alive and actor.asked == asked


def test_but_not_for_ever(clock: SimpleNamespace) -> None:
    assert not is_alive(Fake(AWAY), AWAY)
    assert deaths.UNREACHABLE_TIMEOUT_S <= clock.now < deaths.UNREACHABLE_TIMEOUT_S + 5


def test_one_that_is_dead_is_not_asked(clock: SimpleNamespace) -> None:
    actor = Fake(7)
    assert not is_alive(actor, DEAD) and actor.asked == 0


# States that count as lost --------------------------------------------------------------------------------------------


def small() -> World:
    """Four of the five clients train."""
    made = world(
        partial(PFedCFR, alpha=100.0, r="body", unit="module"), PFedCFRServer(alpha=100.0, sigma=1e3), sizes=FIVE,
        training=Training(lr=0.1, batch_size=4, momentum=0.5), model=dropout_mlp, init="per_client",
    )  # fmt: skip
    return replace(made, federation=replace(made.federation, clients=made.federation.clients[:4]))


def one_round(executor: Any) -> None:
    executor.fuse(executor.run(TrainTask(1), executor.send((0, 1, 2, 3))))
    executor.commit()


class LosingRay:
    """Ray, except that the first `lost` objects that are looked for with a timeout cannot be fetched."""

    def __init__(self, lost: int, error: Exception = LOST):
        self.lost, self.error = lost, error

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if timeout is not None and self.lost:
            self.lost -= 1
            raise self.error
        return ray.get(refs, timeout=timeout)


@pytest.mark.parametrize("error", [LOST, LATE], ids=["lost", "late"])
@pytest.mark.parametrize("lost", [0, 1])
def test_states_are_kept_if_all_can_be_fetched(
    lost: int, error: Exception, pool: ActorPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one cannot, hosts and server are as at the beginning."""
    made = small()
    executor = on_ray(made, pool)
    one_round(executor)
    after = states(executor), executor.server_state()
    with monkeypatch.context() as patch:
        patch.setattr(remote, "ray", LosingRay(lost, error))
        assert executor.recover() == (not lost)
    if not lost:
        assert alike(states(executor), after[0]) and alike(executor.server_state(), after[1])
        return
    assert executor.states == {} and executor.server.state is None
    fresh = made.inline()
    assert alike(states(executor), states(fresh)) and alike(executor.server_state(), fresh.server_state())
    one_round(executor)
    assert alike(states(executor), after[0]) and alike(executor.server_state(), after[1])


def test_at_the_beginning_there_is_nothing_to_lose(pool: ActorPool, tmp_path: Path) -> None:
    assert on_ray(small(), pool).recover()


# A whole run ----------------------------------------------------------------------------------------------------------


class FakeElastic:
    """Lays out on one actor less, on a machine of one's own, when a node is gone."""

    def __init__(self, left: Layout):
        self.left, self.asked = left, 0

    def grown(self, layout: Layout) -> None: ...

    def lay_out(self) -> Layout:
        self.asked += 1
        return self.left


@pytest.mark.parametrize("lost", [True, False], ids=["states lost", "states left"])
@pytest.mark.parametrize("every", [0, 2])
def test_a_node_that_dies_in_the_middle_changes_no_bit(
    every: int, lost: bool, pool: ActorPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two actors counts as on a node that is gone when round 4 begins to train."""
    made, drawn = small(), replace(PLAN, newcomers=(4,), checkpoint_every=every, trace_rounds=())
    outcomes = []
    (node,) = alive_ids()

    class Dying(Records):
        def phase(self, round_number: int, name: str, due: int = 0) -> None:
            super().phase(round_number, name, due)
            if (round_number, name) == (4, "train") and isinstance(executor, remote.RayExecutor) and not elastic.asked:
                executor.actor_group._nodes = {node, "gone"}
                monkeypatch.setattr(actor_group, "POLL_INTERVAL_S", 0.0)
                monkeypatch.setattr(actor_group, "addresses", lambda ids: ["10.0.0.9"])
                monkeypatch.setattr(remote, "ray", LosingRay(1 if lost else 0))

    elastic = FakeElastic(lay_out(FIVE, Placement(actors=1), Supply(cpus=2, gpus=0)))
    for name in ("inline", "ray"):
        (tmp_path / name).mkdir()
        executor: Any = made.inline() if name == "inline" else on_ray(made, pool)
        if name == "ray":
            executor._elastic = elastic
        listener = Dying()
        with run_log(tmp_path / name):
            Simulation(executor, drawn, tmp_path / name, listener).run()
        records = [bare(record) for record in listener.records]
        outcomes.append((states(executor), executor.server_state(), records, listener.joined))
        again = [phase[0] for phase in listener.phases if isinstance(phase, tuple) and phase[1] == "again"]
        assert again == ([] if name == "inline" or not lost else [1, 2, 3] if every == 0 else [3])
    one, other = outcomes
    assert alike(one[0], other[0]) and alike(one[1], other[1]) and one[2:] == other[2:]
    assert elastic.asked == 1 and executor.layout is elastic.left
    assert "1 of 2 nodes with client actors left the cluster: 10.0.0.9" in (tmp_path / "ray" / LOG).read_text()


def test_whereabouts_count_the_actors(pool: ActorPool) -> None:
    from ray_actors.placement.nodes import alive_nodes, whereabouts

    (node,) = alive_nodes()
    assert node.here
    specs = [ActorSpec(1.0, 0.0), ActorSpec(1.0, 0.0, node.id), ActorSpec(1.0, 0.0, "0" * 56)]
    said = f"client actors: 2 on {node.address}, 1 on a node that has left; driver and server on {node.address}"
    assert whereabouts(specs) == said
    assert ray.is_initialized()
