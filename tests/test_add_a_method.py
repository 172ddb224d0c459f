"""The example of docs/add-a-method.md, taken from the page and run."""

import csv
import json
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from documents import FENCE, ROOT
from run_files import read_state
from safetensors import safe_open
from support import rounds, trained_states, world

from lightning_modules.base import ClientModule
from lightning_modules.training import Training
from pflsim import cli
from pflsim.engine.execution import TrainTask
from pflsim.servers.fedavg import FedAvg

PAGE = ROOT / "docs" / "add-a-method.md"
BODY_BYTES = (64 * 8 + 8) * 4  # digits have 64 pixels; the body is one layer of 8


def run(folder: Path, *arguments: str) -> Path:
    """Two rounds in this process; returns the run folder."""
    small = ["clients=4", "rounds=2", "model.hidden=[8]", "executor=inline", "trace.rounds=[1,2]", "run_dir=run"]
    assert cli.main(["--config-dir", "mine/configs", *small, *arguments]) == 0
    return folder / "run"


@pytest.mark.parametrize("server", ["pflsim.servers.fedavg.FedAvg", "mine.median.Median"])
def test_only_the_body_travels(mine: Path, server: str) -> None:
    folder = run(mine, "method=body_prox", f"method.server._target_={server}")
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


def test_a_term_is_added_to_one_phase_of_a_method(mine: Path) -> None:
    folder = run(mine, "method=mine.small_features.SmallFeatures", "method.head_epochs=1")
    losses = [json.loads(line)["losses"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all({*terms} == {"head/ce", "body/ce", "body/size"} and terms["body/size"] > 0 for terms in losses)
    assert "warnings" not in json.loads((folder / "summary.json").read_text())


def client_of(method: str) -> type[ClientModule]:
    """A client with a method that the page shows alone, after its imports."""
    blocks = [dedent(body) for _, _, body in FENCE.findall(PAGE.read_text(encoding="utf-8"))]
    (block,) = [body for body in blocks if f"\ndef {method}" in body]
    imports, _, body = block.partition("\ndef ")
    space: dict[str, Any] = {"ClientModule": ClientModule}
    exec(f"{imports}\nclass Client(ClientModule):\n{indent(f'def {body}', '    ')}", space)
    return space["Client"]


def test_the_schedule_of_the_page() -> None:
    """The head and then the body, each moving alone, with their names before the loss terms."""
    client = client_of("schedule")
    made = world(client, FedAvg())
    (report, *_) = rounds(made.inline(), 1, made.clients)
    assert set(report.losses) == {"head/ce", "body/ce"}
    assert report.steps == 6 * 3  # 12 examples in batches of 4: five epochs and one


def test_the_optimiser_of_the_page() -> None:
    """Adam moves every weight by the learning rate in its first step."""
    client = client_of("make_step")
    made = world(client, FedAvg(), training=Training(lr=0.1, batch_size=4, local_steps=1))
    before, module = made.federation.initial, made.inline()
    module.run(TrainTask(1), sent := module.send([0]))
    after = trained_states(module, module.run(TrainTask(1), sent))[0]["net.head.bias"]
    torch.testing.assert_close((after - before["net.head.bias"]).abs(), torch.full((3,), 0.1), rtol=1e-4, atol=0)
