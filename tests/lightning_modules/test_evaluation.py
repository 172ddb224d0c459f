"""What a host returns for its models' predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss
from support import rounds, softmax, world

from lightning_modules.evaluation import confusion
from lightning_modules.methods.fedavg import FedAvg
from pflsim.engine.execution import EvalRequest
from pflsim.servers.fedavg import FedAvg as FedAvgRule
from pflsim.tasks.metrics import metrics_of
from pflsim.tasks.task import Task
from pflsim.types import EvalRow

NAMES = ("balanced_accuracy", "macro_f1", "nll")


def test_confusion_counts_pairs_of_classes_and_predictions() -> None:
    scores = torch.tensor([[0.0, 0, 1], [math.nan, 0, 0], [0, 0, 2]])
    assert confusion(scores, torch.tensor([1, 0, 1])) == ((0, -1, 1), (1, 2, 2))


def test_a_host_computes_the_metrics_of_its_models() -> None:
    """Of every split, with no change to the counts; the scores of test examples only, for what is pooled."""
    results: dict[tuple[str, ...], list[EvalRow]] = {}
    for names in ((), NAMES):
        w = world(FedAvg, FedAvgRule(), metrics=metrics_of(names, Task("classification", 3)))
        executor = w.inline()
        rounds(executor, 2, w.clients)
        request = EvalRequest("global", "received", tuple(range(w.clients)), ("test", "val"), pooled=True)
        results[names] = executor.evaluate(request)
    for plain, row in zip(results[()], results[NAMES], strict=True):
        assert plain.metrics == {} and (plain.correct, plain.loss) == (row.correct, row.loss)
        examples, net = executor.host.shards[row.client].split(row.split), executor.host.module.net.eval()
        net.load_state_dict({k.removeprefix("net."): v for k, v in executor.server.global_message().weights.items()})
        with torch.no_grad():
            scores = torch.cat([net(inputs) for inputs, _ in examples.in_turn(None)]).numpy()
        y, guesses = examples.y.numpy(), scores.argmax(1)
        occur = [*{*y.tolist(), *guesses.tolist()}]
        expected = {
            "balanced_accuracy": np.mean([np.mean(guesses[y == c] == c) for c in set(y.tolist())]),
            "macro_f1": f1_score(y, guesses, labels=occur, average="macro", zero_division=0),
            "nll": log_loss(y, softmax(scores.astype(np.float64)), labels=range(3)),
        }
        assert row.metrics == pytest.approx(expected, abs=1e-6)
        assert (row.outcomes is not None) == (row.split == "test")
        assert row.split == "val" or np.array_equal(row.outcomes[1], y)  # type: ignore[index]
