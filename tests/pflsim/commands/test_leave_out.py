"""`pflsim leave-out`: each client is held out once, and what stops is continued."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support import in_this_process

from pflsim import cli
from pflsim.analysis.mixed_models import fit_logistic_mixed
from pflsim.analysis.runs import read_run
from pflsim.commands import tune
from pflsim.commands.leave_out import _table
from pflsim.data.federate import load_federation
from pflsim.records.saved_settings import saved_settings
from pflsim.seeding import newcomer_rows


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A table of four clients, the last of which has few rows."""
    rng, client = np.random.default_rng(0), np.repeat(np.arange(4), [24, 24, 24, 12])
    a = rng.normal(size=len(client))
    value = np.array([-2.0, 2.0, 1.0, -2.0])[client] + a + rng.logistic(size=len(client))
    frame = pd.DataFrame({"a": a, "y": np.where(value > 0, "yes", "no"), "site": [f"s{n}" for n in client]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.setattr(tune, "side_by_side", in_this_process)
    given = ["data=table", f"data.path={tmp_path / 't.csv'}", "data.label=y", "data.client=site", "model=linear"]
    return ["leave-out", *given, "rounds=2", "eval.newcomer_rows=[4,12]"]


def test_each_client_is_held_out_once_and_the_same_command_continues(
    words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "out"
    words += ["method=fedavg", "--into", str(into)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 runs")  # before the first one ends
    runs = [read_run(path) for path in sorted(into.glob("0*"))]
    assert [run.config["eval"]["holdout_clients"] for run in runs] == [["s0"], ["s1"], ["s2"], ["s3"]]
    found = pd.read_csv(into / "leave-out.csv")
    sizes = found[found["phase"] == "received_all"].groupby("method")["total"].agg(["count", "sum"])
    assert sizes.to_numpy().tolist() == [[4, 84]] * 3
    means = found.groupby(["method", "phase"])["accuracy"].mean()
    for line in (line for line in out.splitlines() if line.startswith(("FedAvg  ", "Mixed model  "))):
        method = line.split("  ")[0]
        shown = [float(cell) for cell in line.removeprefix(method).split() if cell[0] == "0"]
        phases = ["received_all", "received", "recalibrated_4", "trained_4", "recalibrated_12", "trained_12", "trained"]
        expected = [means[method, phase] for phase in phases if (method, phase) in means.index]
        assert shown == pytest.approx(expected, abs=5e-4) and len(shown) == (7 if method == "FedAvg" else 4)
    twelve = found[(found["phase"] == "trained_12") & (found["method"] == "FedAvg")]
    assert [*twelve["name"]] == ["s0", "s1", "s2"] and "(3)" in out

    before, begun = {path: path.stat().st_mtime_ns for path in into.rglob("metrics.jsonl")}, list[int]()
    gone = runs[3].folder
    shutil.rmtree(gone)
    whole = (into / "leave-out.csv").read_bytes()
    monkeypatch.setattr(tune, "side_by_side", lambda runs, *more: begun.append(len(runs)) or in_this_process(runs, 1))
    assert cli.main(words) == 0 and begun == [1]
    after = {path: path.stat().st_mtime_ns for path in into.rglob("metrics.jsonl")}
    assert {path for path in before if after[path] != before[path]} == {gone / "metrics.jsonl"}
    assert (into / "leave-out.csv").read_bytes() == whole
    assert cli.main([*words, "lr=0.3"]) == 2 and "--into" in capsys.readouterr().err
    table = tmp_path / "t.csv"
    table.write_text(table.read_text().replace(",yes,", ",no,", 1))
    assert cli.main(words) == 2 and "--into" in capsys.readouterr().err


def test_a_mixed_model_is_updated_with_the_rows_that_a_newcomer_may_use(words: list[str], tmp_path: Path) -> None:
    into = tmp_path / "out"
    assert cli.main([*words, "method=fedavg", "--folds", "2", "--models", "mixed", "--into", str(into)]) == 0
    run = next(map(read_run, (into / "baselines-s0-fold00").glob("*")))
    dataset, partition = load_federation(saved_settings(run.folder, ("data", "partition", "split", "shift")))
    assert partition.names == ("s1", "s3", "s0", "s2")
    train = np.concatenate(partition.train[:2])
    ones = np.column_stack([np.ones(len(dataset.x)), dataset.x.astype(float)])
    clients, y = np.repeat([0, 1], [*map(len, partition.train[:2])]), dataset.y.astype(float)
    model = fit_logistic_mixed(ones[train], ones[train][:, :1], y[train], clients)
    own, test = partition.train[2], partition.test[2]
    assert model.covariance[0, 0] > 0.3
    few = own[newcomer_rows(0, 2, len(own))[:4].numpy()]
    grid = np.linspace(-9, 9, 20001)[:, None]
    logits = ones[few] @ model.coefficients + grid
    density = (y[few] * logits - np.logaddexp(0, logits)).sum(1) - grid[:, 0] ** 2 / 2 / model.covariance[0, 0]
    right = (ones[test] @ model.coefficients + grid[density.argmax()] > 0) == y[test]
    row = run.per_client().query("phase == 'trained_4' and client == 2").iloc[0]
    assert row["accuracy"] == pytest.approx(right.mean())
    p = 1 / (1 + np.exp(-(ones[test] @ model.coefficients + grid[density.argmax()])))
    assert row["loss"] == pytest.approx(-np.log(np.where(y[test] == 1, p, 1 - p)).sum(), rel=1e-3)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["eval.holdout_clients=1"], "eval.holdout_clients"),
        (["--folds", "6"], "6 folds"),
        (["--models", "local"], "--models local"),
        (["--slopes", "q"], "--slopes q"),
        (["data.client=null", "clients=3", "partition=iid"], "data.client"),
    ],
)
def test_refusals(more: list[str], named: str, words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert cli.main([*words, "method=fedavg", *more, "--into", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_clients_for_which_the_metric_is_not_defined_are_not_counted() -> None:
    clients = [("s0", 0.5), ("s1", 0.7), ("s2", np.nan)]
    frame = pd.DataFrame(clients, columns=["name", "auroc"]).assign(
        seed=0, phase="received", method="Mixed", warning=""
    )
    frame.loc[1, "warning"] = "doubtful"
    table = _table(frame, "auroc")
    assert table.rows == (("Mixed", "0.600 (2)"),) and " 3 clients" in table.notes[0]
    assert "s1" in table.notes[-1] and "s0" not in table.notes[-1] and "doubtful" in table.notes[-1]
