"""The soak test: what it kills and when, how it compares runs, and its report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import write_checkpoint

from benchmarks.tools.references import IDENTITY
from benchmarks.tools.soak import differences

pytestmark = pytest.mark.slow


def folder(path: Path, seconds: float = 1.0, state: float = 1.0, correct: int = 0, up: int = 1) -> Path:
    path.mkdir()
    line = {"round": 1, "seconds": {"train": seconds}, "losses": {"ce": 1.0}, "traffic": {"up_bytes": up}}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (path / "partition.json").write_text('{"hash": ""}')
    (path / "per_client.csv").write_text(f"{','.join(IDENTITY)},correct\n1,0,test,personal,trained,{correct}\n")
    write_checkpoint(
        path / "checkpoints", 1, {"w": torch.tensor([0.0])}, [(0, {"v": torch.tensor([state])})], {}, keep=9
    )
    return path


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"seconds": 2.0}, []),
        ({"state": 1.0 + 2**-23}, ["state/client/0/v"]),
        ({"correct": 1}, ["row 1 0 test personal trained"]),
        ({"up": 2}, ["round 1/traffic/up_bytes"]),
    ],
)
def test_differences(other: dict[str, Any], found: list[str], tmp_path: Path) -> None:
    assert differences(folder(tmp_path / "a"), folder(tmp_path / "b", **other)) == found
