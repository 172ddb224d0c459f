"""A stopped and resumed run equals an uninterrupted one to the bit; every method is in tests/test_contract.py."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from stopped_runs import SMALL, left, stop_after, unchanged
from support import KINDS, agree, slow_except

from pflsim import cli
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import read_run
from ray_actors import run


def interrupt_twice(*_: Any) -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


KEPT = "fedrep optimizer=adam optimizer.keep=true lr_schedule=cosine lr=0.01 shift=noise"
BEST = "fedavg checkpoint.best=true checkpoint.keep=1 lr=1.0"
"""The first round is the best, and stays the only one beside the last."""
METRICS = "fedrep eval.metrics=[macro_f1,balanced_accuracy,nll,ece] tracking.per_client=true"


@pytest.mark.parametrize("method", slow_except(["fedfcd"], [*KINDS, KEPT, BEST, METRICS, "fedyogi"]))
def test_stopped_and_resumed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = method.split()
    settings = [f"method={name}", *SMALL, *more]
    assert cli.main([*settings, f"run_dir={tmp_path / 'straight'}"]) == 0
    stop_after(2, monkeypatch)
    assert cli.main([*settings, f"run_dir={tmp_path / 'stopped'}"]) == 128 + signal.SIGINT
    assert f"resume={tmp_path / 'stopped'}" in capsys.readouterr().out
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["complete"] is False
    part = tmp_path / "stopped" / "checkpoints" / ".round_0002.part"  # of a process that was killed as it wrote
    shutil.copytree(part.with_name("round_0002"), part)
    with monkeypatch.context() as patch:
        patch.setattr(run, "prepare", interrupt_twice)
        assert cli.main([f"resume={tmp_path / 'stopped'}"]) == 128 + signal.SIGINT
    assert cli.main([f"resume={tmp_path / 'stopped'}"]) == 0 and not part.exists()
    agree(left(tmp_path / "stopped"), left(tmp_path / "straight"))
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["resumed_after"] == [2]
    assert method != BEST or {path.name for path in part.parent.iterdir()} == {"round_0001", "round_0004"}


@pytest.mark.parametrize("method", slow_except(["fedfomo"], ["fedavg", "fedfomo", "l2gd", "r_pfedpm"]))
def test_extended(method: str, tmp_path: Path) -> None:
    """After its end, newcomers included, and a second time, with faults and a decaying learning rate."""
    settings = [f"method={method}", *SMALL, "lr_decay=0.9", "faults.straggler=0.3"]
    assert cli.main([*settings, "rounds=5", f"run_dir={tmp_path / 'straight'}"]) == 0
    folder = tmp_path / "extended"
    assert cli.main([*settings, "rounds=2", f"run_dir={folder}"]) == 0
    for rounds in (3, 5):
        assert cli.main([f"resume={folder}", f"rounds={rounds}"]) == 0
    agree(left(folder), left(tmp_path / "straight"))
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in (folder, tmp_path / "straight")]
    assert configs[0] == {**configs[1], "run_dir": str(folder)} and configs[0]["rounds"] == 5


def test_a_method_that_depends_on_the_rounds_is_not_extended(tmp_path: Path, refused: Callable[..., str]) -> None:
    """APPLE's pull lasts half of the rounds, unless there is none."""
    words = ["method=apple", "method.pull_rounds=0.5", *SMALL, "rounds=2"]
    assert cli.main([*words, f"run_dir={tmp_path / 'pull'}"]) == 0
    assert "apple" in unchanged(refused, tmp_path / "pull", "rounds=4")
    assert cli.main([*words, "method.mu=0", f"run_dir={tmp_path / 'none'}"]) == 0
    assert cli.main([f"resume={tmp_path / 'none'}", "rounds=4"]) == 0


@pytest.mark.parametrize("split", slow_except(["merged"], ["merged", "counts split.train=40 split.test=20"]))
def test_a_run_from_before_a_setting_goes_on_as_it_began(split: str, tmp_path: Path) -> None:
    """Test rows were stratified before `split.stratify` existed."""
    settings = ["method=fedavg", *SMALL, *f"split={split} split.stratify=true".split()]
    for name, rounds in {"straight": 3, "old": 2}.items():
        assert cli.main([*settings, f"rounds={rounds}", f"run_dir={tmp_path / name}"]) == 0
    folder = tmp_path / "old"
    (meta,) = folder.rglob("meta.json")
    config, header = (yaml.safe_load(file.read_text()) for file in (folder / "config.yaml", meta))
    assert config["split"].pop("stratify") and header["header"]["settings"].pop("split.stratify")
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    meta.write_text(json.dumps(header))
    assert cli.main([f"resume={folder}", "rounds=3"]) == 0
    agree(left(folder), left(tmp_path / "straight"))
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"rounds": 3}, sort_keys=False))
    (group,) = group_runs(map(read_run, (folder, tmp_path / "straight")))
    assert len(group.left_out) == 1


@pytest.mark.slow
def test_a_stopped_run_is_extended_on_resume_and_again_without_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extension is stopped before its first own checkpoint; `resume=` alone continues it."""
    settings = ["method=fedavg", *SMALL]
    assert cli.main([*settings, "rounds=5", f"run_dir={tmp_path / 'straight'}"]) == 0
    stop_after(1, monkeypatch)
    folder = tmp_path / "stopped"
    assert cli.main([*settings, "rounds=3", f"run_dir={folder}"]) == 130
    with monkeypatch.context() as patch:
        patch.setattr(run.Runner, "_run_session", lambda *_: None)
        assert cli.main([f"resume={folder}", "rounds=5"]) == 0
    assert cli.main([f"resume={folder}"]) == 0
    agree(left(folder), left(tmp_path / "straight"))
    capsys.readouterr()
    assert cli.main([f"resume={folder}"]) == 0 and "all of its 5 rounds are done" in capsys.readouterr().out


@pytest.mark.slow
def test_extensions_that_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    """FedALP's warm-up is a fraction of the rounds; 2 and 3 rounds have the same one. So is Floco's."""
    folder = tmp_path / "run"
    assert cli.main(["method=fedalp", *SMALL, "method.warmup=0.4", "rounds=2", f"run_dir={folder}"]) == 0
    assert cli.main([f"resume={folder}", "rounds=3"]) == 0
    assert "fedalp" in (said := unchanged(refused, folder, "rounds=9")) and "warmup" in said
    assert "3 rounds are done" in unchanged(refused, folder, "rounds=2")
    shutil.rmtree(folder)
    assert cli.main(["method=floco", *SMALL, "rounds=2", f"run_dir={folder}"]) == 0
    assert "participants of round 2" in unchanged(refused, folder, "rounds=9")
    shutil.rmtree(folder)
    assert cli.main(["method=fedphp", *SMALL, "rounds=2", f"run_dir={folder}"]) == 0
    assert "fedphp" in unchanged(refused, folder, "rounds=9")
    shutil.rmtree(folder)
    assert cli.main(["method=fedavg", *SMALL, "lr_schedule=cosine", "rounds=2", f"run_dir={folder}"]) == 0
    assert "lr_schedule=cosine" in unchanged(refused, folder, "rounds=9")
    shutil.rmtree(folder / "checkpoints")
    assert "no usable checkpoint" in unchanged(refused, folder, "rounds=9")
