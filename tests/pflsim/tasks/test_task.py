"""The loss of a task: its choice, arguments, class weights, outputs and scores."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax
from sklearn.utils.class_weight import compute_class_weight
from support import dataset, partition, refusing
from torch import Tensor, nn
from torch.nn import functional

from pflsim.config.components import target_of
from pflsim.config.settings import Settings, TaskChoice
from pflsim.tasks.task import Criterion, Task, counts_of, cross_entropy, task_of

RNG = np.random.default_rng(1)
SCORES, Y = RNG.normal(size=(20, 3)).astype(np.float32), RNG.integers(0, 3, 20)
X, LABELS = torch.from_numpy(SCORES), torch.from_numpy(Y)


def criterion(targets: int = 3, name: Any = "classification", weights: Any = (), **choice: Any) -> Criterion:
    return Criterion(Task(name, targets, TaskChoice(**choice), weights))


def huberlike(scores: Tensor, targets: Tensor, *, power: float = 1.0) -> Tensor:
    return (scores - functional.one_hot(targets, 3)).abs().pow(power).mean()


def test_the_default_is_the_same_call_as_before() -> None:
    made = criterion()
    assert made.loss is None and not made.state_dict() and made.term == "ce"
    assert torch.equal(made(X, LABELS), cross_entropy(X, LABELS))
    assert torch.equal(made.total(X, LABELS), functional.cross_entropy(X, LABELS, reduction="sum"))
    assert torch.equal(made.scores(X), X)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"label_smoothing": 0.3}, nn.CrossEntropyLoss(label_smoothing=0.3)),
        ({"loss": "NLLLoss"}, nn.NLLLoss()),
        ({"loss": "MultiMarginLoss", "options": {"p": 2}}, nn.MultiMarginLoss(p=2)),
        ({"loss": "torch.nn.functional.multi_margin_loss", "options": {"p": 2}}, nn.MultiMarginLoss(p=2)),
        ({"loss": target_of(huberlike), "options": {"power": 2.0}}, partial(huberlike, power=2.0)),
        ({"loss": target_of(nn.MultiMarginLoss(margin=2))}, nn.MultiMarginLoss(margin=2)),
    ],
    ids=["smoothing", "name", "options", "dotted", "function", "object"],
)
def test_losses_of_torch_and_of_the_user(choice: dict[str, Any], expected: Any) -> None:
    made = criterion(**choice)
    assert torch.equal(made(X, LABELS), expected(X, LABELS))
    assert torch.equal(made.total(X, LABELS), expected(X, LABELS) * 20)
    assert made.term == ("ce" if "label_smoothing" in choice else "loss")


def test_two_classes_with_one_output() -> None:
    made = criterion(2, loss="BCEWithLogitsLoss", class_weights=[1.0, 3.0], weights=(3.0,))
    assert made.task.outputs == 1
    z, y = SCORES[:, :1], (Y > 0).astype(int)
    loss = -np.mean(3 * y * np.log(expit(z[:, 0])) + (1 - y) * np.log(expit(-z[:, 0])))
    assert float(made(torch.from_numpy(z), torch.from_numpy(y))) == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(made.scores(torch.from_numpy(z)).softmax(1)[:, 1:].numpy(), expit(z), rtol=1e-5)


def test_targets_are_standardised_and_predictions_are_not() -> None:
    task = Task("regression", 2, mean=(5.0, -1.0), std=(2.0, 4.0))
    made, y = Criterion(task), torch.tensor([[7.0, 3.0], [5.0, -5.0]])
    assert float(made(torch.zeros(2, 2), y)) == pytest.approx((1 + 1 + 0 + 1) / 4)
    assert made.scores(torch.tensor([[1.0, -1.0]])).tolist() == [[7.0, -5.0]]


@pytest.mark.parametrize("y", [np.ones(5), np.array([0, 1, 1, 0, 1])])
@pytest.mark.parametrize("loss", [None, "BCEWithLogitsLoss"])
def test_the_constant_of_two_classes_has_firths_penalty(y: np.ndarray, loss: str | None) -> None:
    made, logits = criterion(2, loss=loss), 2 * SCORES[:5, :1]
    outputs = logits if loss else np.hstack([logits / 2, 1.5 * logits])

    def minus_likelihood(b: float) -> float:
        p = expit(logits[:, 0].astype(float) + b)
        return -np.log(np.where(y, p, 1 - p)).sum() - np.log((p * (1 - p)).sum()) / 2

    def constant(outputs: np.ndarray) -> float:
        found = made.correction(torch.tensor(outputs, dtype=torch.float64), torch.tensor(y).long())
        assert found[:-1].tolist() == [0.0] * (not loss)
        return float(found[-1])

    assert constant(outputs) == pytest.approx(minimize_scalar(minus_likelihood).x, abs=1e-5)
    odds = (y.sum() + 0.5) / (len(y) - y.sum() + 0.5)
    assert constant(0 * outputs) == pytest.approx(np.log(odds)) and np.isnan(constant(outputs * np.nan))


def test_the_constant_of_values_is_the_mean_residual() -> None:
    made = Criterion(Task("regression", 2, mean=(1.0, 2.0), std=(3.0, 4.0)))
    outputs, targets = X[:, :2], X[:, 1:] * 5
    moved = made.scores(outputs + made.correction(outputs, targets))
    assert torch.allclose((targets - moved).mean(0), torch.zeros(2), atol=1e-5)


def test_shares_of_classes() -> None:
    """Those of the training rows of all clients that train; no file has them."""
    data = dataset()
    rows = replace(partition(data, (12, 7, 20, 9)), fitted=3)
    y = data.y[np.concatenate(rows.train[:3])]
    task = task_of(Settings(), data, rows)
    assert task.shares == pytest.approx(np.bincount(y) / len(y)) and "shares" not in task.record()


def test_balanced_weights() -> None:
    y = np.array([0, 0, 0, 2, 2, 3])
    task = Task("classification", 4, TaskChoice(class_weights="balanced"))
    held = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=y)
    assert task.balanced(counts_of(task, y)) == pytest.approx((held[0], 1.0, held[1], held[2]))
    labels = np.array([[1, 0, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    assert Task("multilabel", 3).balanced(counts_of(Task("multilabel", 3), labels)) == pytest.approx((1 / 3, 1.0, 3.0))
    binary = Task("classification", 2, TaskChoice(loss="BCEWithLogitsLoss"))
    assert binary.balanced(counts_of(binary, np.array([0, 0, 0, 1]))) == (3.0,)


def test_weights_of_each_client() -> None:
    made = criterion(class_weights="balanced_client")
    y = torch.tensor([0, 0, 0, 1])
    made.weigh(y)
    assert made.state_dict()["loss.weight"].tolist() == pytest.approx([4 / (2 * 3), 4 / 2, 1.0])
    weights = np.array([4 / 6, 2.0])[y.numpy()]
    terms = log_softmax(SCORES[:4].astype(np.float64), 1)[range(4), y.numpy()]
    assert float(made(X[:4], y)) == pytest.approx(-(weights * terms).sum() / weights.sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "choice", "words"),
    [
        ("classification", {"loss": "CrossEntropyLos"}, ("task.loss", "CrossEntropyLoss")),
        ("classification", {"loss": "no_such_module.Loss"}, ("task.loss", "no_such_module")),
        ("classification", {"loss": "MultiMarginLoss", "options": {"q": 2}}, ("task.options", "q")),
        ("classification", {"loss": "MultiMarginLoss", "options": {"p": 3}}, ("MultiMarginLoss", "3")),
        ("classification", {"loss": "MultiMarginLoss", "label_smoothing": 0.1}, ("label_smoothing",)),
        ("regression", {"loss": "CrossEntropyLoss"}, ("task.loss", "regression")),
        ("regression", {"class_weights": "balanced"}, ("task.class_weights", "regression")),
    ],
    ids=str,
)
def test_what_does_not_exist_is_refused(name: Any, choice: dict[str, Any], words: tuple[str, ...]) -> None:
    with refusing(*words):
        criterion(3, name, **choice)
