"""The random configurations: their models, and runs that a signal or the time limit ends."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tools import fuzz
from pflsim.config.compose import CONFIGS


def test_every_built_in_model_is_drawn() -> None:
    drawn = {each.split()[0] for kind in fuzz.DATA for each in fuzz.models(kind)}
    assert drawn == {path.stem for path in (CONFIGS / "model").glob("*.yaml")} - {"hf"} and {*fuzz.WIDTHS} <= drawn


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: time.sleep(60), "hung"),
        (lambda: None, "ran"),
    ],
    ids=["signal", "hung", "ran"],
)
def test_a_run_that_dies_or_hangs_is_counted(run: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "outcome", lambda words, folder: (run(), ("ran", "x" * 2000))[1])
    assert fuzz.in_child([], Path(), 0.5) == (kind, "x" * 1500 if kind == "ran" else "")
