"""Metrics besides accuracy, against sums over the raw predictions in numpy and against torchmetrics."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from support import rounds, softmax, world
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_f1_score

from lightning_modules.evaluation import METRICS, confusion, metrics_of, totals
from lightning_modules.methods.fedavg import FedAvg
from pflsim.config.settings import Eval
from pflsim.data.federated import Examples
from pflsim.engine.execution import EvalRequest
from pflsim.servers.fedavg import FedAvg as FedAvgRule
from pflsim.types import EvalRow

NAMES = ("balanced_accuracy", "macro_f1", "nll", "ece")


def by_hand(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Sum up everything example by example."""
    p = softmax(scores.astype(np.float64))
    guess, sure = p.argmax(1), p.max(1)
    recalls = [np.mean([g == c for g, y in zip(guess, labels, strict=True) if y == c]) for c in set(labels.tolist())]
    f1 = []
    for c in {*labels.tolist(), *guess.tolist()}:
        is_c, is_said = labels == c, guess == c
        tp, fp, fn = np.sum(is_said & is_c), np.sum(is_said & ~is_c), np.sum(~is_said & is_c)
        f1.append(tp / (tp + (fp + fn) / 2))
    error = 0.0
    for m in range(15):
        inside = [n for n in range(len(labels)) if m / 15 < sure[n] <= (m + 1) / 15]
        if inside:
            gap = np.mean([guess[n] == labels[n] for n in inside]) - np.mean([sure[n] for n in inside])
            error += len(inside) / len(labels) * abs(gap)
    nll = -np.mean([math.log(p[n, y]) for n, y in enumerate(labels)])
    return {"balanced_accuracy": np.mean(recalls), "macro_f1": np.mean(f1), "nll": nll, "ece": error}


def found(scores: np.ndarray, labels: np.ndarray, batch_size: int = 7) -> dict[str, float]:
    """What a host computes if a model has these scores."""
    outcomes: list[torch.Tensor] = []
    examples = Examples(torch.from_numpy(scores), torch.from_numpy(labels))
    _, loss = totals(lambda inputs: inputs, examples, batch_size, outcomes).tolist()
    return metrics_of(NAMES, outcomes, loss)


@pytest.mark.parametrize("present", [[0, 1, 2, 3, 4, 5], [1, 4], [3]], ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_metrics_equal_sums_over_the_predictions(present: list[int], scale: float) -> None:
    """Also if the client lacks classes, which its model predicts nevertheless."""
    draw = np.random.default_rng(len(present))
    labels = draw.choice(present, 60)
    scores = (scale * draw.normal(size=(60, 6)) + 2 * scale * np.eye(6)[labels]).astype(np.float32)
    assert len(present) == 6 or not {*scores.argmax(1).tolist()} <= set(present)
    metrics = found(scores, labels)
    assert metrics == pytest.approx(by_hand(scores, labels), rel=1e-5)
    p, y = torch.from_numpy(scores).softmax(1), torch.from_numpy(labels)
    assert metrics["macro_f1"] == pytest.approx(float(multiclass_f1_score(p, y, 6, "macro")), rel=1e-5)
    assert metrics["ece"] == pytest.approx(float(multiclass_calibration_error(p, y, 6, n_bins=15)), rel=1e-4)


def test_scores_that_are_not_finite_are_wrong_and_not_calibrated() -> None:
    scores = np.array([[5, 0, 0], [np.nan, 0, 0], [0, 0, np.inf]], np.float32)
    metrics = found(scores, np.array([0, 0, 2]))
    assert metrics["balanced_accuracy"] == (1 / 2 + 0) / 2
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert math.isnan(metrics["ece"]) and math.isnan(metrics["nll"])


def test_every_metric_is_a_choice_and_the_confusion_matrix_stays_as_it_was() -> None:
    choices = get_args(get_args(get_type_hints(Eval, include_extras=True)["metrics"])[0])
    assert choices == tuple(METRICS) == NAMES
    outcomes = [torch.tensor([[1, 2, 0.5], [0, -1, math.nan]]), torch.tensor([[1, 2, 0.9]])]
    assert confusion([each.double() for each in outcomes]) == ((0, -1, 1), (1, 2, 2))
    assert metrics_of(NAMES, [], 0.0) == {}


def test_a_host_computes_the_metrics_of_its_models() -> None:
    """Of every split, with no change to the counts."""
    results: dict[tuple[str, ...], list[EvalRow]] = {}
    for names in ((), NAMES):
        w = world(FedAvg, FedAvgRule(), metrics=names)
        executor = w.inline()
        rounds(executor, 2, w.clients)
        results[names] = executor.evaluate(EvalRequest("global", "received", tuple(range(w.clients)), ("test", "val")))
    for plain, row in zip(results[()], results[NAMES], strict=True):
        assert plain.metrics == {} and (plain.correct, plain.loss) == (row.correct, row.loss)
        examples, net = executor.host.shards[row.client].split(row.split), executor.host.module.net.eval()
        net.load_state_dict({k.removeprefix("net."): v for k, v in executor.server.global_message().weights.items()})
        with torch.no_grad():
            scores = torch.cat([net(inputs) for inputs, _ in examples.in_turn(None)]).numpy()
        assert row.metrics == pytest.approx(by_hand(scores, examples.y.numpy()), rel=1e-5)
