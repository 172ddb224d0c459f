"""The size of the object store that a run requests, and the handling of signals while Ray starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pflsim.config.compose import CONFIGS, composed, composing, plain
from pflsim.config.settings import Settings
from ray_actors import run
from ray_actors.cluster import joined, launcher
from ray_actors.prepare import PreparedRun, prepare

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SMALL = ["data=digits", "clients=10", "rounds=2", "model.hidden=[8]"]
MODEL = 2**20 * 100  # bytes, as the tests have it


def job(*overrides: str) -> PreparedRun:
    with composing([CONFIGS]):
        return prepare(plain(composed([*SMALL, *overrides], [CONFIGS])))


@pytest.mark.parametrize(
    ("overrides", "models"),
    [
        (["method=fedavg"], 2 * 10),  # all clients once down and once up
        (["method=fedavg", "fraction=0.3"], 2 * 3),
        (["method=fedfomo", "fraction=0.3"], 3 * (5 + 1)),  # five candidates each
        (["method=fedfomo", "fraction=0.3", "method.models=100"], 3 * (10 + 1)),  # there are no more than ten
        (["method=fedfomo", "fraction=0.3", "eval.received=true"], 10 * 5),  # all are evaluated as received
        (["method=fedfomo", "fraction=0.3", "eval.received=true", "eval.on=participants"], 3 * (5 + 1)),
        (["method=pfedla", "fraction=0.1"], 10),
        (["method=pfedla", "fraction=0.8"], 2 * 8),
        (["method=fesem", "fraction=0.1", "eval.holdout_clients=4"], 4 * 3),  # three centres for each newcomer
    ],
)
def test_the_store_has_room_for_the_most_messages_at_once(
    overrides: list[str], models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more to spare, the data set twice, and the states: every client's, and a model of each on the server."""
    made = job(*overrides)
    federation = SimpleNamespace(initial={"w": SimpleNamespace(numel=lambda: MODEL // 4, element_size=lambda: 4)})
    shrunk = SimpleNamespace(
        plan=made.plan,
        rule=made.rule,
        federation=federation,
        dataset=SimpleNamespace(x=SimpleNamespace(nbytes=2**20)),
        initial_state={"w": SimpleNamespace(numel=lambda: 3 * MODEL // 4, element_size=lambda: 4)},
        settings=made.settings,
    )
    monkeypatch.setattr(run.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**50))
    states = 10 * 3 + made.plan.clients
    assert run.store_mb(shrunk) == 2 + 2 * (models + states) * 100  # type: ignore[arg-type]


def test_it_is_between_what_ray_needs_and_a_third_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job("method=fedavg")
    assert run.store_mb(made) == 128
    big = SimpleNamespace(
        plan=made.plan,
        rule=made.rule,
        federation=SimpleNamespace(initial={"w": SimpleNamespace(numel=lambda: MODEL, element_size=lambda: 4)}),
        dataset=made.dataset,
        initial_state=made.initial_state,
        settings=made.settings,
    )
    monkeypatch.setattr(run.psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * 2**30))
    assert run.store_mb(big) == 1024  # type: ignore[arg-type]


@pytest.fixture
def ray_takes_it() -> Iterator[None]:
    """Whatever handler a test leaves is not left."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def init(*args: object, **settings: object) -> SimpleNamespace:
    """As Ray's does it."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))
    return SimpleNamespace(address_info={"session_dir": "/tmp/ray/session_1"})


def test_a_signal_after_joining_a_cluster_reaches_the_run(monkeypatch: pytest.MonkeyPatch, ray_takes_it: None) -> None:
    monkeypatch.setattr(joined.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(joined.ray, "init", init)
    monkeypatch.setattr(joined.ray, "shutdown", lambda: None)
    with run.Runner() as runner:
        runner._found(Settings(ray_address="auto"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert runner.interrupts.requested == signal.SIGTERM


def test_a_signal_while_ray_starts_reaches_the_run(
    monkeypatch: pytest.MonkeyPatch, ray_takes_it: None, tmp_path: Path
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        init()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    monkeypatch.setattr(joined.ray, "init", interrupted)
    monkeypatch.setattr(launcher, "create_folder", lambda: (tmp_path, tmp_path))
    monkeypatch.setattr(launcher, "remove_leftovers", lambda: None)
    monkeypatch.setattr(launcher, "Guardian", lambda *args: None)
    monkeypatch.setattr(launcher, "_guardians", {})
    with run.Runner() as runner:
        launcher.start(cpus=1, gpus=0, store_mb=100)
        assert runner.interrupts.requested == signal.SIGTERM
