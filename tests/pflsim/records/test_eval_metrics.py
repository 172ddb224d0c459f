"""Where the metrics besides accuracy appear."""

import csv
import json
from pathlib import Path

import pytest
from stopped_runs import SMALL
from support import events

import pflsim
from pflsim import cli
from pflsim.records.per_client import COLUMNS

NAMES = ("macro_f1", "balanced_accuracy", "nll", "ece")
SETTINGS = ["method=fedrep", *SMALL, f"eval.metrics=[{','.join(NAMES)}]", "tracking.per_client=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main([*SETTINGS, f"run_dir={folder}"]) == 0
    return folder


def test_where_metrics_appear(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The means over clients are recomputed from per_client.csv."""
    with (folder / "per_client.csv").open(newline="") as file:
        header, *cells = csv.reader(file)
    assert tuple(header) == (*COLUMNS, *NAMES)
    rows = [dict(zip(header, line, strict=True)) for line in cells]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shown, summary = events(folder), json.loads((folder / "summary.json").read_text())
    last = lines[-1]["accuracy"]
    assert {split for split in last["personal"]} == {"val", "test"}
    for split, phases in last["personal"].items():
        for name in NAMES:
            scope = {"round": str(len(lines)), "model": "personal", "split": split, "phase": "trained"}
            own = [float(row[name]) for row in rows if row.items() >= scope.items()]
            assert len(own) == 4 and sum(own) / 4 == pytest.approx(phases["trained"][name])
            tag = shown.Scalars(f"{name}/personal/{split}/trained")[-1]
            assert (tag.step, tag.value) == (len(lines), pytest.approx(phases["trained"][name]))
            assert shown.Scalars(f"client/3/{name}/personal/{split}/trained")[-1].value == pytest.approx(own[3])
    for row in (row for row in rows if row["split"]):
        assert float(row["nll"]) == pytest.approx(float(row["loss"]) / int(row["total"]), rel=1e-6)
    figure = summary["accuracy"]["personal"]["last"]
    metrics = last["personal"]["test"]["trained"].pop("metrics")
    assert figure == {"round": len(lines), **last["personal"]["test"]["trained"]} and set(NAMES) < set(figure)
    for name in NAMES:
        assert summary["metrics"][name]["personal"]["last"] == {"round": len(lines), **metrics[name]}
    assert set(NAMES) < set(summary["newcomers"]["trained"])
    assert any(row["model"] == "newcomer" and row["ece"] for row in rows)

    run = pflsim.load(folder)[0]
    errors = [float(row["ece"] or "nan") for row in rows]
    assert list(run.per_client()["ece"]) == pytest.approx(errors, rel=0, nan_ok=True)
    capsys.readouterr()
    assert cli.main(["compare", str(folder)]) == 0
    printed = capsys.readouterr().out
    best = summary["accuracy"]["personal"]["best_val"]
    assert "balanced" in printed and f"{best['nll']:.3f}" in printed
    assert cli.main(["compare", str(folder), "--format", "csv"]) == 0
    (record,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert float(record["ece_mean"]) == best["ece"]
    page = pflsim.report(str(folder), out=tmp_path / "report.html").read_text()
    assert "balanced accuracy</th>" in page and f"{best['ece']:.3f}" in page
