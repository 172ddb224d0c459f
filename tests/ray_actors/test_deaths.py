"""Actors are killed for real, and the results are equal to the bit."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from failing_clients import ALWAYS, set_trap
from failure_runs import endangered, on_ray, outcome, take_log
from ray.exceptions import OutOfMemoryError, RayActorError
from support import Records, World, agree

from pflsim.errors import ClientError, RunError, ServerError
from pflsim.types import RoundRecord
from ray_actors import executor as remote
from ray_actors.resources import ActorPool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Five clients; the first two train in lockstep."""
    return endangered(tmp_path_factory.mktemp("traps"), init="per_client")


@pytest.fixture
def traps(made: World) -> Path:
    """Where traps are set; empty at first."""
    folder: Path = made.rule.traps
    for left in folder.iterdir():
        left.unlink()
    return folder


class Meddler(Records):
    """Does something after every round."""

    def __init__(self, meddle: Callable[[int], None] | None = None):
        super().__init__()
        self.meddle = meddle or (lambda round_number: None)

    def round(self, record: RoundRecord) -> None:
        super().round(record)
        self.meddle(record.round)


@pytest.fixture(scope="module")
def straight(made: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What comes of it without any trap, in this process."""
    return outcome(made.inline(), tmp_path_factory.mktemp("straight"))


DEATHS = {
    "of clients": ["die_train_0_2", "die_reply_1_2", "die_train_2_2", "die_train_4_2", "die_evaluate_4_3"],
    "of the server": ["die_send", "die_fuse", "die_fused", "die_global", "die_train_3_1"],
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_changes_nothing(
    name: str, made: World, traps: Path, straight: tuple[Any, ...], pool: ActorPool, tmp_path: Path
) -> None:
    executor = on_ray(made, pool)
    for trap in DEATHS[name]:
        set_trap(traps, trap)
    agree(outcome(executor, tmp_path), straight)
    assert not [*traps.iterdir()], "a trap was not met"
    lines = take_log(tmp_path).splitlines()
    assert 1 <= executor.faults.restarts == len(lines) <= len(DEATHS[name])
    assert all("died" in line and "process" in line for line in lines)


@pytest.mark.parametrize("trap", ["gpu_train_2_2", "gpu_train_3_1"])
def test_an_actor_whose_gpu_fails_is_replaced(
    trap: str, made: World, traps: Path, straight: tuple[Any, ...], pool: ActorPool, tmp_path: Path
) -> None:
    """Its process cannot use the GPU again; its other clients and calls are repeated by the new one."""
    executor = on_ray(made, pool)
    set_trap(traps, trap)
    agree(outcome(executor, tmp_path), straight)
    assert executor.faults.restarts == 1 and "device-side assert" in take_log(tmp_path)


def test_kill_9_between_rounds(made: World, straight: tuple[Any, ...], pool: ActorPool, tmp_path: Path) -> None:
    """Of client actors and of the server, from outside."""
    executor = on_ray(made, pool)
    actors = [*executor.actors, executor.server.actor]
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])

    def meddle(round_number: int) -> None:
        if round_number == 2:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    agree(outcome(executor, tmp_path, Meddler(meddle)), straight)
    assert executor.faults.restarts == 3


@pytest.mark.parametrize(("trap", "why"), [("die_train_2_2", "kill -9"), ("crash_train_2_2", "Segmentation fault")])
def test_a_host_that_dies_again_and_again_ends_the_run(
    trap: str, why: str, made: World, traps: Path, pool: ActorPool, tmp_path: Path
) -> None:
    executor = on_ray(made, pool, "retry(2)")
    set_trap(traps, trap, ALWAYS)
    message = f"client 2 failed in round 2 .local training.*process .* on node .*{why}.*on_client_error=drop"
    with pytest.raises(ClientError, match=message) as e:
        outcome(executor, tmp_path)
    assert e.value.client == 2 and e.value.suspects == (2,)
    assert executor.faults.restarts >= 1
    assert ("failing_clients.py" in take_log(tmp_path)) == trap.startswith("crash")
    (traps / trap).unlink()


def test_abort_ends_it_at_once(made: World, traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    executor = on_ray(made, pool, "abort")
    set_trap(traps, "die_train_2_1")
    with pytest.raises(ClientError, match="on_client_error=drop"):
        outcome(executor, tmp_path)
    assert executor.faults.restarts == 1  # so that the actors can be used again


def test_drop_finds_out_who_it_was(made: World, traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    """Whoever kills its actor is left out of that round, and nobody else: as if it had been absent."""
    executor = on_ray(made, pool, "drop", actors=1)
    set_trap(traps, "die_reply_2_2", ALWAYS)
    found = outcome(executor, tmp_path)
    (traps / "die_reply_2_2").unlink()
    absent = outcome(made.inline(), tmp_path, absentees=((), (2,), ()))
    agree(found[:4], absent[:4])
    assert [faults for _, faults in found[4]] == [{}, {2: "error"}, {}]


def test_a_server_that_dies_again_and_again_ends_the_run(
    made: World, traps: Path, pool: ActorPool, tmp_path: Path
) -> None:
    executor = on_ray(made, pool, "retry(1)")
    set_trap(traps, "die_fuse", ALWAYS)
    with pytest.raises(ServerError, match="server actor .*died during fuse.*tried 2 times"):
        outcome(executor, tmp_path)
    (traps / "die_fuse").unlink()


def test_an_error_of_the_server_ends_the_run(made: World, traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    executor = on_ray(made, pool)
    set_trap(traps, "raise_fuse")
    with pytest.raises(ServerError, match="fuse: ValueError: a trap in the fusion"):
        outcome(executor, tmp_path)
    assert 'raise ValueError("a trap in the fusion")' in take_log(tmp_path)


def test_an_actor_that_cannot_start_is_an_error(made: World, pool: ActorPool, tmp_path: Path) -> None:
    broken = replace(made, factory=replace(made.factory, models=(_deadly,)))
    with pytest.raises(RunError, match="died while it was starting.*tried 2 times"):
        on_ray(broken, pool, "retry(1)")


def _deadly(shape: tuple[int, ...], classes: int) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


OUT_OF_MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: d8637915) "
    "was 4.34GB used / 23.54GB limit (0.184484)\nOOM kill reason: Memory usage 4623798272B exceeded threshold of "
    "3109010944B (12.3% of 25276510208B limit)\nObject store memory usage: [- objects spillable: 0\n]"
)
"""By Ray 2.60, with its list of processes and its advice behind it."""
KILLED = (
    "The actor died. Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
)


def test_deaths_by_the_memory_monitor_are_told_from_others() -> None:
    """Although Ray's advice names memory among the causes of every death."""
    for error in (OutOfMemoryError(OUT_OF_MEMORY), RayActorError(error_msg=f"The actor died. {OUT_OF_MEMORY}")):
        assert isinstance(error, remote.DEATHS) and "out of memory" in remote.how_it_died(error)
    assert "kill -9" in remote.how_it_died(RayActorError(error_msg=KILLED))
