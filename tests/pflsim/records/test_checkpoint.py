"""A checkpoint appears whole or not at all, and is read back with weights_only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import read_state, write_checkpoint

from pflsim.records.checkpoint_write import to_containers
from pflsim.records.environment import FORMAT
from pflsim.types import Tensors, Unit


@dataclass(frozen=True)
class State:
    table: dict[int, Tensors]
    units: tuple[Unit, ...]
    rate: float | None
    done: bool


SERVER = State({3: {"w": torch.arange(6.0).view(2, 3)}}, (Unit("a", ("w",)),), None, True)
CLIENTS = [(c, {"w": torch.full((2,), float(c)), "counter": torch.tensor(c)}) for c in (0, 7)]


def write(folder: Path, number: int, clients: Any = CLIENTS, keep: int = 2) -> Path:
    return write_checkpoint(folder, number, SERVER, clients, {"method": "test", "seed": 5}, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoints", 12)
    assert folder == tmp_path / "checkpoints" / "round_0012"
    assert names(folder) == ["client_000.pt", "client_007.pt", "meta.json", "server.pt"]
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["format"], meta["round"], meta["header"]) == (FORMAT, 12, {"method": "test", "seed": 5})
    server = read_state(folder, "server")
    assert torch.equal(server.pop("table")[3]["w"], SERVER.table[3]["w"])
    assert server == {"units": ({"name": "a", "parameters": ("w",), "buffers": ()},), "rate": None, "done": True}
    for client, state in CLIENTS:
        read = read_state(folder, f"client_{client:03d}")
        assert all(torch.equal(read[key], state[key]) and read[key].dtype == state[key].dtype for key in state)


def test_a_failure_leaves_the_last_good_one(tmp_path: Path) -> None:
    """Neither half a folder nor the loss of the one before; and the next one cleans up."""

    def breaking() -> Iterator[tuple[int, Tensors]]:
        yield CLIENTS[0]
        raise RuntimeError("the host died")

    write(tmp_path, 1)
    for number in (1, 2):
        with pytest.raises(RuntimeError, match="the host died"):
            write(tmp_path, number, breaking(), keep=1)
        assert [path.name for path in tmp_path.glob("round_*")] == ["round_0001"]
        assert read_state(tmp_path / "round_0001", "client_007")["counter"] == 7
    write(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["round_0003"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (8, 9, 10, 10, 11):
        write(tmp_path, number, keep=2)
    assert names(tmp_path) == ["round_0010", "round_0011"]
    for number in (9999, 10000):  # one digit more sorts first as text
        write(tmp_path, number, keep=1)
    assert names(tmp_path) == ["round_10000"]
    write(tmp_path, 10001, keep=0)  # the one just written stays
    assert names(tmp_path) == ["round_10001"]


def test_views_do_not_save_their_base(tmp_path: Path) -> None:
    base = torch.zeros(100_000)
    diagnostics = {"slice": base[:2], "spread": base[:1].expand(3), "turned": base[:6].view(2, 3).T, "scalar": base[0]}
    saved = to_containers(diagnostics)
    assert all(saved[name].untyped_storage().nbytes() == 4 * diagnostics[name].numel() for name in diagnostics)
    folder = write(tmp_path, 1, [(0, diagnostics)])
    assert (folder / "client_000.pt").stat().st_size < 10_000


def test_containers_are_copies(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    saved = to_containers((weight,))
    with torch.no_grad():
        weight.zero_()
    assert saved[0].tolist() == [1, 1] and not saved[0].requires_grad and type(saved[0]) is torch.Tensor


def test_numpy_floats_become_plain_ones(tmp_path: Path) -> None:
    """A NumPy float is a Python float, but weights_only refuses to read it."""
    folder = write(tmp_path, 1, [(0, {"loss": np.float64(0.5), "on": True})])
    assert read_state(folder, "client_000") == {"loss": 0.5, "on": True}


@pytest.mark.parametrize("value", [{1, 2}, np.zeros(2), object(), torch.Generator(), Unit, b"bytes", {np.int64(1): 2}])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="Generator|object|set|ndarray|type|bytes|int64"):
        to_containers({"state": [value]})
