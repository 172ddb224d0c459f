"""Only what is exactly as it was written is read; a checkpoint that is left out is named."""

import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import FailingCalls, write_checkpoint
from support import refusing

from pflsim.errors import SettingsError
from pflsim.records.checkpoint_read import Checkpoint, check_header, newest_checkpoint

HEADER = {"method": "fedavg", "data": "digits", "partition_hash": "abc", "seed": 5, "clients": 3, "hidden": [3]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of rounds 5 and 10."""
    for number in (5, 10):
        clients = [(c, {"w": torch.arange(4.0) + c}) for c in range(3)]
        write_checkpoint(tmp_path / "checkpoints", number, {"round": number}, clients, HEADER, 2, number / 10)
    return tmp_path / "checkpoints"


def newest(folder: Path, **options: Any) -> tuple[Checkpoint | None, list[str]]:
    said: list[str] = []
    return newest_checkpoint(folder, said.append, **options), said


def test_a_whole_one(folder: Path) -> None:
    checkpoint, said = newest(folder)
    assert checkpoint is not None and said == []
    assert (checkpoint.round, checkpoint.header, checkpoint.score) == (10, HEADER, 1.0)
    assert checkpoint.path == folder / "round_0010"
    assert checkpoint.server() == {"round": 10} and checkpoint.ids == {"clients_000000.pt": (0, 1, 2)}
    assert checkpoint.client(2)["w"].tolist() == [2, 3, 4, 5]
    assert [(c, state["w"].tolist()[0]) for c, state in checkpoint.clients()] == [(0, 0), (1, 1), (2, 2)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit meta.json."""
    content = json.loads((path / "meta.json").read_text())
    change(content)
    (path / "meta.json").write_text(json.dumps(content))


def not_loadable(path: Path) -> None:
    """A file that could run code when it is loaded, with the right checksum."""
    torch.save(os.getcwd, path / "server.pt")
    digest = hashlib.sha256((path / "server.pt").read_bytes()).hexdigest()
    rewrite(path, lambda content: content["files"].update({"server.pt": digest}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "does not match": lambda path: flip(path / "clients_000000.pt"),
    "clients_000000.pt": lambda path: (path / "clients_000000.pt").unlink(),
    "does not have": lambda path: rewrite(path, lambda content: content["ids"].update({"clients_000000.pt": [0, 1]})),
    "meta.json": lambda path: os.truncate(path / "meta.json", 99),
    "server.pt": not_loadable,
    "score": lambda path: rewrite(path, lambda content: content.update(score="high")),
    "header": lambda path: rewrite(path, lambda content: content.pop("header")),
    "round 5": lambda path: rewrite(path, lambda content: content.update(round=5)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_refused_and_the_one_before_is_used(folder: Path, name: str) -> None:
    DAMAGES[name](folder / "round_0010")
    checkpoint, said = newest(folder)
    assert checkpoint is not None and (checkpoint.round, checkpoint.server()) == (5, {"round": 5})
    (line,) = said
    assert "round_0010" in line and name in line and "\n" not in line


def test_those_beyond_the_records_are_passed_over(folder: Path) -> None:
    checkpoint, said = newest(folder, until=9)
    assert checkpoint is not None and checkpoint.round == 5
    assert len(said) == 1 and "round_0010" in said[0]
    assert newest(folder, until=4)[0] is None
    assert newest(folder, until=10)[1] == []


def test_files_of_many_clients_and_an_initial_state_that_is_written_once(tmp_path: Path) -> None:
    initial, own = {"w": torch.zeros(1000)}, {"w": torch.ones(1000, 1).T}
    folder = write_checkpoint(tmp_path, 1, {}, [(c, own if c == 5 else initial) for c in range(130)], {}, 1)
    assert [path.name for path in sorted(folder.glob("clients_*"))] == ["clients_000000.pt", "clients_000128.pt"]
    assert (folder / "clients_000000.pt").stat().st_size < 30_000
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None and [c for c, _ in checkpoint.clients()] == list(range(130))
    assert [float(checkpoint.client(c)["w"].sum()) for c in (4, 5, 129)] == [0, 1000, 0]
    assert checkpoint.client(5)["w"].stride() == own["w"].stride()
    with pytest.raises(SettingsError, match="client 130"):
        checkpoint.client(130)


def test_the_header_names_every_difference(folder: Path) -> None:
    checkpoint, _ = newest(folder)
    check_header(checkpoint, {**dict(reversed(HEADER.items())), "hidden": (3,)}, pytest.fail)
    other = {k: v for k, v in HEADER.items() if k != "clients"} | {"method": "fedper", "seed": 6, "new": 1}
    with refusing("method=fedavg, seed=5, clients=3, new=None", "method=fedper, seed=6, clients=None, new=1"):
        check_header(checkpoint, other, pytest.fail)


def test_a_setting_that_is_newer_than_the_checkpoint_has_its_default(folder: Path) -> None:
    checkpoint, _ = newest(folder)
    check_header(checkpoint, {**HEADER, "settings": {"eval.models": ["personal", "global"]}}, pytest.fail)
    with refusing("eval.models=['global']"):
        check_header(checkpoint, {**HEADER, "settings": {"eval.models": ["global"]}}, pytest.fail)


@pytest.mark.parametrize(("target", "card", "named"), [("table", 0, 1), ("table", 1, 0), ("scikit_learn", 0, 0)])
def test_data_that_are_read_differently_are_named(target: str, card: int, named: int, folder: Path) -> None:
    checkpoint, _ = newest(folder)
    if card:
        (folder.parent / "data_card.json").touch()
    other = {**HEADER, "partition_hash": "def", "settings": {"data._target_": f"pflsim.data.sources.{target}.load"}}
    with pytest.raises(SettingsError) as error:
        check_header(checkpoint, other, pytest.fail)
    assert ("read differently" in str(error.value)) == named


def test_another_version_or_processor_is_a_warning(folder: Path) -> None:
    change = {"torch": "1.0", "pflsim": "0.0", "processor": "Other, AVX2"}
    rewrite(folder / "round_0010", lambda content: content["versions"].update(change))
    checkpoint, _ = newest(folder)
    said: list[str] = []
    check_header(checkpoint, HEADER, said.append)
    named = [next(name for name in change if f"{name} {change[name]}" in line) for line in said]
    assert named == ["pflsim", "torch", "processor"]


COMPONENTS = ["clients_000000.pt", "meta.json", "server.pt"]


def write(folder: Path, number: int, keep: int = 1, score: float | None = None) -> Path:
    clients = [(c, {"w": torch.full((50,), float(number))}) for c in (0, 1)]
    return write_checkpoint(folder, number, {"round": number}, clients, {}, keep, score)


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def found(folder: Path) -> tuple[int, dict[str, int]]:
    """The newest usable checkpoint: which, and the number that was in its server's state; all others are refused."""
    said: list[str] = []
    checkpoint = newest_checkpoint(folder, said.append)
    assert checkpoint is not None and not said
    return checkpoint.round, checkpoint.server()


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("dies", [False, True])
def test_whatever_fails_leaves_a_whole_checkpoint(tmp_path: Path, dies: bool) -> None:
    """At every flush to the disk, rename and removal in turn: the disk is full, or the process dies.

    There are two checkpoints already. `outcomes`: the newest one found afterwards, and whether the call returned.
    """
    outcomes: list[tuple[int, bool]] = []
    for fails_at in itertools.count(1):
        folder = tmp_path / f"{fails_at}"
        write(folder, 1, keep=2)
        write(folder, 2, keep=2)
        with pytest.MonkeyPatch.context() as patch:
            functions = (Path, "mkdir"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")
            calls = FailingCalls(patch, fails_at, Killed() if dies else OSError(errno.ENOSPC, "full"), dies, *functions)
            returned = False
            with suppress(OSError, Killed):
                write(folder, 3, keep=2)
                returned = True
        if not returned and not dies:
            assert visible(folder)[:2] == ["round_0001", "round_0002"]
        newest, server = found(folder)
        assert server == {"round": newest} and newest in (2, 3)
        for name in visible(folder):
            assert sorted(os.listdir(folder / name)) == COMPONENTS
        write(folder, 4, keep=1)
        assert os.listdir(folder) == ["round_0004"]  # writing has cleaned up
        outcomes.append((newest, returned))
        if calls.count < fails_at:
            break
    assert len(outcomes) >= 9 and outcomes[0] == (2, False) and outcomes[-1] == (3, True)
    assert dies or all(newest == 3 for newest, returned in outcomes if returned)


def test_one_of_the_same_round_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        write_checkpoint(tmp_path, 5, {"value": value}, [], {}, 1)
    checkpoint = newest_checkpoint(tmp_path, pytest.fail)
    assert checkpoint is not None and checkpoint.server() == {"value": 2} and os.listdir(tmp_path) == ["round_0005"]


def kept(folder: Path, scores: dict[int, float | None], keep: int) -> list[str]:
    for number, score in scores.items():
        write(folder, number, keep, score)
    return visible(folder)


@pytest.mark.parametrize(
    ("scores", "keep", "expected"),
    [
        ({1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8}, 1, [2, 4]),
        ({1: 0.5, 2: 0.9, 3: 0.9, 4: 0.8}, 1, [2, 4]),  # the earlier of equals
        ({1: 0.5, 2: 0.6, 3: 0.7}, 1, [3]),
        ({1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8}, 2, [2, 3, 4]),
        ({1: None, 2: None, 3: None}, 2, [2, 3]),
        ({1: 0.1, 2: None, 3: None, 4: float("nan")}, 1, [1, 4]),
        ({1: 0.0, 2: None}, 1, [1, 2]),
        ({1: 0.5, 2: 0.4, 3: 0.9, 4: 0.1}, 1, [3, 4]),  # 1 was the best until 3
        ({9999: None, 10000: None}, 0, [10000]),  # the one just written stays
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, scores: dict[int, float | None], keep: int, expected: list[int]
) -> None:
    assert kept(tmp_path, scores, keep) == [f"round_{number:04d}" for number in expected]


def test_checkpoints_of_later_rounds_go_when_a_run_was_resumed_before_them(tmp_path: Path) -> None:
    """They would count as the newest, and the best of them is none of this run's."""
    kept(tmp_path, {5: 0.5, 10: 0.9, 15: 0.8}, keep=3)
    write(tmp_path, 6, keep=1, score=0.4)
    assert visible(tmp_path) == ["round_0005", "round_0006"]
