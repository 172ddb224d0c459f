"""What is lost with a node, and how that is found out; whole runs that lose one are in test_cluster_nodes.py."""

from dataclasses import replace
from typing import Any

import pytest
import ray
from failure_runs import SIZES, TRAINING, on_ray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, OwnerDiedError, RayTaskError
from support import World, agree, pfedcfr, states

from pflsim.engine.execution import NodeLost, StatesLost, TrainTask
from pflsim.errors import RunError
from ray_actors import executor as remote
from ray_actors.client_actor import Environment
from ray_actors.resources import ActorPool

pytestmark = pytest.mark.slow


def held(executor: Any) -> Any:
    return states(executor), executor.server_state()


LOST, LATE = ObjectLostError("ab" * 28, None, ""), GetTimeoutError("late")


def small() -> World:
    """Four of the five clients train."""
    made = pfedcfr(sizes=SIZES, training=TRAINING)
    return replace(made, federation=replace(made.federation, clients=made.federation.clients[:4]))


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


def one_round(executor: Any) -> None:
    executor.fuse(executor.run(TrainTask(1), executor.send((0, 1, 2, 3))))
    executor.commit()


def test_lost_objects_and_states(pool: ActorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost object is known for one, also where a call was given it; so is a lost state."""
    made = small()
    executor = on_ray(made, pool)
    executor.recover()  # nothing to lose
    one_round(executor)
    after = held(executor)
    for error in (LOST, OwnerDiedError("ab" * 28, None, ""), ValueError("no"), ActorDiedError()):
        lost = isinstance(error, ObjectLostError)
        for met in (error, RayTaskError("train", "a traceback", error)):
            with monkeypatch.context() as patch:
                patch.setattr(remote.ray, "get", lambda refs, met=met: (_ for _ in ()).throw(met))
                with pytest.raises(NodeLost if lost else type(met)):
                    executor._fetch([])
    with monkeypatch.context() as patch:
        patch.setattr(remote, "ray", LosingRay(0))
        executor.recover()
    agree(held(executor), after)
    for error in (LOST, LATE):
        with monkeypatch.context() as patch:
            patch.setattr(remote, "ray", LosingRay(1, error))
            with pytest.raises(StatesLost):
                executor.recover()


# What actors run on

MINE = Environment("process 1 on node 10.0.0.1", "a", "torch 2.14, pflsim abc", "AVX2")


def test_other_software_is_refused_and_other_processors_are_reported(
    pool: ActorPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = on_ray(small(), pool)
    found = [MINE, MINE]
    monkeypatch.setattr(remote, "environment", lambda: MINE)
    monkeypatch.setattr(executor, "_prepare", lambda: found)
    for joined in (False, True):
        monkeypatch.setattr(pool, "joined", joined)
        caplog.clear()
        executor.start()
        assert not caplog.messages
        found[1] = MINE._replace(processor="AVX512")
        executor.start()
        assert len(caplog.messages) == 1 and "AVX512" in caplog.messages[0]
        found[1] = MINE._replace(versions="torch 2.13, pflsim abc")
        if joined:  # on one machine, a file may have been saved since this process began
            with pytest.raises(RunError, match="client actor 1, process 1 .*torch 2.13, pflsim abc there"):
                executor.start()
        else:
            executor.start()
        found[1] = MINE
