"""FedEM: its rounds by NumPy, and its special cases."""

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
    examples,
    losses,
    mean,
    plus,
    scores,
    slope,
    started,
    values,
)
from support import ALL, World, inline, normed, play, prepared, rounds, softmax, states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedem import FedEM
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.engine.execution import EvalRequest
from pflsim.servers.fedavg import FedAvg as Server

LR = 0.4


def fedem(model: Any = None, training: Training | None = None, **settings: Any) -> World:
    training = training or Training(lr=LR, batch_size=4)
    return world(partial(FedEM, **settings), Server(), training=training, model=model)


def models(tensors: Any, count: int) -> list[Arrays]:
    return [values(tensors), *(values(tensors, f"others.{m}") for m in range(count - 1))]


def shares(nets: list[Arrays], pi: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """q [M, B] by Bayes' rule: of each model π times its probability of the label, over their sum."""
    joint = pi[:, None] * np.exp([-losses(scores(net, x), y) for net in nets])
    return joint / joint.sum(0)


def received(executor: InlineExecutor, client: int) -> tuple[Any, Shard]:
    """A client's module with the newest models, and its examples."""
    module, sent = executor.factory.build(), executor.send([client]).downlinks[client]
    assert sent is not None
    module.receive(executor.downlink(sent))
    return module, executor.host.shards[client]


@pytest.mark.parametrize(("count", "e_steps"), [(3, 1), (2, 2)])
def test_three_rounds_by_hand(count: int, e_steps: int) -> None:
    """E steps, joint local training and means; client 1 is absent at first, and its weights stay."""
    with started(fedem(components=count, e_steps=e_steps)) as executor:
        nets = models(executor.server.state.weights, count)
        pi = {client: np.full(count, 1 / count) for client in ALL}

        def e_step(client: int) -> tuple[np.ndarray, np.ndarray]:
            """The weights before and after the last E step."""
            old = new = pi[client]
            for _ in range(e_steps):
                old, new = new, shares(nets, new, *examples(executor, client)).mean(1)
            return old, new

        for t, cohort in ((1, (0, 2, 3)), (2, ALL), (3, (1, 2))):
            play(executor, t, cohort)
            own = {}
            for client in cohort:
                old, pi[client] = e_step(client)
                trained = nets
                for x, y in batches(executor, client, t):
                    q = shares(nets, old, x, y)
                    steps = [
                        backward(net, x, q[m][:, None] * slope(scores(net, x), y)) for m, net in enumerate(trained)
                    ]
                    trained = [plus(net, -LR, step) for net, step in zip(trained, steps, strict=True)]
                own[client] = trained
            found = states(executor)
            for client in ALL:
                np.testing.assert_allclose(found[client]["mixture"], pi[client], rtol=1e-12)
                for m in range(count if client in cohort else 0):
                    close(models(found[client], count)[m], own[client][m])
            nets = [mean([own[c][m] for c in cohort], [SIZES[c] for c in cohort]) for m in range(count)]
            for net, expected in zip(models(executor.server.state.weights, count), nets, strict=True):
                close(net, expected)

        def mixed(client: int, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
            own = e_step(client)[1] if weights is None else weights
            return np.log(sum(p * softmax(scores(net, x)) for p, net in zip(own, nets, strict=True)))

        evaluates(executor, 3, mixed, "personal received")
        evaluates(executor, 3, partial(mixed, weights=np.full(count, 1 / count)), "global received")
        assert np.ptp([pi[client][0] for client in ALL]) > 0.01


def test_the_numbers_of_an_e_step_and_a_prediction() -> None:
    q = FedEM.shares(torch.tensor([[0.2, 2.0], [1.2, 0.5]]), torch.tensor([0.5, 0.5]))
    np.testing.assert_allclose(q.T, [[0.731059, 0.268941], [0.182426, 0.817574]], atol=1e-6)
    module: Any = fedem(components=2).factory.build()
    module.mixture.copy_(q.mean(1))
    np.testing.assert_allclose(module.mixture, [0.456742, 0.543258], atol=1e-6)
    module.outputs = lambda inputs, values: [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])]
    np.testing.assert_allclose(module.predict(torch.zeros(1)), [[-0.919639, -0.508600]], atol=1e-6)


# Must hold ------------------------------------------------------------------------------------------------------------


def test_shares_weights_and_predictions_sum_to_one() -> None:
    """Also where a weight is 0, whose model has no part then."""
    executor = fedem().inline()
    rounds(executor, 2, 4)
    module, shard = received(executor, 0)
    for pi in ([0.2, 0.3, 0.5], [0.0, 0.6, 0.4]):
        module.mixture.copy_(torch.tensor(pi))
        module.before_training(shard)
        batch = shard.train.batch(slice(None))
        q = module.shares(module.losses(batch), torch.tensor(pi))
        for total in (q.sum(0), module.mixture.sum(), module.predict(batch[0]).exp().sum(1)):
            np.testing.assert_allclose(total.detach(), 1, atol=1e-6)
        assert ((q[0] == 0).all() and module.mixture[0] == 0) == (pi[0] == 0)
        assert torch.isfinite(module.objective(batch)["ce"])


def test_equal_models_stay_equal() -> None:
    executor = fedem().inline()
    weights = dict(executor.server.state.weights)
    for name in weights:
        if name.startswith("others."):
            weights[name] = weights["net." + name.split(".", 2)[2]].clone()
    executor.server.state = type(executor.server.state)(weights)
    rounds(executor, 2, 4)
    first, *others = models(executor.server.state.weights, 3)
    for other in others:
        close(other, first, 0)
    for state in states(executor).values():
        np.testing.assert_allclose(state["mixture"], 1 / 3, rtol=1e-6)


def test_an_e_step_does_not_lower_the_likelihood() -> None:
    with started(fedem()) as executor:
        rounds(executor, 3, 4)
        (module, shard), nets = received(executor, 2), models(executor.server.state.weights, 3)
        x, y = examples(executor, 2)
        found = []
        for _ in range(6):
            pi = module.mixture.numpy()
            joint = pi[:, None] * np.exp([-losses(scores(net, x), y) for net in nets])
            found.append(np.log(joint.sum(0)).sum())
            module.before_training(shard)
        assert found == sorted(found) and found[0] < found[1]


def test_clients_of_two_tasks_choose_a_model_each() -> None:
    """The clients of a group have other labels than those of the other one; a newcomer chooses that of its group."""
    few = ["data=digits", "clients=6", "partition=iid", "model.hidden=[32]", "batch_size=20", "eval.holdout_clients=2"]
    how = ["shift=permuted_labels", "shift.groups=2", "local_epochs=2", "lr=0.2", "momentum=0.9", "seed=4"]
    made = prepared("method=fedem", *few, *how, "method.components=2")
    executor = inline(made)
    rounds(executor, 16, 4)
    kinds, found = made.partition.shift.groups, states(executor)
    first = {client: float(found[client]["mixture"][0]) for client in ALL}
    assert all(min(p, 1 - p) < 0.05 for p in first.values())
    assert len({(kinds[client], p > 0.5) for client, p in first.items()}) == 2 == len({*kinds[:4]})
    sent = executor.send([4, 5], joining=True)
    rows = executor.evaluate(EvalRequest("personal", "received", (4, 5), ("test",), 16, joining=True), sent)
    assert all(row.correct is not None and row.correct > 0.8 * row.total for row in rows)


def test_in_what_models_differ_at_first() -> None:
    """Tensors have the same values in another order: all of them, or those of the head."""
    for differ in ("net", "head"):
        weights = dict(fedem(model=normed, differ=differ).federation.initial)
        for name, value in weights.items():
            if name.startswith("others."):
                first = weights["net." + name.split(".", 2)[2]]
                assert torch.equal(value.flatten().sort().values, first.flatten().sort().values)
                same = value.unique().numel() == 1 or (differ == "head" and ".body." in name)
                assert torch.equal(value, first) == same
        assert not torch.equal(weights["others.0.head.weight"], weights["others.1.head.weight"])


def test_running_statistics_of_all_models_are_measured() -> None:
    executor = fedem(normed, Training(lr=LR, batch_size=4, buffers="recalibrate")).inline()
    rounds(executor, 1, 4)
    module, shard = received(executor, 0)
    module.before_training(shard)
    inputs = shard.train.batch(slice(None))[0]
    for net in (module.net, *module.others):
        features = net.body[:2](inputs)
        torch.testing.assert_close(net.body[2].running_mean, features.mean(0))
        torch.testing.assert_close(net.body[2].running_var, features.var(0))


def test_shares_are_computed_in_evaluation_mode() -> None:
    """With the received running statistics, which the models' own forward passes change once."""
    executor = fedem(normed).inline()
    rounds(executor, 2, 4)
    module, shard = received(executor, 0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.train()
    module.before_training(shard)
    before["mixture"] = module.mixture.clone()
    batch = shard.train.batch(slice(None))
    found = module.objective(batch)["ce"]
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    assert torch.equal(module.objective(batch)["ce"], found)  # the models' own statistics are others by now
    module.load_state_dict(before)
    own, pi = module.losses(batch), module.received.tensors["mixture"]
    assert all(torch.equal(value, trained[name]) for name, value in module.state_dict().items())
    module.load_state_dict(before)
    module.eval()
    q = module.shares(module.losses(batch), pi)
    torch.testing.assert_close(found, (q * own).sum(0).mean())


def test_no_warning_that_only_a_part_is_shared() -> None:
    """All parameters travel, as they should."""
    assert prepared("method=fedem", "data=digits", "clients=4", "buffers=local").warnings == ()
