"""Lightning's loggers in a run: CSV always, Weights & Biases (offline) and MLflow (local files) where installed."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_modules.loggers import logger_makers
from pflsim import cli
from pflsim.records.history import read_history
from pflsim.records.scalars import Loggers

RUN = ("executor=inline", "clients=3", "rounds=2", "model.hidden=[4]", "progress=quiet")


def test_csv_of_a_run(tmp_path: Path) -> None:
    assert cli.main([*RUN, "tracking.loggers=[csv]", f"run_dir={tmp_path / 'run'}"]) == 0
    with (tmp_path / "run" / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    history = read_history(tmp_path / "run")
    assert [int(row["step"]) for row in rows] == [1, 2]
    for row, line in zip(rows, history, strict=True):
        assert float(row["loss/ce"]) == line.losses["ce"]
        assert float(row["traffic/up_bytes_total"]) == line.traffic_total.up_bytes
    assert "lr: 0.1" in (tmp_path / "run" / "csv" / "hparams.yaml").read_text()


@pytest.mark.filterwarnings("error")
def test_csv_starts_anew_when_a_run_is_resumed(tmp_path: Path) -> None:
    for steps in ((1, 2), (1, 2, 3)):
        loggers = Loggers(logger_makers(["csv"], tmp_path))
        for step in steps:
            loggers.scalars({"x": step, **({"late": 1.0} if step > 1 else {})}, step)
        loggers.close(complete=True)
    lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert lines == ["late,step,x", ",1,1", "1.0,2,2", "1.0,3,3"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], name: str
) -> None:
    """A folder of the package's name, which it leaves behind itself, is no package."""
    paths = [path for path in sys.path if not (Path(path) / name).exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *paths])
    (tmp_path / name).mkdir()
    line = refused(*RUN, f"tracking.loggers=[csv,{name}]", f"run_dir={tmp_path / 'run'}")
    assert f"pip install 'pflsim[{name}]'" in line and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb.sdk", reason="no wandb: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for seed in (0, 1):  # two runs of one process are two runs there
        name = tmp_path / f"run{seed}"
        assert cli.main([*RUN, "tracking.loggers=[wandb]", f"seed={seed}", f"run_dir={name}"]) == 0
        (written,) = (tmp_path / "wandb").glob(f"offline-run-*-run{seed}/run-run{seed}.wandb")
        assert b"accuracy/best_by_validation/mean" in written.read_bytes()
        assert not (name / "run.log").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_in_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking", reason="no mlflow: pip install -e '.[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.main([*RUN, "tracking.loggers=[mlflow]", f"run_dir={tmp_path / 'run'}"]) == 0
    (run,) = (path.parent for path in (tmp_path / "mlruns").glob("*/*/meta.yaml"))
    points = [line.split() for line in (run / "metrics" / "loss" / "ce").read_text().splitlines()]
    history = read_history(tmp_path / "run")
    assert [(int(step), float(value)) for _, value, step, *_ in points] == [(m.round, m.losses["ce"]) for m in history]
    assert (run / "params" / "lr").read_text() == "0.1" and (run / "tags" / "mlflow.runName").read_text() == "run"
