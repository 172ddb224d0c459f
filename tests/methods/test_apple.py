"""APPLE: its rounds by NumPy, its special cases, and what travels."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, backward, batches, close, evaluates, mean, plus, scores, slope, started, values
from support import (
    ALL,
    World,
    after,
    inline,
    nets,
    normed,
    play,
    prepared,
    rounds,
    same,
    states,
    world,
)
from torch import nn

from lightning_modules.methods.apple import APPLE
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.local import Local
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, FinetuneTask
from pflsim.messages import Message, payload_bytes
from pflsim.servers.apple import APPLE as Server
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.local import Local as LocalServer

TRAINING = Training(lr=0.4, momentum=0.5, batch_size=4, lr_decay=0.8, rounds=4, clients=4)
P0 = np.array(SIZES) / sum(SIZES)


def apple(*, training: Training = TRAINING, **settings: Any) -> World:
    where = {key: settings.pop(key) for key in ("model", "sizes") if key in settings}
    return world(partial(APPLE, **settings), Server(), training=training, **where)


def test_rounds_by_hand() -> None:
    """Joint steps on the own core and p, with rates of their own; absent clients' cores and weights stay."""
    mu, p_lr = 0.3, 0.05
    with started(apple(mu=mu, p_lr=p_lr, pull_rounds=0.5)) as executor:
        cores = [values(executor.server.state.cores[i], "core") for i in ALL]
        p, judged = [P0.copy() for _ in ALL], {}
        for t, cohort in enumerate(((0, 2), ALL, (1, 2, 3), ALL), start=1):
            pull, rate = mu * (1, 10**-1.5, 0, 0)[t - 1], 0.8 ** (t - 1)
            sent = list(cores)
            for i in cohort:
                models, own = list(sent), p[i]
                past, past_p = [np.zeros_like(value) for value in sent[i]], np.zeros(4)
                for x, y in batches(executor, i, t):
                    mixed = [np.tensordot(own, np.stack(each), 1) for each in zip(*models, strict=True)]
                    by_mixture = backward(mixed, x, slope(scores(mixed, x), y))
                    by_p = [
                        sum((g * w).sum() for g, w in zip(by_mixture, model, strict=True)) for model in models
                    ] + 2 * pull * (own - P0)
                    past = [0.5 * old + own[i] * new for old, new in zip(past, by_mixture, strict=True)]
                    past_p = 0.5 * past_p + by_p
                    models[i], own = plus(models[i], -0.4 * rate, past), own - p_lr * rate * past_p
                cores[i], p[i] = models[i], own
                judged[i] = [np.tensordot(own, np.stack(each), 1) for each in zip(*models, strict=True)]
            play(executor, t, cohort)
            for i, state in states(executor).items():
                close(values(executor.server.state.cores[i], "core"), cores[i])
                if i in judged:
                    np.testing.assert_allclose(state["p"], p[i], rtol=1e-10)
                    close(values(state), judged[i])
        evaluates(executor, 4, lambda i, x: scores(judged[i], x))
        mixed = [[np.tensordot(p[i], np.stack(each), 1) for each in zip(*cores, strict=True)] for i in ALL]
        evaluates(executor, 4, lambda i, x: scores(mixed[i], x), "personal received")
        assert np.abs(np.array(p) - P0).min() > 1e-4


class Weight(Net):
    """Scores (w, 0) of one weight w."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(1, 2, bias=False), (1,), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor([1.0, 0.0])


def test_loss_and_gradient_of_one_weight() -> None:
    """Six digits of a program of the definition: y = 0, cores 1 and 3, the first is the own one, c = 0.1."""
    module = APPLE(Weight(), Training(rounds=100, clients=2))
    module.p.data, module.known = torch.tensor([0.5, 0.5]), torch.tensor(True)
    cores = {f"core/{j}/core.head.weight": torch.full((2, 1), value) for j, value in enumerate((1.0, 3.0))}
    module.core.head.weight.data.fill_(1)  # type: ignore[union-attr]
    module.receive(Message(extra={**cores, "p_0": torch.tensor([0.25, 0.75])}))
    module.before_training(apple().inline().host.shards[0])
    terms = module.objective((torch.ones(1, 1), torch.tensor([0])))
    total = torch.stack([*terms.values()]).sum()
    by_core, by_p = torch.autograd.grad(total, [module.core.head.weight, module.p])  # type: ignore[list-item]
    assert total.item() == pytest.approx(0.139428, abs=1e-6)
    np.testing.assert_allclose(by_core.flatten(), [-0.059601, 0], atol=1e-6)
    np.testing.assert_allclose(by_p, [-0.069203, -0.407609], atol=1e-6)


@pytest.mark.parametrize(
    ("decay", "expected"), [("exponential", [0.1, 0.003162, 0.0002, 0]), ("cosine", [0.1, 0.05, 0.002447, 0])]
)
def test_coefficients_of_the_pull(decay: Any, expected: list[float]) -> None:
    module = APPLE(Weight(), Training(rounds=100), decay=decay)
    found = []
    for t in (1, 6, 10, 11):
        module.round_number = t
        found.append(module.pull())
    np.testing.assert_allclose(found, expected, atol=5e-7)
    for share, of, last in ((0.29, 100, 29), (0.0, 100, 0), (1.0, 7, 7)):
        assert APPLE(Weight(), Training(rounds=of), pull_rounds=share).pull_end == last


# Must hold ------------------------------------------------------------------------------------------------------------


def test_weight_on_the_own_core_alone_is_local() -> None:
    """To the bit, if p stays."""
    executor = apple(mu=0, p_lr=0).inline()
    for i, state in states(executor).items():
        executor.states[i] = {**state, "p": torch.eye(4)[i], "known": torch.tensor(True)}
    rounds(executor, 3, 4, 0.75)
    alone = after(world(Local, LocalServer(), training=TRAINING), fraction=0.75)
    assert same(nets({i: dict(state) for i, state in states(executor).items()}), nets(alone))


def test_equal_weights_follow_fedavg() -> None:
    """With equal numbers of examples, one step in a round, and N times the rate."""
    one = replace(TRAINING, batch_size=12, momentum=0.0)
    sizes = (12,) * 4
    with started(apple(training=replace(one, lr=1.6), mu=0, p_lr=0, sizes=sizes)) as executor:
        rounds(executor, 3, 4)
        with started(world(FedAvg, FedAvgServer(), training=one, sizes=sizes)) as other:
            rounds(other, 3, 4)
            found = mean([values(core, "core") for core in executor.server.state.cores], [1] * 4)
            close(found, values(other.server.state.weights), 1e-12)


def test_a_strong_pull_holds_the_weights() -> None:
    for mu, most in ((1e6, 1e-5), (0.0, 1.0)):
        found = after(apple(mu=mu, p_lr=1e-7 if mu else 0.1, pull_rounds=1.0))
        change = max(np.abs(state["p"].numpy() - P0).max() for state in found.values())
        assert (0 if mu else 0.01) < change < most


def test_what_travels() -> None:
    """Up the core and its statistics; down all cores and p_0, as one object for all."""
    executor = apple(model=normed).inline()
    trained, sent = play(executor, 1)
    size = sum(value.nbytes for value in executor.server.state.cores[0].values())
    downlinks = executor.server.downlinks(ALL)
    assert len({id(downlink) for downlink in downlinks.values()}) == 1
    assert payload_bytes(downlinks[0]) == 4 * size + 4 * 4
    assert {report.up_bytes for report in trained.reports} == {size}
    assert sent[1].weights.keys() == executor.server.state.cores[1].keys()


# Decisions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["aggregate", "local", "recalibrate"])
def test_running_statistics(buffers: Any) -> None:
    """They start as the mean of the cores' by p_0, whatever p is, and the core has those after training."""
    executor = apple(model=normed, training=replace(TRAINING, buffers=buffers), p_lr=0.5).inline()
    rounds(executor, 1, 4)
    name, found = "body.2.running_mean", states(executor)
    for i in ALL:
        assert torch.equal(found[i][f"core.{name}"], found[i][f"net.{name}"])
    module: Any = executor.factory.build()
    module.load_state_dict(dict(found[1]))
    module.receive(executor.server.downlinks([1])[1])
    shard = executor.host.shards[1]
    module.before_training(shard)
    expected = found[1][f"net.{name}"]
    if buffers == "aggregate":
        expected = torch.stack([float(P0[i]) * found[i][f"net.{name}"] for i in ALL]).sum(0)
    if buffers == "recalibrate":
        expected = module.net.body[:2](shard.train.batch(slice(None))[0]).mean(0)
    torch.testing.assert_close(module.net.get_buffer(name), expected)


def test_a_newcomer_trains_its_weights_alone() -> None:
    """From p_0, on the cores of the clients that have trained; its own core has no part, before and after."""
    made = prepared(
        "method=apple", "data=digits", "clients=5", "eval.holdout_clients=1", "model.hidden=[8]", "method.p_lr=0.1"
    )
    executor = inline(made)
    rounds(executor, 2, 4)
    sent = executor.send([4], joining=True)
    start, cores = executor.server.state.start, executor.server.state.cores
    before = states(executor)[4]
    executor.store(executor.run(FinetuneTask(2, 1), sent))
    after = states(executor)[4]
    assert all(torch.equal(after[key], before[key]) for key in before if key.startswith("core."))
    assert after["p"][4] == 0 and not torch.allclose(after["p"][:4], start)
    for key in cores[0]:
        expected = sum(after["p"][j] * cores[j][key] for j in range(4))
        torch.testing.assert_close(after[f"net.{key.removeprefix('core.')}"], expected)


def test_initial_values_of_each_client() -> None:
    """They are those of all core models, so that a client that has not trained is judged by them."""
    made = prepared("method=apple", "data=digits", "clients=4", "model.hidden=[8]", "init=per_client")
    executor = inline(made)
    rows = {
        phase: executor.evaluate(EvalRequest("personal", phase, ALL, ("test",), 1), executor.send(ALL))
        for phase in ("trained", "received")
    }
    for one, other in zip(*rows.values(), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)


@pytest.mark.slow
def test_clients_of_two_tasks_find_each_other() -> None:
    """With permuted labels, a client's weights of the other group's cores fall below those of its own group."""
    few = ["data=digits", "clients=4", "partition=iid", "model.hidden=[32]", "batch_size=20", "seed=4", "lr=0.1"]
    made = prepared("method=apple", *few, "shift=permuted_labels", "shift.groups=2", "method.p_lr=0.02", "rounds=20")
    executor = inline(made)
    rounds(executor, 20, 4)
    kinds = np.array(made.partition.shift.groups)
    for i, state in states(executor).items():
        p = state["p"].numpy()
        assert p[(kinds == kinds[i])].mean() > p[kinds != kinds[i]].mean() + 0.1
