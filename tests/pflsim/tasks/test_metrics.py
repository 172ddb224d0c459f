"""Metrics against scikit-learn and sums in numpy."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from ray import cloudpickle
from scipy.special import expit, softmax
from sklearn import metrics as sk
from support import refusing

from pflsim.config.components import target_of
from pflsim.config.settings import Eval
from pflsim.display.metrics import UNDIRECTED
from pflsim.errors import SettingsError
from pflsim.tasks.metrics import TABLE, Metric, check_primary, measures_of, metrics_of
from pflsim.tasks.task import Task

RNG = np.random.default_rng(0)


def found(task: Task, scores: np.ndarray, y: np.ndarray, *asked: Any) -> dict[str, float | None]:
    metrics = metrics_of(asked, task)
    metrics = cloudpickle.loads(cloudpickle.dumps(metrics))  # as Ray's actors get them
    return {metric.name: metric(torch.from_numpy(scores), torch.from_numpy(y)) for metric in metrics}


def calibration_error(p: np.ndarray, y: np.ndarray) -> float:
    sure, right, error = p.max(1), p.argmax(1) == y, 0.0
    for m in range(15):
        inside = (m / 15 < sure) & (sure <= (m + 1) / 15)
        error += abs((right[inside] - sure[inside]).sum()) / len(y)
    return error


@pytest.mark.parametrize("present", [[0, 1, 2, 3, 4, 5], [1, 4], [3]], ids=str)
def test_classification(present: list[int]) -> None:
    """Also if the client lacks classes, which its model predicts nevertheless."""
    y = RNG.choice(present, 60)
    scores = (RNG.normal(size=(60, 6)) + np.eye(6)[y]).astype(np.float32)
    p, guesses = softmax(scores.astype(np.float64), 1), scores.argmax(1)
    held, occur = sorted({*y.tolist()}), sorted({*y.tolist(), *guesses.tolist()})
    hot, shares = np.eye(6)[y][:, held], (0.3, 0.1, 0.2, 0.25, 0.05, 0.1)
    right = {c: (guesses[y == c] == c).mean() for c in held}
    expected: dict[str, float | None] = {
        "balanced_accuracy": sk.recall_score(y, guesses, labels=held, average="macro"),
        "reweighted_accuracy": np.average([*right.values()], weights=[shares[c] for c in held]),
        "macro_f1": sk.f1_score(y, guesses, labels=occur, average="macro", zero_division=0),
        "top_k_accuracy": sk.top_k_accuracy_score(y, p, k=2, labels=range(6)),
        "nll": sk.log_loss(y, p, labels=range(6)),
        "ece": calibration_error(p, y),
        "brier": np.mean(((p - np.eye(6)[y]) ** 2).sum(1)),
        "auroc": sk.roc_auc_score(hot, p[:, held], average="macro") if len(held) > 1 else None,
        "average_precision": sk.average_precision_score(hot, p[:, held], average="macro") if len(held) > 1 else None,
    }
    asked = [{"top_k_accuracy": {"top_k": 2}} if name == "top_k_accuracy" else name for name in expected]
    assert found(Task("classification", 6, shares=shares), scores, y, *asked) == pytest.approx(expected, abs=1e-6)
    even = found(Task("classification", 6, shares=(1 / 6,) * 6), scores, y, "reweighted_accuracy", "balanced_accuracy")
    assert even["reweighted_accuracy"] == pytest.approx(even["balanced_accuracy"], abs=1e-12)
    none = tuple(0.0 if c in held else 1.0 for c in range(6))
    unseen = Task("classification", 6, shares=none)
    assert found(unseen, scores, y, "reweighted_accuracy") == {"reweighted_accuracy": None}


def test_two_classes_are_ranked_by_the_second() -> None:
    y, scores = np.array([0, 1, 1, 0, 1]), RNG.normal(size=(5, 2)).astype(np.float32)
    expected = sk.roc_auc_score(y, scores[:, 1] - scores[:, 0])
    asked = "auroc", "specificity", "torchmetrics.functional.classification.binary_f1_score"
    values = found(Task("classification", 2), scores, y, *asked)
    guesses = scores.argmax(1)
    assert values == pytest.approx({
        "auroc": expected, "specificity": sk.recall_score(y, guesses, pos_label=0),
        "binary_f1_score": sk.f1_score(y, guesses, zero_division=0),
    }, abs=1e-6)  # fmt: skip


@pytest.mark.parametrize("spread", [0.01, 1.0, 300.0])
def test_calibration(spread: float) -> None:
    """Against statsmodels; undefined for clients with few examples of a class, and where the logit separates them."""
    models = pytest.importorskip("statsmodels.api")
    asked, task, flat = ("calibration_slope", "calibration_intercept", "brier"), Task("classification", 2), np.zeros(40)
    x = RNG.normal(0.3, 1, 40)
    y = np.argsort(np.argsort(x + 2 * RNG.normal(size=40))) // 20
    logit = spread * x
    scores = np.column_stack([flat, logit]) + RNG.normal(size=(40, 1))
    line = models.GLM(y, models.add_constant(x), family=models.families.Binomial()).fit(tol=1e-12)
    expected = {asked[0]: line.params[1] / spread, "brier": sk.brier_score_loss(y, softmax(scores, 1)[:, 1])}
    if spread < 100:  # where statsmodels converges
        level = models.GLM(y, flat + 1, offset=logit, family=models.families.Binomial()).fit(tol=1e-12)
        expected[asked[1]] = level.params[0]
    values = found(task, scores, y, *asked)
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert np.mean(expit(logit + (values[asked[1]] or 0))) == pytest.approx(y.mean())
    for few in (np.flatnonzero(np.cumsum(y) <= 9), np.flatnonzero(np.cumsum(1 - y) <= 9)):
        assert found(task, scores[few], y[few], *asked[:2]) == dict.fromkeys(asked[:2])
    for clear in (np.sort(y), np.sort(y)[::-1].copy()):
        assert found(task, scores[np.argsort(x)], clear, *asked[:2]) == dict.fromkeys(asked[:2])
    assert found(task, np.column_stack([flat, flat]), y, *asked[:2]) == dict.fromkeys(asked[:2])


def test_confident_scores_keep_their_order() -> None:
    """In float32 their probabilities would be equal."""
    scores = np.array([[0, 20.0], [0, 21], [0, 22], [0, 23]], np.float32)
    assert found(Task("classification", 2), scores, np.array([0, 0, 1, 1]), "auroc") == {"auroc": 1.0}


def test_equal_scores_share_a_rank() -> None:
    y, scores = RNG.integers(0, 2, (40, 3)), RNG.integers(0, 5, (40, 3)).astype(np.float32)
    assert found(Task("multilabel", 3), scores, y, "auroc", "average_precision") == pytest.approx({
        "auroc": sk.roc_auc_score(y, scores), "average_precision": sk.average_precision_score(y, scores),
    }, abs=1e-6)  # fmt: skip


def test_multilabel() -> None:
    """A label that the client never or always has is left out of means over labels."""
    y = RNG.integers(0, 2, (50, 4)).astype(np.float32)
    y[:, 3] = 0
    scores = RNG.normal(size=(50, 4)).astype(np.float32)
    p = expit(scores.astype(np.float64))
    values = found(Task("multilabel", 4), scores, y, "average_precision", "macro_f1", "accuracy", "nll", "brier")
    assert values == pytest.approx({
        "auroc": sk.roc_auc_score(y[:, :3], p[:, :3]),
        "average_precision": sk.average_precision_score(y[:, :3], p[:, :3]),
        "macro_f1": sk.f1_score(y, p > 0.5, average="macro", zero_division=0),
        "accuracy": np.mean((p > 0.5) == y), "nll": -np.mean(np.log(np.where(y > 0, p, 1 - p))),
        "brier": np.mean((p - y) ** 2),
    }, abs=1e-6)  # fmt: skip
    assert found(Task("multilabel", 4), scores[:1], y[:1])["auroc"] is None


@pytest.mark.parametrize("targets", [1, 2])
def test_regression(targets: int) -> None:
    y, scores = (RNG.normal(3, 2, size=(40, targets)).astype(np.float32) for _ in range(2))
    expected = {
        "rmse": np.mean(np.sqrt(np.mean((y - scores) ** 2, 0))),
        "mae": sk.mean_absolute_error(y, scores),
        "r2": sk.r2_score(y, scores),
        "pearson": np.mean([np.corrcoef(y[:, t], scores[:, t])[0, 1] for t in range(targets)]),
    }
    assert found(Task("regression", targets), scores, y, *expected) == pytest.approx(expected, abs=1e-5)
    few = found(Task("regression", targets), scores[:1], y[:1], "r2", "pearson")
    assert few["r2"] is None and few["pearson"] is None and few["rmse"] is not None


def test_scores_that_are_not_finite_are_wrong_and_have_no_rank() -> None:
    scores = np.array([[5, 0, 0], [np.nan, 0, 0], [0, 0, np.inf]], np.float32)
    values = found(Task("classification", 3), scores, np.array([0, 0, 2]), "balanced_accuracy", "macro_f1", "auroc")
    assert values["balanced_accuracy"] == (1 / 2 + 0) / 2 and values["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert math.isnan(values["auroc"] or 0)


def one_wrong(scores: torch.Tensor, targets: torch.Tensor) -> float:
    if len(targets) == 1:
        raise ValueError("too few")
    return float((scores.argmax(1) != targets).sum())


def test_functions_and_objects_of_python() -> None:
    metric = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
    named = [target_of(one_wrong), target_of(metric), "matthews_corrcoef"]
    scores, y = RNG.normal(size=(9, 3)).astype(np.float32), RNG.integers(0, 3, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = found(Task("classification", 3), scores, y, *named)
        assert found(Task("classification", 3), scores[:1], y[:1], *named)["one_wrong"] is None
    hits = (scores.argmax(1) == y).sum()
    assert values == pytest.approx({
        "one_wrong": 9 - hits, "MulticlassAccuracy": hits / 9,
        "matthews_corrcoef": sk.matthews_corrcoef(y, scores.argmax(1)),
    }, abs=1e-6)  # fmt: skip


@pytest.mark.parametrize(
    ("task", "asked", "words"),
    [
        ("classification", "rmse", ("rmse", "task=classification", "auroc")),
        ("regression", "auroc", ("auroc", "task=regression", "rmse")),
        ("classification", "aurok", ("aurok", "auroc")),
        ("classification", {"top_k_accuracy": {"k": 3}}, ("top_k_accuracy", "k", "top_k")),
        ("classification", "mine.missing", ("mine",)),
        ("classification", "calibration_slope", ("calibration_slope", "two classes", "3")),
    ],
    ids=str,
)
def test_what_is_no_metric_of_the_task_is_refused(task: Any, asked: Any, words: tuple[str, ...]) -> None:
    with refusing(*words):
        metrics_of([asked], Task(task, 3))


def test_directions() -> None:
    metrics = metrics_of(["nll", "auroc", "nll"], Task("classification", 2))
    assert [metric.name for metric in metrics] == ["nll", "auroc"]
    measures = measures_of(Task("classification", 2), metrics, Eval())
    assert (measures.names, measures.primary, measures.lower) == (("accuracy", "nll", "auroc"), "accuracy", ("nll",))
    direction = {name: higher for name, (_, higher, _) in TABLE.items() if not higher}
    assert direction == {**dict.fromkeys(("nll", "ece", "brier", "rmse", "mae"), False), **dict.fromkeys(UNDIRECTED)}
    (own,) = [m for m in metrics_of(["rmse"], Task("regression", 1)) if isinstance(m, Metric)]
    assert own.higher is False


def test_the_primary_metric_needs_a_direction_and_a_client() -> None:
    task = Task("classification", 2)
    metrics = metrics_of([target_of(one_wrong)], task)
    with pytest.raises(SettingsError, match="eval.mode"):
        measures_of(task, metrics, Eval(primary="one_wrong"))
    assert measures_of(task, metrics, Eval(primary="one_wrong", mode="min")).lower == ("one_wrong",)
    metrics = metrics_of([], task, "auroc")
    measures = measures_of(task, metrics, Eval(primary="auroc"))
    one, both = torch.tensor([1, 1]), torch.tensor([0, 1])
    check_primary(measures, metrics, task, [one, both])
    with pytest.raises(SettingsError, match=r"eval\.primary=auroc"):
        check_primary(measures, metrics, task, [one, one])
