"""Only what is exactly as it was written is read; a checkpoint that is left out is named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import write_checkpoint

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


def test_more_than_999_clients_and_9999_rounds(tmp_path: Path) -> None:
    clients = [(c, {}) for c in (2, 999, 1000, 12345)]
    write_checkpoint(tmp_path, 9999, {}, [], {}, 3)
    write_checkpoint(tmp_path, 10000, {}, clients, {}, 3)
    checkpoint, said = newest(tmp_path)
    assert checkpoint is not None and (checkpoint.round, said) == (10000, [])
    assert [c for c, _ in checkpoint.clients()] == [2, 999, 1000, 12345]


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
    with pytest.raises(SettingsError) as raised:
        check_header(checkpoint, other, pytest.fail)
    for side in ("method=fedavg, seed=5, clients=3, new=None", "method=fedper, seed=6, clients=None, new=1"):
        assert side in str(raised.value)


def test_another_version_or_processor_is_a_warning(folder: Path) -> None:
    change = {"torch": "1.0", "pflsim": "0.0", "processor": "Other, AVX2"}
    rewrite(folder / "round_0010", lambda content: content["versions"].update(change))
    checkpoint, _ = newest(folder)
    said: list[str] = []
    check_header(checkpoint, HEADER, said.append)
    assert [next(name for name in change if f"{name} {change[name]}" in line) for line in said] == [
        "pflsim", "torch", "processor",
    ]  # fmt: skip
