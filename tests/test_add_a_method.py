"""The example of docs/add-a-method.md, taken from the page and run."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from documents import FENCE, ROOT, files_of, write_files
from run_files import read_state
from safetensors import safe_open
from support import rounds, world

from lightning_modules.base import ClientModule
from lightning_modules.phases import Phase, Schedule
from pflsim import cli
from pflsim.params import BODY, HEAD
from pflsim.servers.fedavg import FedAvg

PAGE = ROOT / "docs" / "add-a-method.md"
EXAMPLE = ("mine/body_prox.py", "mine/configs/method/body_prox.yaml")
BODY_BYTES = (64 * 8 + 8) * 4  # digits have 64 pixels; the body is one layer of 8


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which `mine` is imported."""
    write_files(PAGE, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "mine"]:
        del sys.modules[name]


def run(folder: Path, *arguments: str) -> Path:
    """Two rounds in this process; returns the run folder."""
    small = ["clients=4", "rounds=2", "model.hidden=[8]", "executor=inline", "trace.rounds=[1,2]", "run_dir=run"]
    assert cli.main(["--config-dir", "mine/configs", *small, *arguments]) == 0
    return folder / "run"


def test_the_example_is_short() -> None:
    assert sum(len(files_of(PAGE)[name].splitlines()) for name in EXAMPLE) < 60


@pytest.mark.parametrize("method", ["body_prox", "body_median"])
def test_only_the_body_travels(mine: Path, method: str) -> None:
    folder = run(mine, f"method={method}")
    messages = sorted((folder / "trace").glob("round_*/[du]*.safetensors"))
    assert len(messages) == 2 * 2 * 4
    for path in messages:
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {"weights/net.body.fc1.weight", "weights/net.body.fc1.bias"}
    with (folder / "per_client.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {(int(line["up_bytes"]), int(line["down_bytes"])) for line in lines} == {(BODY_BYTES, BODY_BYTES)}
    assert json.loads((folder / "summary.json").read_text())["complete"]


def test_the_term_is_logged_and_acts(mine: Path) -> None:
    folder = run(mine, "method=body_prox", "method.mu=0")
    heads = [read_state(folder / "checkpoints" / "round_0002", f"client_00{i}")["net.head.weight"] for i in range(4)]
    assert not any(torch.equal(heads[0], head) for head in heads[1:]), "a head is its client's own"
    free = [json.loads(line)["losses"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [losses["prox"] for losses in free] == [0.0, 0.0]
    held = run(mine, "method=body_prox", "method.mu=1", "run_dir=held").with_name("held")
    pulled = [json.loads(line)["losses"] for line in (held / "metrics.jsonl").read_text().splitlines()]
    assert all(a["prox"] > 0 and a["ce"] != b["ce"] for a, b in zip(pulled, free, strict=True))


def test_its_settings_are_checked(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config-dir", "mine/configs", "method=body_prox", "method.mu=-1"]) == 2
    assert "method.mu=-1" in capsys.readouterr().err
    assert not (mine / "runs").exists()


def test_the_schedule_of_the_page() -> None:
    """The head and then the body, each moving alone, with their names before the loss terms."""
    (block,) = [
        dedent(body) for _, _, body in FENCE.findall(PAGE.read_text(encoding="utf-8")) if "def schedule" in body
    ]
    found: dict[str, Any] = {}
    exec(block, {"Schedule": Schedule, "Phase": Phase, "HEAD": HEAD, "BODY": BODY}, found)
    client = type("Phased", (ClientModule,), found)
    made = world(client, FedAvg())
    (report, *_) = rounds(made.inline(), 1, made.clients)
    assert set(report.losses) == {"head/ce", "body/ce"}
    assert report.steps == 6 * 3  # 12 examples in batches of 4: five epochs and one
