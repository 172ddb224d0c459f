"""Early stopping: the round is recomputed from a run that does not stop, and a stopped run equals a shorter one."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stopped_runs import left, stop_after
from support import agree

from pflsim import cli
from pflsim.records.history import stalled_since

SETTINGS = ["method=fedrep", "data=digits", "clients=5", "fraction=0.6", "model.hidden=[8]", "executor=inline",
            "lr=0.3", "lr_decay=0.99", "eval.holdout_clients=1", "eval.every=2", "checkpoint.every=3"]  # fmt: skip


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 5))
def test_a_run_stalls_if_so_many_scores_in_sequence_are_not_above_all_before(scores: list[int], patience: int) -> None:
    windows = range(1, len(scores) - patience + 1)
    ends = [n for n in windows if max(scores[n : n + patience]) <= max(scores[:n])]
    expected = scores.index(max(scores[: ends[0]])) if ends else None
    assert stalled_since(dict(enumerate(scores)), patience) == expected
    assert stalled_since(dict(enumerate(scores)), None) is None


def start(folder: Path, *more: str, status: int = 0) -> Path:
    assert cli.main([*SETTINGS, *more, f"run_dir={folder}"]) == status
    return folder


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def scores(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {x["round"]: x["accuracy"]["personal"]["val"]["trained"]["mean"] for x in lines if x["accuracy"]}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stops early."""
    return start(tmp_path_factory.mktemp("stopped") / "run", "rounds=24", "stop.patience=3")


@pytest.mark.slow
def test_a_run_stops_and_ends_like_a_shorter_one(stopped: Path, tmp_path: Path) -> None:
    """New clients included."""
    seen = scores(start(tmp_path / "long", "rounds=24"))
    rounds = sorted(seen)
    best_until = {t: max((s for s in rounds if s <= t), key=lambda s: (seen[s], -s)) for t in rounds}
    last = next(t for t in rounds if rounds.index(t) - rounds.index(best_until[t]) == 3)
    assert 8 < last < 24
    shorter = start(tmp_path / "shorter", f"rounds={last}")
    found, expected = left(stopped), left(shorter)
    for part in ("per_client", "states", "curves"):
        agree(found[part], expected[part])
    why = summary(stopped)["stopped_early"]
    assert why["round"] == last and f"round {best_until[last]} " in why["reason"]
    assert (stopped / "checkpoints" / f"round_{last:04d}").is_dir()
    assert summary(stopped)["complete"] is True and summary(stopped)["rounds"] == last
    assert "stopped_early" not in summary(shorter)


@pytest.mark.slow
def test_a_resumed_run_stops_in_the_same_round(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of the three evaluations without a better accuracy are those of the first session."""
    why = summary(stopped)["stopped_early"]
    stop_after(why["round"] - 1, monkeypatch)
    folder = start(tmp_path / "run", "rounds=24", "stop.patience=3", status=128 + signal.SIGINT)
    assert cli.main([f"resume={folder}"]) == 0 and why["reason"] in capsys.readouterr().out
    agree(left(folder), left(stopped))


@pytest.mark.slow
def test_a_stopped_run_continues_with_a_larger_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    folder = start(tmp_path / "run", "rounds=24", "stop.patience=2")
    last = summary(folder)["stopped_early"]["round"]
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert cli.main([f"resume={folder}"]) == 0
    assert f"round {last}" in capsys.readouterr().out
    assert "stop.patience" in refused(f"resume={folder}", "rounds=30")
    assert "stop.patience=1" in refused(f"resume={folder}", "stop.patience=1")
    assert before == {path: path.read_bytes() for path in before}
    assert cli.main([f"resume={folder}", "stop.patience=null", "rounds=26"]) == 0
    agree(left(folder), left(start(tmp_path / "straight", "rounds=26")))


def test_early_stopping_needs_validation_examples(refused: Callable[..., str]) -> None:
    said = refused("executor=inline", "stop.patience=2", "split.validation=0")
    assert "stop.patience=2 needs validation examples" in said
