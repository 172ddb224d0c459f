"""Signals while Ray starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pflsim.config.settings import Settings
from ray_actors import run
from ray_actors.cluster import joined, launcher

pytestmark = [pytest.mark.slow, pytest.mark.ray]


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
