"""Digests of runs and data: what changes them, how files are compared, and that actors have those of inline runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tools import references
from benchmarks.tools.references import main, tensor_digest
from ray_actors.resources import ActorPool

TENSOR = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        TENSOR + torch.eye(2, 3) * 1e-7,
        TENSOR.double(),
        TENSOR.view(torch.int32),
        TENSOR.T.contiguous().T,
        TENSOR.reshape(3, 2),
        -0.0 * TENSOR,
    ],
)
def test_what_changes_a_digest(other: torch.Tensor) -> None:
    assert tensor_digest(other) != tensor_digest(TENSOR) == tensor_digest(TENSOR.clone())
    assert tensor_digest(torch.tensor(True)) != tensor_digest(torch.tensor(False))


SAVED = {"a inline default": {"x": "1", "y": "2"}, "a actors default": {"x": "1", "y": "2"}, "data=b": {"x": "3"}}


@pytest.mark.parametrize(
    ("changes", "only", "status"),
    [
        ({}, "*", 0),
        ({"data=c": {"x": "4"}}, "*", 0),
        ({"data=b": {"x": "3", "y": "4"}}, "*", 0),
        ({"data=b": {"x": "4"}}, "*", 1),
        ({"data=b": {}}, "*", 1),
        ({"data=b": {}}, "a", 0),
        ({"a actors default": {"x": "1"}}, "*", 1),
        ({"a actors default": {"x": "1", "y": "3"}}, "*", 1),
        ({"a actors default": {"x": "1", "y": "3"}}, "data=*", 1),
    ],
)
def test_status(changes: Any, only: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is missing or different is an error, also between inline and actors."""
    monkeypatch.setattr(references, "record", lambda only: SAVED | changes)
    (tmp_path / "saved.json").write_text(json.dumps(SAVED))
    out = tmp_path / "out.json"
    assert main([str(out), "--only", only, "--compare", str(tmp_path / "saved.json")]) == status
    assert json.loads(out.read_text()) == SAVED | changes


@pytest.mark.slow
def test_actors_have_the_digests_of_inline_runs(pool: ActorPool, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([str(out), "--only", "fedbn"]) == 0
    found = json.loads(out.read_text())
    assert {name.split()[-1] for name in found} == {*references.KINDS, "resumed"} and len(found) == 8
    assert found["fedbn inline resumed"] == found["fedbn inline default"]
    faults = found["fedbn inline faults"]
    assert {"partition", "state/client/7/net.head.weight", "row 3 7 test newcomer trained"} <= faults.keys()
    assert int(faults["round 2/traffic/up_bytes"]) < int(faults["round 2/traffic/down_bytes"]), "a client drops out"


@pytest.mark.slow
def test_every_data_source_has_digests(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([str(out), "--only", "data=*"]) == 0
    found = json.loads(out.read_text())
    assert {f"data={name}" for name in references.options("data")} <= found.keys()
    assert all({"data/x", "data/y"} <= digests.keys() for digests in found.values())
