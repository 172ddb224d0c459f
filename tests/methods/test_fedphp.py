"""FedPHP: hints of the inherited model by their equations, the inheritance, and what it is at its limits."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import (
    SIZES,
    Arrays,
    backward,
    batches,
    close,
    evaluates,
    features,
    mean,
    plus,
    scores,
    slope,
    started,
    values,
)
from support import World, nets, normed, play, rounds, run_cohorts, same, softmax, states, steps_of, world

from lightning_modules.losses import adaptive_discrepancy, soft_cross_entropy
from lightning_modules.methods.fedphp import FedPHP
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest
from pflsim.servers.fedavg import FedAvg as Server

LR, LAM, TAU = 0.3, 0.3, 2.0
COHORTS = ((0, 1, 3), (0, 1), (0, 1, 3), (0,))
"""Client 2 never trains."""


def fedphp(model: Any = None, training: dict[str, Any] | None = None, **settings: Any) -> World:
    own = Training(**{"lr": LR, "batch_size": 4, "rounds": 4, "fraction": 0.5, **(training or {})})
    return world(partial(FedPHP, **settings), Server(), training=own, model=model)


def discrepancy(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The maximum mean discrepancy, pair by pair, and its gradient by x with the width fixed."""
    both, size = np.concatenate((x, y)), len(x)
    width = sum(((a - b) ** 2).sum() for a in both for b in both) / (4 * size**2 - 2 * size) + 1e-8
    rates = [4 / (width * 2**k) for k in range(5)]
    value, by_x = 0.0, np.zeros_like(x)
    for a in range(size):
        for b in range(size):
            for one, other, sign in ((x[a], x[b], 1), (y[a], y[b], 1), (x[a], y[b], -2)):
                value += sign * sum(np.exp(-rate * ((one - other) ** 2).sum()) for rate in rates)
            for other, sign in ((x[b], 2), (y[b], -2)):  # x[a] is in a row and in a column
                d = x[a] - other
                by_x[a] += sign * sum(np.exp(-rate * (d**2).sum()) * -2 * rate * d for rate in rates)
    return value / size**2, by_x / size**2


def trained(w: Arrays, v: Arrays, steps: Any, hint: str) -> tuple[Arrays, float]:
    """A client's model after its mini-batches, and the mean of the hint's term."""
    terms = []
    for x, y in steps:
        logits = scores(w, x)
        by_scores, by_features = (1 - LAM) * slope(logits, y), np.array(0.0)
        if hint == "kd":
            target, p = softmax(scores(v, x) / TAU), softmax(logits)
            by_scores += LAM * (p - target) / len(y)
            terms.append(-LAM * (target * np.log(p)).sum() / len(y))
        else:
            value, by_features = discrepancy(features(w, x), features(v, x))
            by_features = LAM * by_features
            terms.append(LAM * value)
        w = plus(w, -LR, backward(w, x, by_scores, by_features))
    return w, float(np.mean(terms))


@pytest.mark.parametrize("hint", ["kd", "mmd"])
def test_four_rounds_by_hand(hint: Any) -> None:
    """μ is 0, 0.4, 0.8 and 0.8 after a client's first rounds, since ⌊0.5·4⌋ = 2; absent clients keep v."""
    with started(fedphp(lam=LAM, hint=hint, temperature=TAU, most=0.8)) as executor:
        w = values(executor.server.state.weights)
        inherited: list[Arrays | None] = [None] * 4
        taken = [0] * 4
        for t, cohort in enumerate(COHORTS, 1):
            ends, terms = [], []
            for i in cohort:
                end, term = trained(w, inherited[i] or w, batches(executor, i, t), hint)
                mu = (0.0, 0.4, 0.8, 0.8)[taken[i]]
                inherited[i] = [mu * a + (1 - mu) * b for a, b in zip(inherited[i] or w, end, strict=True)]
                taken[i] += 1
                ends.append(end)
                terms.append(term)
            w = mean(ends, [SIZES[i] for i in cohort])
            done, _ = play(executor, t, cohort)
            np.testing.assert_allclose([r.losses[hint] for r in done.reports], terms, rtol=1e-7)
            close(values(executor.server.state.weights), w, 1e-9)
            for i, state in states(executor).items():
                assert int(state["taken"]) == taken[i]
                close(values(state, "inherited"), inherited[i] or values(state, "inherited"), 1e-9)
            evaluates(executor, t, lambda i, x, w=w: scores(inherited[i] or w, x), "personal received")
            evaluates(executor, t, lambda _, x, w=w: scores(w, x), "global received")


def test_hints_of_one_example() -> None:
    """A kernel width of 2: Σ_k exp(−4/2^k) = 1.906862."""
    target = torch.tensor([[4.0, 0.0]]).div(4).softmax(1)
    assert soft_cross_entropy(target, torch.tensor([[1.0, 0.0]])).item() == pytest.approx(0.582203, abs=1e-6)
    found = adaptive_discrepancy(torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))
    assert found.item() == pytest.approx(6.186276, abs=1e-6)


def test_equal_features_have_no_discrepancy() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = adaptive_discrepancy(x, x.detach().clone())
    (by_x,) = torch.autograd.grad(found, [x])
    assert abs(found.item()) < 1e-12 and by_x.abs().max() < 1e-12


def test_features_in_half_precision_lose_nothing_more() -> None:
    """With precision=bf16, kernels are computed in float32."""
    x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = adaptive_discrepancy(x.double(), y.double())
    assert adaptive_discrepancy(x, y).item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("taken", "fraction", "share"),
    [(0, 1.0, 0), (1, 1.0, 0.009), (50, 1.0, 0.45), (200, 1.0, 0.9), (1, 0.29, 0.9 / 29)],
)
def test_the_share_that_stays_grows_with_the_rounds_taken(taken: int, fraction: float, share: float) -> None:
    """Of 100 rounds, a client takes this fraction on average; 0.29·100 is below 29 in floating point."""
    executor = fedphp(normed, training={"rounds": 100, "fraction": fraction}).inline()
    module = executor.factory.build()
    module.taken.fill_(taken)
    for net, start in ((module.inherited, 1.0), (module.net, 0.0)):
        for value in net.state_dict().values():
            value.fill_(start)
    module.reply(executor.host.shards[0])
    found = [value for value in module.inherited.state_dict().values() if value.is_floating_point()]  # statistics too
    assert all(value.mean().item() == pytest.approx(share) for value in found)


def test_without_a_share_that_stays_it_is_the_last_trained_model() -> None:
    found = states(run_cohorts(fedphp(normed, most=0.0), COHORTS))
    own, inherited = nets(found), nets(found, "inherited")
    renamed = {c: {k.replace("inherited", "net", 1): v for k, v in s.items()} for c, s in inherited.items()}
    assert same({c: renamed[c] for c in (0, 1, 3)}, {c: own[c] for c in (0, 1, 3)})


def test_the_inherited_model_stays_as_it_is_in_training() -> None:
    """Its running statistics too, since it gives its hints in evaluation mode."""
    for hint in ("kd", "mmd"):
        seen = steps_of(fedphp(normed, hint=hint).inline())
        assert seen and not any(name.startswith("inherited.") for _, moved in seen for name in moved)


def test_a_client_that_never_trained_is_judged_by_measured_statistics() -> None:
    """With buffers=recalibrate."""
    executor = fedphp(normed, {"buffers": "recalibrate"}).inline()
    rounds(executor, 2, 4)
    executor.host.states[2] = dict(executor.factory.build().state_dict())
    message = executor.downlink(executor.send([2]).downlinks[2])
    with executor.host.module_for(EvalRequest("personal", "received", (2,), ("test",), 2), 2, message) as module:
        x = executor.host.shards[2].train.batch(slice(None))[0].flatten(1)
        layer, norm = module.inherited.body[1], module.inherited.body[2]
        torch.testing.assert_close(norm.running_mean, layer(x).mean(0), rtol=1e-4, atol=1e-5)
