"""GPFL: its equations by NumPy in float64, and what must hold of it."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import differences, losses
from support import World, states, world

from lightning_modules.methods.gpfl import GPFL
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Shard
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message
from pflsim.servers.gpfl import GPFL as Server

LR, LAM, MU = 0.2, 0.7, 0.3
LABELS = np.array([0, 2, 2, 0, 1, 0, 0, 2])


def gpfl(*, extra: dict[str, Any] | None = None, **settings: Any) -> World:
    return world(partial(GPFL, **settings), Server(), **(extra or {}))


def shard_of(labels: np.ndarray) -> Shard:
    none = Examples(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64))
    own = Examples(torch.zeros(len(labels), 1, 4, 4), torch.from_numpy(labels))
    return Shard(0, 3, own, none, none)


# Equations --------------------------------------------------------------------------------------------------------


def valve_by_hand(w: dict[str, np.ndarray], features: np.ndarray, condition: np.ndarray) -> np.ndarray:
    """ReLU((γ+1)·f + β), γ and β by layer normalisation of ReLU of a linear layer (eqs. 3, 4)."""

    def generated(name: str) -> np.ndarray:
        hidden = np.maximum(w[f"valve.{name}.0.weight"] @ condition + w[f"valve.{name}.0.bias"], 0)
        normed = (hidden - hidden.mean()) / np.sqrt(hidden.var() + 1e-5)
        return w[f"valve.{name}.2.weight"] * normed + w[f"valve.{name}.2.bias"]

    return np.maximum((generated("gamma") + 1) * features + generated("beta"), 0)


def terms_by_hand(
    w: dict[str, np.ndarray], fixed: np.ndarray, x: np.ndarray, y: np.ndarray
) -> dict[str, tuple[float, np.ndarray]]:
    """All terms of eq. 11, with the scores behind them; Ĉ and the client's shares of LABELS are fixed."""
    shares = np.array([(j == LABELS).mean() for j in range(3)])
    g, p = sum(fixed) / 3, sum(s * e for s, e in zip(shares, fixed, strict=True))
    f = np.maximum(x @ w["net.body.fc1.weight"].T + w["net.body.fc1.bias"], 0)
    guided, personal = valve_by_hand(w, f, g), valve_by_hand(w, f, p)
    logits = personal @ w["net.head.weight"].T + w["net.head.bias"]
    c = w["embeddings.weight"]
    cosine = np.array([[a @ e / np.sqrt((a @ a) * (e @ e)) for e in c] for a in guided])
    distance = np.array([np.sqrt(((a - fixed[j]) ** 2).sum()) for a, j in zip(guided, y, strict=True)])
    squares = sum((v**2).sum() for k, v in w.items() if k.startswith(("valve.", "embeddings.")))
    return {
        "ce": (losses(logits, y).mean(), logits),
        "angle": (losses(cosine, y).mean(), cosine),
        "magnitude": (LAM * distance.mean(), distance),
        "decay": (MU / 2 * squares, squares),
    }


def client() -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """A client with random values that has received embeddings and adopted them, and the same by hand."""
    w = gpfl(lam=LAM, mu=MU, extra={"training": Training(lr=LR, batch_size=8)})
    module = w.factory.build().double()
    rng = np.random.default_rng(11)
    weights = {k: rng.normal(0, 0.6, size=tuple(v.shape)) for k, v in module.named_parameters()}
    module.receive(Message(weights={k: torch.from_numpy(v) for k, v in weights.items()}))
    module.before_training(shard_of(LABELS))
    return module, weights, weights["embeddings.weight"].copy()


def test_objective_and_steps_by_hand() -> None:
    """Every term, and three steps along the gradient of their sum, by central differences of the NumPy terms."""
    module, weights, fixed = client()
    (phase,) = module.schedule()
    step = module.make_step(phase)
    assert {id(p) for p in step.parameters} == {id(p) for p in module.parameters()}, "all at once"
    rng = np.random.default_rng(1)
    for turn in range(3):
        x, y = rng.random((8, 16)), np.roll(LABELS, turn)
        batch = torch.from_numpy(x.reshape(8, 1, 4, 4)), torch.from_numpy(y)
        expected = terms_by_hand(weights, fixed, x, y)
        np.testing.assert_allclose(module.predict(batch[0]).detach().numpy(), expected["ce"][1], rtol=1e-9)
        found = module.optimise(batch, step)
        assert set(found) == set(expected)
        for name, (value, _) in expected.items():
            assert math.isclose(float(found[name]), float(value), rel_tol=1e-10), name

        def total(w: dict[str, np.ndarray] = weights, x: np.ndarray = x, y: np.ndarray = y) -> float:
            return sum(v for v, _ in terms_by_hand(w, fixed, x, y).values())

        gradient = {k: differences(total, v) for k, v in weights.items()}
        weights = {k: v - LR * gradient[k] for k, v in weights.items()}
        for key, value in weights.items():
            got = module.get_parameter(key).detach().numpy()
            np.testing.assert_allclose(got, value, rtol=1e-6, atol=2e-8, err_msg=key)
            weights[key] = got.copy()  # no error of the differences is carried on


# The conditions ---------------------------------------------------------------------------------------------------


def test_conditions_of_a_run() -> None:
    """In every round those of that round's downlink, which differ; evaluated as received, the newest."""
    w = gpfl()
    executor = w.inline()
    seen = []
    for t in (1, 2, 3):
        sent = executor.send(range(4))
        new = executor.downlink(sent.downlinks[0]).weights["embeddings.weight"].clone()
        executor.fuse(executor.run(TrainTask(t), sent))
        for c, state in states(executor).items():
            y = executor.host.shards[c].train.y
            shares = torch.bincount(y, minlength=3).double() / len(y)
            torch.testing.assert_close(state["personal"].double(), shares @ new.double(), rtol=1e-5, atol=1e-6)
        seen.append(states(executor)[1]["personal"])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])

    module, own = w.factory.build(), executor.host.shards[1]
    module.load_state_dict({**states(executor)[1], **executor.server.downlinks([1])[1].weights})
    embeddings = module.get_parameter("embeddings.weight").detach()
    module.personal.copy_(torch.bincount(own.train.y, minlength=3) / len(own.train) @ embeddings)  # type: ignore
    inputs, labels = own.test.batch(slice(None))
    expected = torch.nn.functional.cross_entropy(module.eval().predict(inputs), labels, reduction="sum")
    (row,) = executor.evaluate(EvalRequest("personal", "received", (1,), ("test",)))
    assert row.loss == pytest.approx(float(expected.detach()), rel=1e-5)
