"""Runs with other tasks, losses and metrics, from settings to comparison."""

import csv
import json
from typing import Any

import numpy as np
import pytest
import torch
from support import inline, prepared
from torch import Tensor
from torch.nn import functional

import pflsim
from pflsim.analysis.runs import Run
from pflsim.data.dataset import Dataset
from pflsim.engine.execution import EvalRequest
from pflsim.errors import RunError, SettingsError
from pflsim.records.history import read_history

pytestmark = pytest.mark.usefixtures("here")
SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "rounds": 3, "executor": "inline", "progress": "none"}


BINARY = {"data": "breast_cancer", "model": "tabular_mlp"}


def branches(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets) * (1 if bool(scores.sum() > 0) else 1)


def test_regression_from_settings_to_comparison() -> None:
    """A lower RMSE is better in every place, and predictions are in the unit of the targets."""
    task = {"name": "regression", "standardize_target": True}
    runs = [pflsim.run(method=method, task=task, partition="dirichlet", **SMALL) for method in ("local", "fedavg")]
    for run in runs:
        lines = (run.folder / "per_client.csv").read_text().splitlines()
        rows = [row for row in csv.DictReader(lines) if row["split"] == "test"]
        assert {row["correct"] for row in rows} == {""} and all(float(row["rmse"]) > 0 for row in rows)
        history = read_history(run.folder)
        means = {x.round: x.evaluations[run.reported._replace(split="val")].mean for x in history}
        found = run.summary["metrics"]["rmse"][run.reported.model]["best_val"]
        assert found["round"] == min(means, key=lambda number: means[number])
        own = [r for r in rows if (int(r["round"]), r["model"]) == (found["round"], run.reported.model)]
        assert found["worst_decile"] == max(float(row["rmse"]) for row in own)
        assert run.summary["primary"] == {"name": "rmse", "higher_is_better": False} and "accuracy" not in run.summary
        assert 0 < run.mean() < 6
        with pytest.raises(AttributeError, match=r'summary\["metrics"\]'):
            run.accuracy  # noqa: B018
    (compared,) = pflsim.compare(runs)
    (difference,) = compared.differences
    assert runs[0].mean() < runs[1].mean() and difference.worse > difference.better and (difference.mean or 0) > 0
    assert "rmse" in str(compared) and pflsim.report(runs).is_file()
    scores = pflsim.load_model(runs[0], 0)(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert scores.shape == (2, 1) and 0 < float(scores.detach().mean()) < 9


@pytest.mark.slow
def test_a_metric_that_is_undefined_is_missing_and_counted() -> None:
    """Two of three clients have one class."""
    x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    y = np.repeat([0, 1, 0], 30) | (np.arange(90) >= 75)
    rows = {"train": [[*range(0, 30)], [*range(30, 60)], [*range(60, 90)]]}
    rows["test"] = rows["train"].copy()
    options = {**SMALL, "data": ((x, y), (x, y)), "clients": 3, "model": "tabular_mlp", "partition": rows}
    run = pflsim.run(method="local", eval={"primary": "auroc"}, **options)
    found = run.summary["metrics"]["auroc"]["personal"]["last"]
    assert (found["clients"], found["undefined"]) == (1, 2) and 0 <= found["mean"] == found["worst_decile"] <= 1
    last = run.per_client().query("round == 3 and split == 'test' and model == 'personal'")
    assert last["auroc"].isna().tolist() == [True, True, False] and 0 <= found["pooled"] <= 1
    other = {"partition": rows | {"test": [[*range(15, 45)], [*range(15)], rows["test"][2]]}, "seed": 1}
    runs = [run, pflsim.run(method="local", eval={"primary": "auroc"}, **options | other)]
    assert "is undefined for 1–2 clients" in pflsim.report(runs).read_text()
    assert " 1–2 " in str(pflsim.compare(runs)).partition("undefined")[2].partition("Local")[2].partition("\n")[0]
    rows["test"][2] = [*range(60, 75)]
    with pytest.raises(SettingsError, match=r"eval\.primary=auroc"):
        pflsim.run(method="local", eval={"primary": "auroc"}, **options)


def test_an_own_loss_trains_one_by_one_if_it_cannot_be_stacked() -> None:
    run = pflsim.run(method="fedrep", task={"loss": branches}, **SMALL)
    (warning,) = run.summary["warnings"]
    assert "one by one" in warning and "task.loss=" in warning and "branches" in warning
    assert {*run.history[-1].losses} == {"head/loss", "body/loss"}
    with pytest.raises(SettingsError, match=r"lockstep=true: task\.loss="):
        pflsim.run(method="fedrep", task={"loss": branches}, lockstep=True, **SMALL)


def vector(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - targets[:, None]).square().mean(1)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"eval": {"metrics": [vector]}}, "^eval.metrics: vector "),
        ({"eval": {"primary": "test_tasks.vector", "mode": "min"}}, "^eval.metrics: vector "),
        ({"task": {"loss": vector}}, "^task.loss=.*vector: "),
        ({"eval": {"metrics": [lambda scores, targets: 1 / 0]}}, "^eval.metrics: "),
        ({"task": {"loss": "CrossEntropyLoss", "options": {"reduction": "none"}}}, "^task.loss=CrossEntropyLoss: "),
    ],
)
def test_a_metric_or_loss_of_several_numbers_is_refused_by_name(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        pflsim.run(method="fedavg", **settings, **SMALL)


@pytest.mark.parametrize(
    ("settings", "standardised"),
    [
        ("data=breast_cancer model=tabular_mlp", True),
        ("data=breast_cancer model=tabular_mlp task.standardize_target=false", False),
        ("data=breast_cancer model=tabular_mlp task.loss=HuberLoss", False),
        ("data=breast_cancer model=tabular_mlp task.loss=HuberLoss task.standardize_target=true", True),
        ("data=digits", False),
    ],
)
def test_targets_of_tables_are_standardised_by_default(settings: str, standardised: bool) -> None:
    assert bool(prepared("task=regression", *settings.split()).factory.training.task.mean) == standardised


def far(settings: dict[str, Any], **task: Any) -> Run:
    """Run Local on numbers of about 1000."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.normal(1000, 100, (60, 1)).astype(np.float32)
    options = {**SMALL, "data": Dataset("far", x, y, 1, 40), "model": "tabular_mlp", "clients": 2, "progress": "plain"}
    return pflsim.run(method="local", partition="iid", task={"name": "regression", **task}, **options | settings)


@pytest.mark.parametrize("task", [{"standardize_target": False}, {}], ids=str)
@pytest.mark.slow
def test_a_run_that_diverges_says_which_settings_help(task: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Resuming it would not."""
    with pytest.raises(RunError) as caught:
        far({"lr": 1e9, "clip_grad_norm": 1e30}, **task)
    words = {"task.standardize_target=true", "lr", "clip_grad_norm", "on_nonfinite=drop"}
    said = {word for word in words if word in str(caught.value)}
    assert said == words - ({"task.standardize_target=true"} if not task else set())
    assert "resume" not in capsys.readouterr().out
    (warning,) = far({"lr": 1e20, "rounds": 1, "on_nonfinite": "keep"}, standardize_target=False).summary["warnings"]
    assert "loss" in warning and "task.standardize_target=true" in warning


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_takes_classes_for_examples_is_refused() -> None:
    """Two outputs against two examples would be broadcast."""
    with pytest.raises(SettingsError, match="^task.loss=MSELoss: .*trial"):
        pflsim.run(method="fedavg", task={"loss": "MSELoss"}, **SMALL | BINARY)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_loss_of_the_same_name() -> None:
    def made(power: int) -> Any:
        return lambda scores, targets: ((scores - functional.one_hot(targets, 10)).abs() ** power).mean()

    one = made(2)
    first, second = (pflsim.run(method="local", task={"loss": loss}, **SMALL) for loss in (one, made(3)))
    with pytest.raises(SettingsError, match="lambda"):
        pflsim.resume(first, rounds=4)
    assert pflsim.resume(first, rounds=4, task={"loss": one}).done == 4
    assert second.done == 3


def test_losses_of_clients_that_have_not_trained_have_their_own_weights() -> None:
    settings = ("partition=dirichlet", "partition.alpha=0.5", "task.class_weights=balanced_client")
    executor = inline(prepared("data=digits", "clients=3", "method=fedavg", *settings))
    net = executor.factory.build().eval().net
    for row in executor.evaluate(EvalRequest("global", "received", (0, 1, 2), ("test",))):
        counts = torch.bincount(executor.host.shards[row.client].train.y, minlength=10)
        weight = torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts), 1.0)
        x, y = executor.host.shards[row.client].test.batch(slice(None))
        expected = functional.cross_entropy(net(x), y, weight) * len(y)
        assert row.loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_two_classes_with_one_output_have_two_scores() -> None:
    task = {"loss": "BCEWithLogitsLoss", "class_weights": "balanced_client"}
    run = pflsim.run(method="ditto", task=task, eval={"metrics": ["auroc"]}, **SMALL | BINARY)
    model = pflsim.load_model(run, 0)
    assert model(torch.zeros(2, *model.about["shape"])).shape == (2, 2) and model.client.net.num_classes == 1
    assert run.accuracy > 0.8 and run.mean("auroc") > 0.8
    record = json.loads((run.folder / "partition.json").read_text())
    assert record["task"]["name"] == "classification" and record["classes"] == 2
