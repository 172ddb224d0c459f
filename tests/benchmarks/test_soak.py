"""The soak test: what it kills and when, how it compares runs, and its report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import write_checkpoint

from benchmarks import soak
from benchmarks.soak import DECK, KINDS, Kill, Soak, Tally, differences, draw_kills, put, report

pytestmark = pytest.mark.slow


def test_kills_are_drawn_from_the_seed_and_of_all_kinds() -> None:
    kills = draw_kills(300, 8, 0)
    assert kills == draw_kills(300, 8, 0) != draw_kills(300, 8, 1)
    assert 25 <= len(kills) <= 55
    assert all(a.after < b.after for a, b in zip(kills, kills[1:], strict=False)) and kills[-1].after < 299
    assert {kill.kind for kill in kills} == set(KINDS) == set(DECK)
    assert [kill.after for kill in draw_kills(6, 1, 0)] == [1, 2, 3, 4]


def folder(path: Path, seconds: float, state: float, row: str = "1,0\n") -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text(json.dumps({"round": 1, "seconds": {"train": seconds}}) + "\n")
    (path / "per_client.csv").write_text(row)
    write_checkpoint(
        path / "checkpoints", 1, {"w": torch.tensor([0.0])}, [(0, {"v": torch.tensor([state])})], {}, keep=9
    )
    return path


def test_differences(tmp_path: Path) -> None:
    straight = folder(tmp_path / "a", 1.0, 1.0)
    assert differences(straight, folder(tmp_path / "b", 2.0, 1.0)) == []
    assert differences(straight, folder(tmp_path / "c", 1.0, 1.0 + 2**-23)) == ["clients_000000"]
    assert differences(straight, folder(tmp_path / "d", 1.0, 1.0, "1,1\n")) == ["per_client.csv"]
    other = folder(tmp_path / "e", 1.0, 1.0)
    (other / "metrics.jsonl").write_text('{"round": 2}\n')
    assert differences(straight, other) == ["metrics.jsonl"]
    write_checkpoint(other / "checkpoints", 2, {}, [], {}, keep=9)
    assert differences(straight, other) == ["metrics.jsonl", "checkpoints"]


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


def test_the_result_and_its_place() -> None:
    tally = Tally(killed=3, resumes=1)
    tally.kills.update(client=2, killed=1)
    tally.lost.update(client=12.0, killed=20.0)
    made = report("make soak", {"commit": "0123456789", "dirty": True}, 300, 2, 0.5, tally, [])
    for part in ("0123456 and changes", "equal to the bit", "| a client actor | 2 | 12 | 6.0 |", "| all | 3 | 32 |"):
        assert part in made
    assert "**different**: server" in report("", {"commit": "0", "dirty": False}, 1, 0, 0.0, tally, ["server"])
    page = soak.PAGE.read_text(encoding="utf-8")
    assert f"\n{made}\n" in put(page, made) and put(put(page, "x"), made) == put(page, made)
    with pytest.raises(ValueError, match="once each"):
        put("no place", made)
