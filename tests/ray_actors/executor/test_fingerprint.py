"""What actors run on: other code and other versions are noticed, on a cluster before they change a result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_modules.hosts.failure_policy import FailurePolicy
from pflsim.config.settings import OnError
from pflsim.engine.faults import FaultRecorder
from pflsim.errors import RunError
from ray_actors.executor import actor_group as actor_group
from ray_actors.executor import fingerprint
from ray_actors.executor.actor_group import ActorGroup
from ray_actors.executor.fingerprint import PACKAGES, RuntimeFingerprint, code_digest
from ray_actors.placement.actor_spec import ActorSpec
from ray_actors.placement.layout import Layout

MINE = RuntimeFingerprint(1, "10.0.0.1", "abc", "Python 3.12, torch 2.14", "x86_64 AVX2")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, ""),
        ({"pid": 2, "address": "10.0.0.2"}, ""),
        ({"processor": "x86_64 AVX512"}, ""),  # of that there is a warning
        ({"code": "abd"}, "another version of this project there than here"),
        ({"versions": "Python 3.12, torch 2.13"}, "Python 3.12, torch 2.13 there, Python 3.12, torch 2.14 here"),
        ({"versions": "Python 3.11", "code": "abd"}, "Python 3.11 there, Python 3.12, torch 2.14 here"),
    ],
)
def test_what_differs(other: dict[str, Any], said: str) -> None:
    assert MINE._replace(**other).differs(MINE) == said


def test_an_origin_with_a_message() -> None:
    assert str(MINE) == "process 1 on node 10.0.0.1"


# The digest of the source ---------------------------------------------------------------------------------------------


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copies of the packages, which count as installed."""
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "templates")
        shutil.copytree(fingerprint.ROOT / name, tmp_path / "here" / name, ignore=ignored)
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path / "here")
    code_digest.cache_clear()
    yield tmp_path / "here"
    code_digest.cache_clear()


def digest() -> str:
    code_digest.cache_clear()
    return code_digest()


def test_a_copy_has_the_same_digest(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies, and whatever else lies there."""
    of_copy = digest()
    (copies / "pflsim" / "notes.txt").write_text("no source")
    (copies / "another.py").write_text("x = 1\n")
    (copies / "pflsim" / "__pycache__").mkdir()
    assert digest() == of_copy
    monkeypatch.undo()
    assert digest() == of_copy


def more_in(file: Path) -> None:
    file.write_text(file.read_text() + "# more\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda here: more_in(here / "pflsim" / "fusion" / "means.py"),
    "a line of a method": lambda here: (here / "lightning_modules" / "methods" / "ditto.py").write_text(""),
    "a new file": lambda here: (here / "ray_actors" / "more.py").write_text(""),
    "a file that is gone": lambda here: (here / "ray_actors" / "run.py").unlink(),
    "a name": lambda here: (here / "pflsim" / "engine" / "plan.py").rename(here / "pflsim" / "plans.py"),
    "a folder": lambda here: (here / "pflsim" / "engine" / "plan.py").rename(here / "pflsim" / "data" / "plan.py"),
    "a package": lambda here: (here / "pflsim" / "engine" / "plan.py").rename(here / "ray_actors" / "plan.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_source_is_another_digest(change: str, copies: Path) -> None:
    before = digest()
    CHANGES[change](copies)
    assert digest() != before


# Actors that come up --------------------------------------------------------------------------------------------------


class FakePool:
    """Gives names for actors."""

    def hosts(self, specs: Any) -> list[str]:
        return [f"actor {number}" for number, _ in enumerate(specs)]

    def trim(self, specs: Any) -> None: ...


def met(monkeypatch: pytest.MonkeyPatch, origins: list[RuntimeFingerprint], cluster: bool = True) -> ActorGroup:
    """A group whose actors have these fingerprints."""
    failure_policy = FailurePolicy(OnError("abort"), "abort", FaultRecorder())
    specs = tuple(ActorSpec(1.0, 0.0, found.address if cluster else "") for found in origins)
    layout = Layout(tuple((client,) for client, _ in enumerate(origins)), specs)
    pool: Any = FakePool()
    monkeypatch.setattr(actor_group, "runtime_fingerprint", lambda: MINE)
    monkeypatch.setattr(actor_group, "ray", SimpleNamespace(get=lambda ref: ref, put=lambda x: x))
    made = ActorGroup(pool, layout, (None, None, None), failure_policy)
    monkeypatch.setattr(made, "wait_for", lambda number: None)
    monkeypatch.setattr(made, "_build", lambda number: origins[number])
    made.start()
    return made


def test_actors_that_are_alike_are_not_spoken_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = met(monkeypatch, [MINE, MINE._replace(pid=2), MINE._replace(pid=3, address="10.0.0.2")])
    made.wait_until_ready()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"versions": "Python 3.12, torch 2.13"}, "torch 2.13 there, Python 3.12, torch 2.14 here"),
        ({"code": "abd"}, "another version of this project"),
    ],
)
def test_other_code_or_versions_are_refused_on_a_cluster(
    other: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On one machine all have what this process has, also where a file has been saved since it began."""
    theirs = MINE._replace(pid=7, address="10.0.0.2", **other)
    words = f"client actor 1, process 7 on node 10.0.0.2, .*driver on 10.0.0.1: .*{said}.*install the same on every"
    with pytest.raises(RunError, match=words):
        met(monkeypatch, [MINE, theirs]).wait_until_ready()
    made = met(monkeypatch, [MINE, theirs], cluster=False)
    made.wait_until_ready()
    assert not caplog.messages


def test_another_processor_is_reported_once_per_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wide = MINE._replace(processor="x86_64 AVX512")
    there = [wide._replace(pid=pid, address=f"10.0.0.{2 + pid % 2}") for pid in range(4)]
    made = met(monkeypatch, [MINE, *there])
    made.wait_until_ready()
    lines = caplog.messages
    assert len(lines) == 2 and all("x86_64 AVX512, the driver's with x86_64 AVX2" in line for line in lines)
    assert ["10.0.0.2" in lines[0], "10.0.0.3" in lines[1]] == [True, True]


def test_another_gpu_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The driver's process has none."""
    one, other = MINE._replace(gpu="H100, CUDA 13.0"), MINE._replace(gpu="A100, CUDA 13.0")
    met(monkeypatch, [one, one, MINE, other, other]).wait_until_ready()
    assert len(caplog.messages) == 1 and "actor 3 computes on A100" in caplog.messages[0]


def test_nor_again_when_the_clients_move(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wide = MINE._replace(processor="x86_64 AVX512", address="10.0.0.2")
    made = met(monkeypatch, [MINE, wide])
    made.wait_until_ready()
    made.move(Layout(((0, 1), (2,)), (ActorSpec(1.0, 0.0, "10.0.0.1"), ActorSpec(1.0, 0.0, "10.0.0.2"))))
    assert len(caplog.messages) == 1
