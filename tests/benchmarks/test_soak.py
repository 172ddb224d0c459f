"""The soak test: what it kills and when, how it compares runs, and its report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import write_checkpoint

from benchmarks.tools.references import IDENTITY
from benchmarks.tools.soak import DECK, KINDS, Kill, Soak, differences, draw_kills

pytestmark = pytest.mark.slow


def test_kills_are_drawn_from_the_seed_and_of_all_kinds() -> None:
    kills = draw_kills(300, 8, 0)
    assert kills == draw_kills(300, 8, 0) != draw_kills(300, 8, 1)
    assert 25 <= len(kills) <= 55
    assert all(a.after < b.after for a, b in zip(kills, kills[1:], strict=False)) and kills[-1].after < 299
    assert {kill.kind for kill in kills} == set(KINDS) == set(DECK)
    assert [kill.after for kill in draw_kills(6, 1, 0)] == [1, 2, 3, 4]


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


@pytest.fixture
def idle(tmp_path: Path) -> Soak:
    return Soak([], tmp_path, [Kill(1, 0.0, "client", 0.0)], tmp_path / "log", lambda text: None)


@pytest.mark.parametrize(
    ("endings", "resumes"), [([(None, 0)], 0), ([("killed", -9), ("terminated", 143), ("raylet", 1), (None, 0)], 3)]
)
def test_it_goes_on_until_the_run_is_complete(
    endings: list[Any], resumes: int, idle: Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(idle, "_session", lambda arguments: (asked.append(arguments), endings.pop(0))[1])
    idle.run()
    assert idle.tally.resumes == resumes and not endings
    assert all(arguments == [f"resume={idle.folder}"] for arguments in asked[1:])
