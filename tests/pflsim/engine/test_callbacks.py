"""Callbacks of `pflsim.run` and `pflsim.resume`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from stopped_runs import left
from support import agree

import pflsim
from pflsim.engine.callbacks import RoundResult
from pflsim.errors import RunError, SettingsError

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "method": "fedavg", "executor": "inline", "clients": 3, "rounds": 4, "batch_size": 50, "progress": "none",
    "model": "mlp", "eval": {"every": 2}, "overrides": ["model.hidden=[4]"],
}  # fmt: skip


class Seen:
    """Keeps what it is called with, under its name."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    def on_round(self, result: RoundResult) -> None:
        self.calls.append((self.name, "round", result))

    def on_evaluate(self, result: RoundResult) -> None:
        self.calls.append((self.name, "evaluate", result))

    def on_end(self, run: Any) -> None:
        self.calls.append((self.name, "end", run))


def test_called_in_order_with_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that changes the working directory changes no path of the run."""
    calls = list[Any]()
    monkeypatch.chdir(tmp_path)
    elsewhere = lambda result: os.chdir("/")  # noqa: E731
    run = pflsim.run(run_dir="run", callbacks=[elsewhere, Seen("a", calls), Seen("b", calls)], **SMALL)
    events = [(name, what, getattr(found, "round", None)) for name, what, found in calls]
    each = [(w, t) for t in (1, 2, 3, 4) for w in (["evaluate", "round"] if t % 2 == 0 else ["round"])]
    assert events == [(name, *event) for event in [*each, ("end", None)] for name in "ab"]
    assert calls[-1][2].accuracy == run.accuracy
    frame = run.metrics()
    for result in (found for name, what, found in calls if (name, what) == ("a", "round")):
        line = frame[frame["round"] == result.round].iloc[0]
        assert (result.losses["ce"], result.seconds) == (line["losses.ce"], line["seconds.total"])
        traffic = result.bytes.up_bytes, result.bytes.down_bytes
        assert traffic == (line["traffic.up_bytes"], line["traffic.down_bytes"])
    assert len(calls[2][2].rows) == len(run.per_client().query("round == 2"))


@pytest.mark.parametrize(("at", "stop"), [(2, {}), (3, {"stop": {"patience": 9}})])
def test_stop_ends_the_run_as_early_stopping_does(tmp_path: Path, at: int, stop: dict[str, Any]) -> None:
    """Complete, with a checkpoint of the round; `rounds` continues it."""
    callback = lambda result: "stop" if result.round == at else None  # noqa: E731
    stopped = pflsim.run(run_dir=tmp_path / "run", callbacks=[callback], **SMALL, **stop)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert stopped.complete and (stopped.done, summary["stopped_early"]["round"]) == (at, at)
    assert len(list((tmp_path / "run" / "checkpoints").glob(f"round_*{at}"))) == 1
    pflsim.resume(stopped, callbacks=[lambda result: pytest.fail("it is complete")])
    seen = list[int]()
    for rounds in (4, 5):  # those of the run, and more
        longer = pflsim.resume(stopped, rounds=rounds, callbacks=[lambda result: seen.append(result.round)])
        assert longer.complete and seen == list(range(at + 1, rounds + 1))
    with pytest.raises(SettingsError, match="method defines the run"):
        pflsim.resume(stopped, rounds=6, method="local")


def test_an_error_ends_the_run_and_its_states_are_saved(tmp_path: Path) -> None:
    def fail(result: RoundResult) -> None:
        if result.round == 3:
            raise ZeroDivisionError("of the user")

    with pytest.raises(RunError, match="fail.*round 3.*ZeroDivisionError"):
        pflsim.run(run_dir=tmp_path / "run", callbacks=[fail], **SMALL)
    pflsim.resume(tmp_path / "run")
    pflsim.run(run_dir=tmp_path / "straight", **SMALL)
    agree(left(tmp_path / "run"), left(tmp_path / "straight"))


@pytest.mark.parametrize("wrong", [[3], [Seen], [object()]])
def test_what_is_no_callback_is_refused_before_the_run(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(SettingsError, match="callbacks"):
        pflsim.run(run_dir=tmp_path / "run", callbacks=wrong, **SMALL)
    assert not (tmp_path / "run").exists()
