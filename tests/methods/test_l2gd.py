"""L2GD: the algorithm by hand, and that models travel only when the coin turns from local to aggregation."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import close, examples, gradient, mean, plus, started, values
from support import ALL, World, normed, prepared, rounds, same, states, trained_states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.l2gd import L2GD
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.seeding import coin
from pflsim.servers.l2gd import L2GD as Server

TRAINING = Training(lr=0.1, batch_size=4)
MODEL = (16 * 5 + 5 + 5 * 3 + 3) * 4
"""Bytes of the model."""
LAW = "00111011010"
"""Seed 0, p=0.5: the coins of rounds 1 to 11; 1 is aggregation."""
Found = dict[int, dict[str, torch.Tensor]]


def l2gd(p: float = 0.5, lam: float = 1.0, training: Training = TRAINING, **settings: Any) -> World:
    return world(partial(L2GD, p=p, lam=lam), Server(p=p), training=training, seed=training.seed, **settings)


def nets(found: Found) -> Found:
    return {c: {k: v.clone() for k, v in s.items() if k.startswith("net.")} for c, s in found.items()}


def step(executor: InlineExecutor, t: int, cohort: Any = ALL) -> tuple[set[int], set[int]]:
    """Round t; who sent, and who was sent, a whole model. Nothing else travels."""
    sent = executor.send(cohort)
    trained = executor.run(TrainTask(t), sent)
    executor.fuse(trained)
    up = {r.client: r.up_bytes for r in trained.reports}
    assert set(up.values()) | set(sent.down_bytes.values()) <= {0, MODEL}
    return {c for c, b in up.items() if b}, {c for c, b in sent.down_bytes.items() if b}


def test_the_coin() -> None:
    """A function of seed and round, with the right odds; and the contract test's rounds 1 to 3 are of both kinds."""
    assert "".join(str(int(coin(0, t, 0.5))) for t in range(1, 12)) == LAW
    assert [coin(0, t, 0.2) for t in (1, 2, 3)] == [False, False, True], "the default p of the contract test"
    draws = [coin(seed, t, 0.3) for seed in range(20) for t in range(1, 201)]
    assert abs(np.mean(draws) - 0.3) < 4 * (0.3 * 0.7 / len(draws)) ** 0.5
    assert not any(coin(0, t, 0.0) for t in range(1, 500))


@pytest.mark.parametrize(("seed", "law"), [(0, LAW), (32, "11011")])
def test_models_travel_only_when_the_coin_turns(seed: int, law: str) -> None:
    """Up after a local round before an aggregation, and down in it; nothing before the first local round."""
    assert "".join(str(int(coin(seed, t, 0.5))) for t in range(1, len(law) + 1)) == law
    executor = l2gd(training=Training(lr=0.1, batch_size=4, seed=seed), init="per_client").inline()
    start = states(executor)
    for t, turns in enumerate(zip("1" + law, law[:-1], law[1:], strict=False), start=1):
        before, now = "".join(turns[:2]), "".join(turns[1:])
        assert step(executor, t) == (set(ALL if now == "01" else ()), set(ALL if before == "01" else ()))
        assert same(start, states(executor)) == ("0" not in law[:t])


def test_eleven_rounds_by_hand() -> None:
    """Algorithm 1 in NumPy float64: full gradients, x̄ of the moment, stepsize α = n·lr."""
    n, lr, lam, p = 4, 0.2, 1.3, 0.5
    alpha, training = n * lr, Training(lr=lr, lr_decay=0.9, batch_size=100, local_steps=1)
    with started(l2gd(p, lam, training)) as executor:
        x = [values(states(executor)[client]) for client in ALL]
        for t, face in enumerate(LAW):
            step = alpha * 0.9**t / n
            if face == "0":
                x = [plus(w, -step / (1 - p), gradient(w, *examples(executor, i))) for i, w in enumerate(x)]
            else:
                common = mean(x, [1] * n)
                x = [plus(w, step * lam / p, plus(common, -1, w)) for w in x]
        rounds(executor, len(LAW), 4)
        for client, state in states(executor).items():
            close(values(state), x[client])


def test_a_client_gets_the_mean_when_it_first_needs_it() -> None:
    """Partial participation: in rounds 3 to 5, whoever was not there yet is sent the mean, once."""
    executor = l2gd(lam=5.0).inline()
    cohorts = [(0, 1, 2), (1, 2), (0, 1), (0, 3), (0, 2, 3)]
    found = [step(executor, t, cohort) for t, cohort in enumerate(cohorts, start=1)]
    assert found == [(set(), set()), ({1, 2}, set()), (set(), {0, 1}), (set(), {3}), (set(), {2})]
    mean = executor.server.state.weights
    for client in ALL:  # lr·λ/p = 1: all the way
        assert all(torch.equal(states(executor)[client][k], v) for k, v in mean.items())


def test_overshooting_is_refused_before_anything_starts() -> None:
    prepared("method=l2gd", "method.p=0.5", "method.lam=2.5", "lr=0.2")
    with pytest.raises(SettingsError, match=r"method\.lam=2\.5.*1\.125 "):
        prepared("method=l2gd", "method.p=0.5", "method.lam=2.5", "lr=0.225")


@pytest.mark.parametrize("buffers", ["aggregate", "local", "recalibrate"])
def test_running_statistics_in_an_aggregation_round(buffers: Any) -> None:
    """Aggregated ones move as the parameters do, local ones not at all, the others are measured after every step."""
    training = Training(lr=0.1, batch_size=5, buffers=buffers)
    executor = l2gd(lam=2.0, training=training, model=normed).inline()
    rounds(executor, 3, 4)
    before = nets(states(executor))
    sent = executor.send(ALL)
    assert set(sent.down_bytes.values()) == {0}, "round 4 is the second aggregation in a row"
    after = trained_states(executor, executor.run(TrainTask(4), sent))
    key = "net.body.2.running_var"
    for client, found in after.items():
        assert not torch.equal(found["net.head.weight"], before[client]["net.head.weight"])
        own = before[client][key]
        if buffers == "aggregate":
            own = own + 0.4 * (executor.server.state.weights[key] - own)
        if buffers == "recalibrate":
            inputs = executor.host.shards[client].train.batch(slice(None))[0].flatten(1)
            own = (inputs @ found["net.body.1.weight"].T).var(0)
        else:
            assert torch.equal(
                found["net.body.2.num_batches_tracked"], before[client]["net.body.2.num_batches_tracked"]
            )
        torch.testing.assert_close(found[key], own, rtol=1e-5, atol=1e-6)


def test_the_mean_that_comes_is_kept_beside_the_model() -> None:
    """Under recalibrate, too, it moves nothing of the net; a newcomer's net is x̄, with statistics of its own data."""
    w = l2gd(training=Training(lr=0.1, batch_size=5, buffers="recalibrate"), model=normed)
    executor = w.inline()
    rounds(executor, 2, 4)
    before, host, request = states(executor), executor.host, EvalRequest("personal", "received", ALL, ("test",), 3)
    mean = executor.downlink(executor.send(ALL).downlinks[1])
    assert mean.weights
    trained = executor.evaluate(EvalRequest("personal", "trained", ALL, ("test",), 3))
    received = executor.evaluate(request)
    assert [(r.client, r.correct, r.loss) for r in received] == [(r.client, r.correct, r.loss) for r in trained]
    for joining in (False, True):
        with host._client(TrainTask(3), 1, "train") as own:
            host._receive(own, mean, joining=joining)
        found = {k: v for k, v in host.module.state_dict().items() if k.startswith("net.")}
        if not joining:
            assert all(torch.equal(v, before[1][k]) for k, v in found.items())
    inputs = host.shards[1].train.batch(slice(None))[0].flatten(1)
    assert all(torch.equal(found[k], v) for k, v in mean.weights.items())
    fresh = inputs @ mean.weights["net.body.1.weight"].T + mean.weights["net.body.1.bias"]
    torch.testing.assert_close(found["net.body.2.running_mean"], fresh.mean(0))


def test_a_newcomer_starts_from_the_mean_and_trains_whatever_the_coin_says() -> None:
    w = l2gd(p=0.999, lam=0.1)
    module, sent = w.factory.build(), {k: v + 1 for k, v in w.federation.initial.items()}
    module.receive(Message(weights=sent))
    assert module.aggregates(1) and torch.equal(
        module.get_parameter("net.head.bias"), w.federation.initial["net.head.bias"]
    )
    module.join(Message(weights=sent))
    assert torch.equal(module.get_parameter("net.head.bias"), sent["net.head.bias"])
    assert not module.aggregates(1) and module.schedule()
