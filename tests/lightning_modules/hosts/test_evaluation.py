"""Clients that are evaluated together have the rows that each has alone, and the client that fails is named."""

import math
from dataclasses import replace

import pytest
import torch
from support import exact, inline, prepared, rounds, states
from torch import Tensor

from lightning_modules.hosts.evaluation import GroupPredictor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.engine.execution import EvalRequest
from pflsim.errors import ClientError
from pflsim.messages import Uplink

UNEVEN = ["data=digits", "clients=12", "rounds=1", "local_steps=1", "partition=dirichlet", "partition.alpha=0.3"]
UNEVEN += ["split.validation=0.1", "executor=inline"]
NORMED = ["model=cnn_bn", "model.channels=[2,3]", "model.kernel=3", "model.padding=1", "model.hidden=6"]


@pytest.mark.parametrize(
    ("overrides", "models"),
    [
        (["method=ditto"], 3),
        (["method=fedper", "eval.metrics=[auroc,macro_f1,nll]"], 3),
        (["method=fedavg", *NORMED], 2),  # convolutions on a CPU: only the model that all have
        (["eval.batch_size=10"], 1),
        (["task.class_weights=balanced", "eval.batch_size=10", "method=fedavg"], 2),
        (["task.class_weights=balanced", "init=per_client"], 3),
        (["task.class_weights=balanced_client"], 0),
        (["buffers=recalibrate", *NORMED], 0),
        (["task=regression", "task.standardize_target=true"], 3),
        (["task=regression", "task.loss=HuberLoss", "eval.metrics=[r2]"], 3),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_equals_one_by_one(overrides: list[str], models: int, double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(*UNEVEN, *overrides)
    assert len({len(rows) for rows in made.partition.test}) > 4  # uneven, so that stacks are padded
    executor = inline(replace(made, dataset=exact(made.dataset)))
    rounds(executor, 1, 12)
    used, predict = set[tuple[str, str]](), GroupPredictor.predict
    everyone = tuple(range(12))
    for model, phase in (("personal", "trained"), ("personal", "received"), ("global", "received")):

        def noticed(self, *arguments, seen=(model, phase)):  # type: ignore[no-untyped-def]
            for found in predict(self, *arguments):
                used.add(seen)
                assert len(found.clients) > 1 or len(found.sizes) == 1
                yield found

        monkeypatch.setattr(GroupPredictor, "predict", noticed)
        results = []
        for groups in ((everyone,), ()):
            executor.factory = replace(executor.factory, groups=groups)
            request = EvalRequest(model, phase, everyone, ("test", "val"), 1, confusion=True, pooled=("test",))  # type: ignore[arg-type]
            results.append(executor.evaluate(request))
        for together, alone in zip(*results, strict=True):
            assert math.isclose(together.loss, alone.loss, rel_tol=1e-9)
            assert together.metrics == pytest.approx(alone.metrics)
            assert replace(together, loss=alone.loss, metrics=alone.metrics) == alone
            for one, other in zip(together.outcomes or (), alone.outcomes or (), strict=True):
                torch.testing.assert_close(one, other)
    assert len(used) == models


class Masked(FedAvg):
    """Predicts only the classes that a client has, and counts its predictions; all parameters travel."""

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self.register_buffer("mask", torch.ones(10, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros(()))

    def reply(self, shard: Shard) -> Uplink:
        self.mask.copy_(torch.bincount(shard.train.y, minlength=10) > 0)
        return super().reply(shard)

    def predict(self, inputs: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().predict(inputs).where(self.mask, -100.0)


def test_private_buffers_decide_and_are_not_written(double: None) -> None:
    made = prepared(*UNEVEN, method=Masked)
    executor = inline(replace(made, dataset=exact(made.dataset)))
    rounds(executor, 1, 12)
    for phase in ("trained", "received"):
        results = []
        for groups in ((tuple(range(12)),), ()):
            executor.factory = replace(executor.factory, groups=groups)
            request = EvalRequest("personal", phase, tuple(range(12)), ("test",), 1)  # type: ignore[arg-type]
            results.append([(row.correct, round(row.loss, 9)) for row in executor.evaluate(request)])
        assert results[0] == results[1]
    assert not any(state["calls"] for state in states(executor).values())


def test_clients_that_have_not_trained_share_a_model_whatever_stores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(*UNEVEN, "method=ditto", "fraction=0.25")
    executor = inline(replace(made, factory=replace(made.factory, groups=(tuple(range(12)),))))
    rounds(executor, 1, 12, 0.25)
    pooled, pool = list[int](), GroupPredictor._pooled
    monkeypatch.setattr(GroupPredictor, "_pooled", lambda *own: (pooled.append(len(own[1])), pool(*own))[1])
    request = EvalRequest("personal", "trained", tuple(range(12)), ("test",), 1)
    before = executor.evaluate(request)
    for client in range(12):  # as after resuming
        state = executor.host.states[client]
        executor.host.states[client] = {name: value.clone() for name, value in state.items()}
    assert executor.evaluate(request) == before
    assert pooled == [9, 9]


class Failing(FedAvg):
    """Fails for a client whose head has a large bias."""

    def predict(self, inputs: Tensor) -> Tensor:
        if self.net.head.bias.max() > 1e3:
            raise ZeroDivisionError("no luck")
        return super().predict(inputs)


class Caching(FedAvg):
    """Keeps a value of the first client."""

    first: Tensor | None = None

    def predict(self, inputs: Tensor) -> Tensor:
        if self.first is None:
            self.first = inputs.mean()
        return super().predict(inputs)


def test_values_that_pass_to_other_clients_are_noticed() -> None:
    made = prepared("data=digits", "clients=4", "executor=inline", method=FedAvg)
    executor = inline(replace(made, factory=replace(made.factory, client=Caching)))
    executor.factory = replace(executor.factory, groups=((0, 1, 2, 3),))
    with pytest.raises(ClientError, match=r"self\.first"):
        executor.evaluate(EvalRequest("personal", "trained", (0, 1, 2, 3), ("test",), 1))


def test_only_the_client_that_fails_is_dropped() -> None:
    made = prepared("data=digits", "clients=4", "on_client_error=drop", "executor=inline", method=Failing)
    executor = inline(made)
    executor.factory = replace(executor.factory, groups=((0, 1, 2, 3),))
    executor.states[2] = {key: value + 1e4 for key, value in executor.states[2].items()}
    rows = executor.evaluate(EvalRequest("personal", "trained", (0, 1, 2, 3), ("test",), 1))
    assert [row.client for row in rows] == [0, 1, 3]
    assert executor.faults.take() == {2: "error"}
