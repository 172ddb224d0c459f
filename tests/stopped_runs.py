"""Short runs that are stopped and resumed, and all that such runs leave."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import read_state
from support import events
from tensorboard.summary.writer import event_file_writer

from pflsim.records.predictions import PREDICTIONS
from ray_actors import run

SMALL = ["data=digits", "clients=5", "rounds=4", "fraction=0.6", "model.hidden=[8]", "executor=inline", "lr=0.05",
         "eval.holdout_clients=1", "checkpoint.every=3", "init=per_client", "tracking.predictions=true"]  # fmt: skip


def stop_after(round_number: int, monkeypatch: pytest.MonkeyPatch, signum: int = signal.SIGINT) -> None:
    """Send this process a signal while a round is being written down, once."""
    signal.signal(signum, signal.default_int_handler)  # which a background job would ignore
    real, sent = run._Listener.round, []

    def listener(self: Any, record: Any) -> None:
        if record.round == round_number and not sent:
            sent.append(signum)
            os.kill(os.getpid(), signum)
        real(self, record)

    monkeypatch.setattr(run._Listener, "round", listener)
    # TensorBoard sorts files of the same second by a counter, as text: 10 before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))


def left(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = sorted((folder / "checkpoints").iterdir())
    kept = saved if "best: true" in (folder / "config.yaml").read_text() else saved[-1:]  # a stop may leave one more
    shown = events(folder)
    tags = sorted(tag for tag in shown.Tags()["scalars"] if not tag.startswith(("seconds", "memory")))
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "metrics": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
        "per_client": (folder / "per_client.csv").read_text(),
        "curves": {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in tags},
        "states": {f"{at.name} {p.stem}": read_state(at, p.stem) for at in kept for p in sorted(at.glob("*.pt"))},
        "predictions": predictions.read_bytes() if (predictions := folder / PREDICTIONS).exists() else b"",
        "summary": {k: v for k, v in summary.items() if k not in ("seconds", "peak_rss_mb", "resumed_after")},
    }  # fmt: skip


def unchanged(refused: Callable[..., str], folder: Path, *more: str) -> str:
    """What is said when a folder is refused to be resumed, in which nothing is changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.log"}
    said = refused(f"resume={folder}", *more)
    assert before == {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.log"
    }
    return said
