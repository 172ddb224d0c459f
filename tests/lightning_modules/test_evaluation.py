"""What a host returns for its models' predictions, and class means of features."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss
from support import rounds, softmax, world
from torch import nn

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.predictions import confusion
from lightning_modules.prototypes import class_means
from pflsim.data.federated import FORWARD_BATCH, Examples
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
        request = EvalRequest("global", "received", tuple(range(w.clients)), ("test", "val"), pooled=("test",))
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


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_against_numpy(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORWARD_BATCH, "cpu", batch_size)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, size=(11, 1, 2, 3)).astype(np.uint8), np.array([0, 2, 2, 0, 4, 4, 4, 0, 2, 4, 0])
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 2, 1).double()
    found = class_means(lambda v: layer(v.double()), Examples(torch.from_numpy(x), torch.from_numpy(y)), 5)
    assert found.counts.tolist() == [4, 0, 3, 0, 4]
    features = layer(torch.from_numpy(x).double() / 255).detach().flatten(1).numpy()
    for j in (0, 2, 4):
        np.testing.assert_allclose(found.means[j].numpy(), features[y == j].mean(0), rtol=1e-5, atol=1e-7)
    assert not found.means.requires_grad
