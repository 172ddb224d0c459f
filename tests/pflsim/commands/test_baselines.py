"""`pflsim baselines`: regressions on the rows of runs, beside which they are shown."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_runs import made as made_run
from sklearn.linear_model import Ridge

import pflsim
from pflsim import cli
from pflsim.analysis.baselines import PENALTIES, Baselines, Rows
from pflsim.analysis.charts import limits_of
from pflsim.analysis.comparison import compare_sets
from pflsim.analysis.mixed_models import fit_logistic_mixed
from pflsim.analysis.runs import find_runs, judged_on, read_run
from pflsim.analysis.tables import records, render
from pflsim.display.metrics import points
from pflsim.seeding import newcomer_rows

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
    seeds = (0, 1) if label == "two" else (0,)
    runs = [
        pflsim.run(**asked(words, method=method, seed=seed), run_dir=tmp_path / "runs" / f"{method}-{seed}")
        for method in ("local", "fedavg") for seed in seeds
    ]  # fmt: skip
    into = ["--into", str(tmp_path / "beside"), "--models", models]
    assert cli.main(["baselines", *words, f"seed={','.join(map(str, seeds))}", *into]) == 0
    folders = find_runs([str(tmp_path / "beside")])
    beside = [read_run(folder) for folder in folders]
    assert len(beside) == len(seeds) * len(models.split(","))
    for run in beside:
        like = next(each for each in runs if each.seed == run.seed)
        assert run.complete and run.partition_hash == like.partition_hash
        totals = [each.counts(each.done)["total"].to_dict() for each in (run, like)]
        assert totals[0] == totals[1]
        assert {*run.stats("last").metrics} == {*like.stats("last").metrics}
        assert not (run.folder / "checkpoints").exists()
        scored = [each.predictions().query("when == 'last' and reported") for each in (run, like)]
        assert scored[0]["row"].tolist() == scored[1]["row"].tolist()
        if label != "value":
            right = scored[0].filter(like="score_").to_numpy().argmax(1) == scored[0]["target"]
            assert right.groupby(scored[0]["client"]).sum().tolist() == run.counts(1)["correct"].tolist()
    assert cli.main(["predict", str(folders[0]), str(tmp_path / "t.csv")]) == 2
    assert "pflsim baselines" in capfd.readouterr().err

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
    if label != "two":
        return
    page, means = (
        tmp_path / "report.html",
        {row.label: row.figures["mean"].mean for row in (*both.rows, *both.baselines)},
    )
    expected = {row.label: means[row.label] - means[both.reference.label] for row in both.baselines}
    assert {row.label: difference for row, difference in both.beside} == expected and len(expected) == 3
    assert cli.main(["report", str(tmp_path / "runs"), str(tmp_path / "beside"), "--out", str(page)]) == 0
    text, shown = page.read_text(), render([both], "text")
    low, high = limits_of(both, both.lines)
    for label, difference in expected.items():
        assert text.count(f"<title>{label}</title>") == 2 * (low <= difference <= high)
        said = points(difference, both.primary)
        assert f"{label}: {said}, not tested" in text
        assert re.search(rf"^{label} .*{re.escape(said)}", shown, re.M)
    (only,) = compare_sets(beside)
    assert not only.differences and len(only.rows) == len(models.split(","))


@pytest.mark.parametrize("first", ["baselines", "runs"])
def test_runs_are_beside_baselines_however_often_they_are_evaluated(first: str, tmp_path: Path) -> None:
    made = {"baselines": [("pooled_regression", 1)], "runs": [(m, n) for n in (1, 2) for m in ("local", "fedavg")]}
    runs = [
        made_run(tmp_path / f"{method}-{every}", [[(9, 10), (8, 10)]] * 2, method=method, every=every)
        for kind in sorted(made, key=lambda kind: kind != first) for method, every in made[kind]
    ]  # fmt: skip
    sets = compare_sets(runs)
    assert [len(each.rows) for each in sets] == [2, 2]
    assert [[row.group.method for row in each.baselines] for each in sets] == [["pooled_regression"]] * 2
    assert not any(each.objections or each.missing for each in sets)


def test_baselines_are_left_out_where_runs_are_judged_on_another_set(tmp_path: Path, capfd: Any, caplog: Any) -> None:
    own = [[(9, 10), (8, 10)]] * 2
    for method in ("local", "fedavg", "pooled_regression"):
        sets = None if method.startswith("pooled") else {"others": own}
        made_run(tmp_path / method, own, method=method, sets=sets)
    assert cli.main(["compare", str(tmp_path), "--set", "others"]) == 0
    shown = capfd.readouterr().out
    assert "FedAvg" in shown and "Pooled" not in shown and "Pooled" in caplog.text
    assert cli.main(["compare", str(tmp_path / "pooled_regression"), "--set", "others"]) == 2


def test_a_column_that_varies_at_a_new_client_only_is_no_input(tmp_path: Path) -> None:
    words, path = table(tmp_path / "t.csv", "value"), tmp_path / "t.csv"
    frame = pd.read_csv(path)
    held = frame["site"] == max(frame["site"])
    frame.assign(c=np.where(held, np.arange(len(frame)), 0)).to_csv(path, index=False)
    more = ["--models", "mixed", "--into", str(tmp_path / "runs")]
    assert cli.main(["baselines", *words, f"eval.holdout_clients=[{max(frame['site'])}]", *more]) == 0


def test_values_are_those_of_statsmodels_and_scikit_learn_also_for_a_new_client(tmp_path: Path) -> None:
    formulas = pytest.importorskip("statsmodels.formula.api")
    words, last = table(tmp_path / "t.csv", "value"), 5
    more = [
        "eval.holdout_clients=1",
        "eval.newcomer_rows=[4]",
        "split.validation=0.2",
        "--slopes",
        "a",
        "--into",
        str(tmp_path / "runs"),
    ]
    assert cli.main(["baselines", *words, *more]) == 0
    found = {run.method: run for run in map(read_run, find_runs([str(tmp_path / "runs")]))}
    frame = pd.read_csv(tmp_path / "t.csv")
    parts = json.loads((found["mixed_model"].folder / "partition.json").read_text())
    train, val = (np.concatenate(parts[name][:last]) for name in ("train", "val"))

    def check(run: Any, predicted: Any, clients: Any) -> None:
        errors = [np.sqrt(np.mean((predicted - frame["y"])[parts["test"][client]] ** 2)) for client in clients]
        np.testing.assert_allclose(run.counts(1)["rmse"][[*clients]], errors, rtol=2e-3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = formulas.mixedlm("y ~ a + b", frame.iloc[train], groups="site", re_formula="~a").fit()
    effects = frame["site"].map(lambda name: np.asarray(fit.random_effects.get(name, [0, 0])))
    mixed = fit.predict(frame) + effects.str[0] + effects.str[1] * frame["a"]
    check(found["mixed_model"], mixed, range(last))
    check(judged_on(found["mixed_model"], "new_received"), mixed, [last])
    own = np.array(parts["train"][last])
    few = frame.iloc[own[newcomer_rows(0, last, len(own))[:4]]]
    z, d = np.column_stack([np.ones(4), few["a"]]), fit.cov_re.to_numpy()
    effects = d @ z.T @ np.linalg.solve(z @ d @ z.T + fit.scale * np.eye(4), few["y"] - fit.predict(few))
    updated = fit.predict(frame) + effects[0] + effects[1] * frame["a"]
    check(judged_on(found["mixed_model"], "new_trained_4"), updated, [last])

    a = (frame["a"] - frame["a"][train].mean()) / frame["a"][train].std(ddof=0)
    x = np.column_stack([a, frame["b"] == "y", frame["b"] == "z"])
    fits = [Ridge(penalty).fit(x[train], frame["y"][train]) for penalty in PENALTIES]
    best = min(fits, key=lambda line: np.mean((line.predict(x[val]) - frame["y"][val]) ** 2))
    check(found["pooled_regression"], best.predict(x), range(last))
    check(judged_on(found["pooled_regression"], "new_received"), best.predict(x), [last])


def test_classes_that_a_client_lacks_count_as_one_row_of_all_clients() -> None:
    rng, y, clients = np.random.default_rng(0), np.array([0] * 4 + [0, 1, 2, 1, 2, 1]), np.repeat([0, 1], [4, 6])
    rows = Rows(rng.normal(size=(10, 2)), y, clients)
    none = Rows(rows.x[:0], y[:0], clients[:0])
    predict, warning = Baselines(("a", "b"), {"train": rows, "val": none, "test": none}, 2, 3).fit("local")
    assert "validation" in warning
    p = np.exp(predict(rows.x, clients))
    np.testing.assert_allclose(p.sum(1), 1)
    shares = np.array([6, 4, 3]) / 13
    np.testing.assert_allclose(p[:4], np.broadcast_to((4 * np.eye(3)[0] + shares) / 5, (4, 3)))
    assert np.isnan(predict(rows.x, clients + 5)).all()


def test_a_client_that_is_unknown_to_a_logistic_mixed_model() -> None:
    rng, clients = np.random.default_rng(0), np.repeat(np.arange(8), 20)
    x, effects = rng.normal(size=(160, 2)), rng.normal(size=8)[clients]
    train = Rows(x, (x[:, 0] + 2 * effects + rng.logistic(size=160) > 0).astype(int), clients)
    predict, warning = Baselines(("a", "b"), {"train": train}, 7, 2).fit("mixed", ["b"])
    known, new = train.of(clients < 7), train.of(clients == 7)
    ones = np.column_stack([np.ones(160), x])
    model = fit_logistic_mixed(ones[:140], ones[:140][:, [0, 2]], known.y, known.clients)
    expected = model.probabilities(ones, ones[:, [0, 2]], np.where(clients < 7, clients, -1))
    assert warning == "" and not np.allclose(expected[140:], expected[:20])
    np.testing.assert_allclose(np.exp(predict(x, clients))[:, 1], expected)
    np.testing.assert_allclose(predict(new.x, new.clients), predict(new.x, new.clients + 5))


def test_a_mixed_model_that_does_not_converge_says_so(tmp_path: Path, capfd: Any) -> None:
    words = table(tmp_path / "t.csv", "two")
    frame = pd.read_csv(tmp_path / "t.csv")
    frame.assign(c=(frame["y"] == "yes") & (frame["a"] > 0.5)).to_csv(tmp_path / "t.csv", index=False)
    assert (
        cli.main(["baselines", *words, "split.validation=0", "--models", "mixed", "--into", str(tmp_path / "runs")])
        == 0
    )
    (run,) = map(read_run, find_runs([str(tmp_path / "runs")]))
    assert "did not converge" in run.summary["warnings"][0] and "did not converge" in capfd.readouterr().err
    assert cli.main(["compare", str(tmp_path / "runs")]) == 0
    assert "did not converge" in capfd.readouterr().out
    pflsim.run(**asked(words, method="local", split={"validation": 0}), run_dir=tmp_path / "runs" / "local")
    page = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(page)]) == 0
    assert "Mixed model, seed 0: the mixed model did not converge" in page.read_text()


@pytest.mark.parametrize(
    ("label", "words", "named"),
    [
        ("two", ["--models", "mixed,ridge"], "--models ridge"),
        ("two", ["--models", "local", "--slopes", "a"], "--slopes a"),
        ("two", ["--slopes", "q"], "--slopes q"),
        ("three", [], "3 classes"),
        ("two", ["data.client=null"], "data.client"),
        ("two", ["method=ditto"], "method"),
        ("two", ["run_dir=here"], "--into"),
        ("two", ["eval.clients=participants"], "eval.clients"),
        ("two", ["data=digits"], "data=table"),
    ],
)
def test_refusals(label: str, words: list[str], named: str, tmp_path: Path, capfd: Any) -> None:
    settings = table(tmp_path / "t.csv", label)
    settings = ["clients=2"] if "data=digits" in words else settings
    assert cli.main(["baselines", *settings, *words, "--into", str(tmp_path / "runs")]) == 2
    assert named in capfd.readouterr().err and not (tmp_path / "runs").exists()


def test_without_statsmodels_the_command_that_installs_it_is_named(monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr("pflsim.commands.baselines.find_spec", lambda name: None)
    assert cli.main(["baselines", "data=table"]) == 2
    assert "pip install 'pflsim[tables]'" in capfd.readouterr().err
