"""Matrices on the disk and in TensorBoard."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_files import read_message, read_server
from safetensors.numpy import load_file

from pflsim.messages import Prototypes, Uplink
from pflsim.records import tensorboard
from pflsim.records.evaluation import Scope
from pflsim.records.tensorboard import SHARE, TensorBoard
from pflsim.records.trace import RoundMatrices, read_matrices, write_matrices, write_trace
from pflsim.types import Axis, Matrix, RoundRecord

Bounds = tuple[float, float] | None


def matrix(name: str = "alpha/conv", size: tuple[int, int] = (4, 4), bounds: Bounds = None) -> Matrix:
    values = np.random.default_rng(0).random(size).astype(np.float32)
    values[0, 1] = np.nan
    return Matrix(name, "Weights α", Axis("receiver"), Axis("sender", tuple(map(str, range(size[1])))), values, bounds)


def test_matrices_come_back_as_they_were(tmp_path: Path) -> None:
    written = RoundMatrices(7, (matrix(), matrix("psi", (2, 3), (0.0, 1.0))))
    write_matrices(tmp_path, written)
    found = read_matrices(tmp_path)
    assert found.round == 7
    for before, after in zip(written.matrices, found.matrices, strict=True):
        np.testing.assert_array_equal(before.values, after.values)
        one, other = ((m.name, m.title, m.rows, m.columns, m.bounds) for m in (before, after))
        assert one == other


def board(folder: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[str, object, int], None]) -> TensorBoard:
    made = TensorBoard(folder, Scope("personal", "test", "trained"))
    monkeypatch.setattr(made._writer, "add_figure", put)
    return made


def diagnosed(number: int) -> RoundRecord:
    return RoundRecord(number, (), (), {}, (), {}, diagnostics=(matrix(),))


def test_drawing_takes_its_share_of_the_time_and_the_last_round_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that every picture moves by 1 s; 20 s pass between two rounds."""
    now, drawn = [0.0], []
    monkeypatch.setattr(tensorboard, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def put(kind: str, figure: object, round_number: int) -> None:
        now[0] += 1.0
        drawn.append((round_number, now[0]))

    shown = board(tmp_path, monkeypatch, put)
    for number in range(1, 20):
        shown.write(diagnosed(number), {})
        now[0] += 20.0
    assert [at for at, _ in drawn] == [3, 8, 13, 18]
    assert all(number <= SHARE * at + 1 for number, (_, at) in enumerate(drawn, start=1))
    shown.close()
    assert [at for at, _ in drawn] == [3, 8, 13, 18, 19]


def test_a_picture_that_cannot_be_drawn_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put(kind: str, figure: object, round_number: int) -> None:
        raise ValueError("no such font")

    shown = board(tmp_path, monkeypatch, put)
    shown.write(diagnosed(4), {})
    shown.close()
    assert "round 4" in caplog.text and "no such font" in caplog.text


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])["__metadata__"]


def full_message():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    means, counts = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 2, 0, 4])
    return Uplink(
        weights={"net.body.0.weight": base.T, "net.body.0.bias": base[0], "shared": base, "steps": torch.tensor(3)},
        prototypes=Prototypes(means, counts),
        extra={"psi/layer.0": torch.tensor(0.5, dtype=torch.float64), "none": torch.zeros(0, 3)},
        numbers={"loss": 0.1, "count": 7},
        client=3,
        num_examples=41,
    )  # fmt: skip


def test_an_uplink_comes_back_with_the_documented_names(tmp_path):
    sent = full_message()
    path = write_trace(tmp_path, 1, "up_003", sent, {"method": "pfedcfr", "client": 3, "num_examples": 41})
    assert path == tmp_path / "trace" / "round_0001" / "up_003.safetensors"
    back = read_message(path)
    assert (back.client, back.num_examples, back.numbers) == (3, 41, {"loss": 0.1, "count": 7.0})
    for section in ("weights", "extra"):
        ours, theirs = getattr(sent, section), getattr(back, section)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    assert torch.equal(back.prototypes.means, sent.prototypes.means)
    assert torch.equal(back.prototypes.counts, sent.prototypes.counts)
    assert header(path) == {"method": "pfedcfr", "round": "1", "client": "3", "num_examples": "41"}
    arrays = load_file(path)
    assert set(arrays) == {
        *("weights/net.body.0.weight", "weights/net.body.0.bias", "weights/shared", "weights/steps"),
        *("prototypes/means", "prototypes/counts", "extra/psi/layer.0", "extra/none", "numbers/loss", "numbers/count"),
    }
    assert arrays["numbers/loss"].shape == () and arrays["numbers/loss"].dtype == np.float64


def test_the_servers_numbers_keep_their_names_and_texts(tmp_path):
    zeta = torch.rand(3, 3, requires_grad=True)
    path = write_trace(tmp_path, 2, "server", {"zeta/net.body.0": zeta.T}, {"units": "net.body.0,net.head"})
    assert path.name == "server.safetensors"
    tensors, texts = read_server(path)
    assert torch.equal(tensors["zeta/net.body.0"], zeta.detach().T)
    assert texts == {"round": "2", "units": "net.body.0,net.head"}
