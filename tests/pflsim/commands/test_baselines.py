"""`pflsim baselines`: regressions on the rows of runs, beside which they are shown."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pflsim
from pflsim import cli
from pflsim.analysis.comparison import compare_sets
from pflsim.analysis.runs import find_runs, read_run
from pflsim.analysis.tables import records

EVERY = dict(executor="inline", progress="none", model="linear", rounds=2, lr=0.1)


def table(path: Path, label: str, clients: int = 6, rows: int = 24) -> list[str]:
    """Write a table whose clients differ in the intercept and in the effect of a; return its settings."""
    rng, client = np.random.default_rng(0), np.repeat(np.arange(clients), rows)
    frame = pd.DataFrame({"a": rng.normal(size=len(client)), "b": rng.choice(["x", "y", "z"], len(client))})
    effect = 2 * rng.normal(size=(2, clients))[:, client]
    value = effect[0] + (1 + effect[1]) * frame["a"] + (frame["b"] == "y") + rng.normal(size=len(client))
    kinds = {
        "value": value,
        "two": (value > 0).map({True: "yes", False: "no"}),
        "three": pd.cut(value, 3, labels=[*"klm"]),
    }
    frame.assign(y=kinds[label], site=[f"s{n}" for n in client]).to_csv(path, index=False)
    return ["data=table", f"data.path={path}", "data.label=y", "data.client=site"]


def asked(words: list[str], **more: Any) -> dict[str, Any]:
    return {**dict(word.split("=", 1) for word in words), **EVERY, **more}


@pytest.mark.parametrize("label", ["value", "two", "three"])
def test_baselines_have_the_rows_and_metrics_of_runs_and_no_test(label: str, tmp_path: Path, capfd: Any) -> None:
    words = table(tmp_path / "t.csv", label)
    models = "pooled,local" if label == "three" else "pooled,local,mixed"
    runs = [
        pflsim.run(**asked(words, method=method, seed=seed), run_dir=tmp_path / "runs" / f"{method}-{seed}")
        for method in ("local", "fedavg", "ditto") for seed in (0, 1)
    ]  # fmt: skip
    into = ["--into", str(tmp_path / "beside"), "--models", models]
    assert cli.main(["baselines", *words, "seed=0,1", *into]) == 0
    folders = find_runs([str(tmp_path / "beside")])
    beside = [read_run(folder) for folder in folders]
    assert len(beside) == 2 * len(models.split(","))
    for run in beside:
        like = next(each for each in runs if each.seed == run.seed)
        assert run.complete and run.partition_hash == like.partition_hash
        totals = [each.counts(each.done)["total"].to_dict() for each in (run, like)]
        assert totals[0] == totals[1]
        assert {*run.stats("last").metrics} == {*like.stats("last").metrics}
        assert not (run.folder / "checkpoints").exists()

    (alone,) = compare_sets(runs)
    (both,) = compare_sets([*beside, *runs])
    assert both.families == alone.families and both.sentences == alone.sentences and both.target == alone.target
    assert [row.label for row in both.rows] == [row.label for row in alone.rows]
    by_method = {record["method"]: record for record in records(both)}
    own = {record["method"]: record for record in records(alone)}
    assert {name: by_method[name] for name in own} == own
    for name in by_method.keys() - own.keys():
        assert by_method[name]["level"] is None and by_method[name]["p_holm"] is None
        assert by_method[name][f"{both.primary}_mean"] > 0
    page = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path / "runs"), str(tmp_path / "beside"), "--out", str(page)]) == 0
    assert "Pooled regression" in page.read_text()
    (only,) = compare_sets(beside)
    assert not only.differences and len(only.rows) == len(models.split(","))
