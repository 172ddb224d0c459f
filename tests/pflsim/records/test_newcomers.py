"""What is written and printed of newcomers, and that nothing is where there are none."""

import csv
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pflsim.records.summary import RunMeta
from pflsim.records.tracker import Tracker
from pflsim.types import EvalPhase, EvalRow, NewcomerRecord, RoundRecord, TrainReport

META = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 6, 1, 0, newcomers=2, finetune_epochs=3)


def rows(phase: EvalPhase, *correct: int) -> tuple[EvalRow, ...]:
    """Clients 4 and 5 with 10 and 20 test examples, and as many for validation, all of them wrong."""
    found = [EvalRow(4 + i, "test", "personal", phase, c, 10 * (i + 1), 2.0) for i, c in enumerate(correct)]
    return (*found, *(replace(row, split="val", correct=0) for row in found))


JOINED = NewcomerRecord(1, {4: 100, 5: 50}, rows("received", 1, 8), rows("trained", 8, 18))
ROUND = RoundRecord(
    1,
    (0, 1),
    (TrainReport(0, 5, 1, {"ce": 1.0}, 7), TrainReport(1, 5, 1, {"ce": 1.0}, 7)),
    {0: 9, 1: 9},
    tuple(EvalRow(c, "test", "personal", "trained", 5, 10, 1.0) for c in range(4)),
    {"train": 1.0},
)


def track(folder: Path, meta: RunMeta, joined: NewcomerRecord | None) -> dict[str, Any]:
    with closing(Tracker(folder, meta)) as tracker:
        tracker.round(ROUND)
        if joined is not None:
            tracker.newcomers(joined)
    return json.loads((folder / "summary.json").read_text())


def test_files(tmp_path: Path) -> None:
    """A section of the summary, marked lines in per_client.csv, curves; all other figures as without newcomers."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    found, other = track(tmp_path / "with", META, JOINED), track(tmp_path / "without", replace(META, newcomers=0), None)
    section = found.pop("newcomers")
    assert "newcomers" not in other
    for summary in (found, other):
        del summary["seconds"], summary["peak_rss_mb"]
    assert found == other
    assert (section["clients"], section["finetune_epochs"], section["down_bytes"]) == (2, 3, 150)
    received, trained = section["received"], section["trained"]
    assert (received["clients"], received["mean"], received["weighted_mean"]) == (2, 0.25, 9 / 30)
    assert (trained["mean"], trained["worst_decile"]) == (pytest.approx(np.mean([0.8, 0.9])), 0.8)

    before = (tmp_path / "without" / "per_client.csv").read_text()
    after = (tmp_path / "with" / "per_client.csv").read_text()
    assert after.startswith(before)
    added = list(csv.reader(after[len(before) :].splitlines()))
    assert [row[:5] for row in added] == [
        ["1", client, split, "newcomer", phase]
        for client in ("4", "5")
        for split in ("test", "val")
        for phase in ("received", "trained")
    ]
    assert added[0][5:] == ["1", "10", "2.0", "0", "100", ""] and added[5][5:] == ["18", "20", "2.0", "0", "50", ""]
