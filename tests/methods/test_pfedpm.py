"""What must hold of pFedPM, R-pFedPM and models of several kinds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import Arrays
from support import ALL, World, dataset, nets, partition, play, run_cohorts, same, slow_except, states, world

from lightning_modules.base import ClientModule
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.local import Local
from lightning_modules.methods.pfedpm import PFedPM, mixed_features
from lightning_modules.nets.cnn import MapCnn
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Partition, Shard
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedpm import PFedPM as Server

TRAINING = Training(lr=0.1, momentum=0.5, batch_size=4)
COHORTS = ((1, 2), (0, 2), (0, 1, 3), (2, 3))
"""Partial participation; client 0 is new in round 2, client 3 in round 3."""


def pfedpm(*, model: Any = None, data: Any = None, training: Training = TRAINING, **settings: Any) -> World:
    return world(partial(PFedPM, **settings), Server(), model=model, data=data, training=training)


def local(w: World) -> World:
    """The same federation under Local."""
    return replace(w, factory=replace(w.factory, client=Local), rule=LocalServer())


def limited(w: World, held: Sequence[Sequence[int]]) -> World:
    """The same with each client's examples of some classes only."""
    rows = partition(w.dataset, (24, 24, 24, 18))
    train = tuple(r[np.isin(w.dataset.y[r], c)] for r, c in zip(rows.train, held, strict=True))
    return replace(w, partition=Partition(train, rows.val, rows.test))


def run(executor: InlineExecutor, cohorts: Sequence[Sequence[int]], first: int = 1) -> list[Any]:
    """Rounds with these clients; returns the reports."""
    reports = []
    for t, cohort in enumerate(cohorts, start=first):
        reports.append(play(executor, t, cohort)[0].reports)
    return reports


def after_rounds(w: World) -> dict[int, dict[str, torch.Tensor]]:
    """Every client's body and head (the decision path), buffers included."""
    return nets(states(run_cohorts(w, COHORTS)))


# a = 1 ------------------------------------------------------------------------------------------------------------


def others_changed(w: World) -> World:
    """The same client 0 among clients with other data."""
    rows = w.partition.train
    swapped = (rows[0], *(np.roll(np.concatenate(rows[1:]), 5)[: len(r)] for r in rows[1:]))
    return replace(w, partition=replace(w.partition, train=swapped))


@pytest.mark.parametrize("predict", slow_except(["relation"], ["decision", "relation"]))
@pytest.mark.parametrize("distance", slow_except(["mse"], ["mse", "l2"]))
def test_with_a_of_one_no_other_client_has_a_say(distance: str, predict: str) -> None:
    """Nor where a client comes in late and has no own features yet. With a < 1 others do have a say."""
    for a in (1.0, 0.5):
        w = pfedpm(a=a, lam=5.0, distance=distance, predict=predict)
        (one, *_), (other, *_) = (after_rounds(v).values() for v in (w, others_changed(w)))
        assert same({0: one}, {0: other}) == (a == 1.0)
    alone = after_rounds(local(w))
    assert not same({0: one}, {0: alone[0]})


# Phases -----------------------------------------------------------------------------------------------------------


def test_mixed_features_are_fixed_while_training_and_kept_for_the_test() -> None:
    w = run_cohorts(pfedpm(a=0.25), [ALL] * 2)
    own, common = states(w)[1]["own_means"], w.server.state.features.means
    run(w, [ALL], first=3)
    torch.testing.assert_close(states(w)[1]["mixed"], 0.25 * own + 0.75 * common)
    assert not torch.equal(states(w)[1]["own_means"], own)


def test_the_first_round_knows_no_features() -> None:
    """Nothing pulls, nothing comes down."""
    executor = pfedpm().inline()
    sent = executor.send(ALL)
    assert set(sent.down_bytes.values()) == {0}
    trained = executor.run(TrainTask(1), sent)
    for report in trained.reports:
        assert report.losses["net/align"] == 0 < report.losses["net/ce"] and "relation/mse" not in report.losses
    assert not any(state["seen"].any() for state in states(executor).values())
    executor.fuse(trained)
    (reports,) = run(executor, [ALL], first=2)
    assert all(r.losses["net/align"] > 0 and r.losses["relation/mse"] > 0 for r in reports)


# Clients that lack classes, or come and go --------------------------------------------------------------------------


def test_a_class_that_nobody_has_reported_is_never_predicted() -> None:
    executor = run_cohorts(limited(pfedpm(predict="relation"), [[1], [1], [1], [1]]), [ALL] * 2)
    with executor.host._client(TrainTask(2), 0, "train"):
        scores = executor.host.module.eval().predict(torch.rand(9, 1, 4, 4)).detach()
    assert (scores[:, [0, 2]] == 0).all() and (scores[:, 1] > 0).all() and (scores[:, 1] < 1).all()


# Before there are features, and divergence --------------------------------------------------------------------------


def test_before_there_are_features_the_head_decides_and_the_relation_module_rests() -> None:
    """Scores of 0 would credit all with class 0; and weight decay or a norm layer would move the module."""
    w = pfedpm(predict="relation", training=Training(lr=0.1, weight_decay=0.1, batch_size=4))
    executor, heads = w.inline(), pfedpm(predict="decision", training=w.factory.training).inline()
    before = states(executor)
    for e in (executor, heads):
        run(e, [ALL])
    after = states(executor)
    for client in ALL:
        relation = [key for key in before[client] if key.startswith("relation.")]
        assert relation and all(torch.equal(before[client][key], after[client][key]) for key in relation)
    request = EvalRequest("personal", "trained", ALL, ("test",))
    assert executor.evaluate(request) == heads.evaluate(request)
    run(executor, [ALL], first=2)
    assert any(not torch.equal(before[0][key], states(executor)[0][key]) for key in relation)


def test_a_diverged_client_stays_alone_where_others_have_no_say() -> None:
    """0·NaN is NaN: with a=1, and with λ=0, global features that are not finite do not reach the net."""
    common = Prototypes(torch.full((3, 5), torch.nan), torch.ones(3, dtype=torch.int64))
    for settings in ({"a": 1.0}, {"lam": 0.0}):
        w = pfedpm(**settings)
        module = w.factory.build()
        module.own_means.copy_(torch.rand(3, 5))
        module.own_counts.copy_(torch.tensor([3, 2, 0]))
        module.receive(Message(prototypes=common))
        batch = w.inline().host.shards[0].train.batch(slice(0, 6))
        total = torch.stack(list(module.objective(batch).values())).sum()
        total.backward()
        assert total.isfinite() and all(q.grad is None or q.grad.isfinite().all() for q in module.parameters())


def test_one_pair_alone_is_scored() -> None:
    """Batch normalisation of flat features has no variance to go by with one example and one class."""
    module = pfedpm(predict="relation").factory.build()
    module.receive(Message(prototypes=Prototypes(torch.rand(3, 5), torch.tensor([0, 4, 0]))))
    module.train()
    terms = module.relation_loss((torch.rand(1, 1, 4, 4), torch.tensor([1])))
    assert 0 < float(terms["mse"].detach()) < 1


# Equations, by NumPy in float64 --------------------------------------------------------------------------------------

LR, LAM, A, MOMENTUM = 0.3, 2.5, 0.3, 0.5
NET = [f"net.{name}" for name in by_hand.NAMES]
RELATION = ["relation.first.weight"]
RELATION += [f"relation.{n}.{p}" for n in ("norm", "rest.2", "rest.4") for p in ("weight", "bias")]


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 0.5, size=shape)


def made(**settings: Any) -> PFedPM:
    """A client in float64: inputs 1x4x4, one hidden layer of 5 (D), 3 classes."""
    client = partial(PFedPM, **{"a": A, "lam": LAM, "relation_hidden": 4, **settings})
    training = Training(lr=LR, momentum=MOMENTUM, batch_size=7)
    return world(client, Server(), training=training).factory.build().double()


def given(module: ClientModule, names: list[str], rng: np.random.Generator) -> Arrays:
    """Random values for some parameters, put into the module and returned."""
    values = [random(rng, *module.get_parameter(n).shape) for n in names]
    with torch.no_grad():
        for name, value in zip(names, values, strict=True):
            module.get_parameter(name).copy_(torch.from_numpy(value))
    return values


def batch_of(rng: np.random.Generator, labels: list[int], shape: tuple[int, ...] = (1, 4, 4)) -> Any:
    """NumPy inputs and labels, and the same as tensors."""
    x, y = rng.uniform(size=(len(labels), *shape)), np.array(labels)
    return x, y, (torch.from_numpy(x), torch.from_numpy(y))


def sent(means: np.ndarray, counts: list[int]) -> Prototypes:
    return Prototypes(torch.from_numpy(means), torch.tensor(counts))


def phase(module: PFedPM, name: str) -> Phase:
    (found,) = [p for p in module.schedule() if isinstance(p, Phase) and p.name == name]
    return found


# Features ---------------------------------------------------------------------------------------------------------


def test_local_features() -> None:
    """Eq. 6: the mean over all training examples of a class, by the body as it is after training; with counts."""
    rng, module = np.random.default_rng(0), made()
    net = given(module, NET, rng)
    x, y, tensors = batch_of(rng, [0, 2, 2, 0, 0, 2, 2])
    uplink = module.reply(Shard(3, 3, Examples(*tensors), Examples(*tensors), Examples(*tensors)))
    assert uplink.prototypes is not None and uplink.client == 3 and uplink.num_examples == 7 and not uplink.weights
    z = by_hand.features(net, x.reshape(len(x), -1))
    for j, count in enumerate((3, 0, 4)):
        assert int(uplink.prototypes.counts[j]) == count == int(module.own_counts[j])
        if count:
            np.testing.assert_allclose(uplink.prototypes.means[j].numpy(), z[y == j].mean(0), rtol=1e-12)
            np.testing.assert_allclose(module.own_means[j].numpy(), z[y == j].mean(0), rtol=1e-12)


@pytest.mark.parametrize("weighting", ["samples", "printed"])
def test_global_features(weighting: Any) -> None:
    """Eq. 7 over the clients that hold the class: Σ D_ij·C_ij / Σ D_ij, and as printed divided by their number too."""
    rng, rule = np.random.default_rng(1), Server(prototype_weighting=weighting)
    state = rule.init(world(PFedPM, rule).federation)
    counts = np.array([[3, 0, 2], [5, 0, 0], [1, 0, 4]])
    means = random(rng, 3, 3, 5)
    means[counts == 0] = np.nan  # a missing class has no number
    ups = [Uplink(prototypes=sent(m, c.tolist()), client=i) for i, (m, c) in enumerate(zip(means, counts, strict=True))]
    state = rule.fuse(state, ups)
    found = rule.downlink(state, 1).prototypes
    first = np.zeros((3, 5))
    for j in (0, 2):
        held = counts[:, j] > 0
        first[j] = (counts[held, j, None] * means[held, j]).sum(0) / counts[held, j].sum()
        first[j] /= held.sum() if weighting == "printed" else 1
        np.testing.assert_allclose(found.means[j].numpy(), first[j], rtol=1e-12)
    assert found.counts.tolist() == [9, 0, 6]

    late = random(rng, 3, 5)
    found = rule.fuse(state, [Uplink(prototypes=sent(late, [0, 2, 7]), client=1)]).features
    np.testing.assert_allclose(found.means.numpy(), np.stack([first[0], late[1], late[2]]), rtol=1e-12)
    assert found.counts.tolist() == [9, 2, 7], "a class that nobody of the round holds stays"
    assert state.features.counts.tolist() == [9, 0, 6], "the former state is left alone"
    assert rule.fuse(state, []) is state


def test_mixed_features() -> None:
    """Eq. 8, and what stands for C̃ where a mean is missing: the other one, or none."""
    rng = np.random.default_rng(2)
    own, common = random(rng, 4, 5), random(rng, 4, 5)
    own[1] = own[3] = np.nan
    common[2] = common[3] = np.nan
    mixed, seen = mixed_features(sent(own, [2, 0, 1, 0]), sent(common, [5, 3, 0, 0]), A)
    expected = np.stack([A * own[0] + (1 - A) * common[0], common[1], own[2], np.zeros(5)])
    np.testing.assert_allclose(mixed.numpy(), expected, rtol=1e-12)
    assert seen.tolist() == [True, True, True, False]


# The net ----------------------------------------------------------------------------------------------------------


def net_loss(net: Arrays, x: np.ndarray, y: np.ndarray, mixed: np.ndarray, pulled: set[int], how: str) -> Any:
    """CE and λ·R (eqs. 9 and 11), and the gradient of their sum, by hand."""
    x = x.reshape(len(x), -1)
    z, pull = by_hand.features(net, x), 0.0
    back, classes = np.zeros_like(z), sorted(pulled & set(y.tolist()))
    for j in classes:
        d = z[y == j].mean(0) - mixed[j]
        size = math.sqrt((d**2).sum())
        pull += LAM * ((d**2).mean() if how == "mse" else size) / len(classes)
        by = 2 * d / len(d) if how == "mse" else d / size
        back[y == j] += LAM * by / len(classes) / (y == j).sum()
    logits = by_hand.scores(net, x)
    return by_hand.losses(logits, y).mean(), pull, by_hand.backward(net, x, by_hand.slope(logits, y), back)


@pytest.mark.parametrize("how", ["mse", "l2"])
def test_net_steps(how: str) -> None:
    """Eqs. 9 and 11, three steps with momentum: CE + λ/|J|·Σ_{j∈J} ‖z̄_j − C̃_j‖ over the classes J of the batch."""
    rng, module = np.random.default_rng(4), made(distance=how)
    net, relation = given(module, NET, rng), given(module, RELATION, rng)
    own, common = random(rng, 3, 5), random(rng, 3, 5)
    module.own_means.copy_(torch.from_numpy(own))
    module.own_counts.copy_(torch.tensor([4, 6, 0]))
    module.receive(Message(prototypes=sent(common, [9, 0, 9])))
    mixed = np.stack([A * own[0] + (1 - A) * common[0], own[1], common[2]])
    step, speed = module.make_step(phase(module, "net")), [np.zeros_like(v) for v in net]
    for labels in ([0, 0, 1, 1, 1, 0, 1], [2, 2, 2, 0], [1]):
        x, y, tensors = batch_of(rng, labels)
        terms = module.optimise(tensors, step)
        ce, pull, gradient = net_loss(net, x, y, mixed, {0, 1, 2}, how)
        assert math.isclose(float(terms["net/ce"]), ce, rel_tol=1e-12)
        assert math.isclose(float(terms["net/align"]), pull, rel_tol=1e-12)
        speed = [MOMENTUM * s + g for s, g in zip(speed, gradient, strict=True)]
        net = [v - LR * s for v, s in zip(net, speed, strict=True)]
    for name, value in zip(NET + RELATION, net + relation, strict=True):
        np.testing.assert_allclose(module.get_parameter(name).detach().numpy(), value, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(module.mixed.numpy(), mixed)  # C̃ is fixed while the net moves


@pytest.mark.parametrize("distance", ["mse", "l2"])
def test_what_has_no_mixed_features_is_not_pulled(distance: str) -> None:
    """A class without C̃ adds no term; with a=1, neither does one that only others have reported."""
    rng = np.random.default_rng(5)
    for a, pulled in ((0.5, {0, 2}), (1.0, {0})):
        module = made(a=a, distance=distance)
        net = given(module, NET, rng)
        module.own_counts.copy_(torch.tensor([4, 0, 0]))
        common = random(rng, 3, 5)
        module.receive(Message(prototypes=sent(common, [9, 0, 9])))
        mixed = np.stack([(1 - a) * common[0], np.zeros(5), common[2]])
        x, y, tensors = batch_of(rng, [0, 1, 2, 2])
        _, pull, _ = net_loss(net, x, y, mixed, pulled, distance)
        assert math.isclose(float(module.objective(tensors)["align"].detach()), pull, rel_tol=1e-12)
        terms = module.objective(batch_of(rng, [1, 1])[2])
        assert float(terms["align"].detach()) == 0
        gradients = torch.autograd.grad(terms["align"], [module.get_parameter(NET[0])])
        assert torch.equal(gradients[0], torch.zeros_like(gradients[0])), "and no NaN in the gradient"


# The relation module ------------------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normalised(x: np.ndarray, gain: np.ndarray, offset: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Batch normalisation of [pairs, channels, ...] with the statistics of the batch."""
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    return gain.reshape(shape) * x + offset.reshape(shape)


def flat_scores(g: Arrays, z: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """Eq. 13 for vectors: three fully connected layers on the concatenation, pair by pair."""
    pairs = np.stack([np.concatenate([example, other]) for example in z for other in mixed])
    hidden = np.maximum(normalised(pairs @ g[0].T, g[1], g[2], (0,)), 0)
    hidden = np.maximum(hidden @ g[3].T + g[4], 0)
    return sigmoid(hidden @ g[5].T + g[6]).reshape(len(z), len(mixed))


def map_scores(g: Arrays, z: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """Eq. 13 for maps: a 3x3 convolution on maps concatenated on channels, and two fully connected layers."""
    pairs = np.stack([np.concatenate([example, other], axis=0) for example in z for other in mixed])
    padded = np.pad(pairs, ((0, 0), (0, 0), (1, 1), (1, 1)))
    maps = np.empty((len(pairs), len(g[0]), *z.shape[2:]))
    for r, c in np.ndindex(*z.shape[2:]):
        maps[:, :, r, c] = np.einsum("pchw,fchw->pf", padded[:, :, r : r + 3, c : c + 3], g[0])
    hidden = np.maximum(normalised(maps, g[1], g[2], (0, 2, 3)), 0).reshape(len(pairs), -1)
    hidden = np.maximum(hidden @ g[3].T + g[4], 0)
    return sigmoid(hidden @ g[5].T + g[6]).reshape(len(z), len(mixed))


def relation_error(scores: np.ndarray, y: np.ndarray, seen: np.ndarray) -> float:
    """Eq. 12: over all classes that have features, the mean over the batch."""
    total = 0.0
    for s, j in np.ndindex(*scores.shape):
        total += (scores[s, j] - float(y[s] == j)) ** 2 if seen[j] else 0.0
    return total / len(y)


@pytest.mark.parametrize("counts", [[9, 9, 9], [9, 0, 9]])
def test_relation_step_on_flat_features(counts: list[int]) -> None:
    rng, module = np.random.default_rng(7), made(predict="relation")
    net, g = given(module, NET, rng), given(module, RELATION, rng)
    common, seen = random(rng, 3, 5), np.array(counts) > 0
    module.receive(Message(prototypes=sent(common, counts)))
    x, y, tensors = batch_of(rng, [0, 2, 1, 2, 0])
    z = by_hand.features(net, x.reshape(len(x), -1))

    def scores() -> np.ndarray:
        """0 for a class without features, which does not enter the normalisation either."""
        found = np.zeros((len(y), 3))
        found[:, seen] = flat_scores(g, z, common[seen])
        return found

    def loss() -> float:
        return relation_error(scores(), y, seen)

    np.testing.assert_allclose(module.predict(tensors[0]).detach().numpy(), scores(), rtol=1e-12)
    terms = module.optimise(tensors, module.make_step(phase(module, "relation")))
    assert math.isclose(float(terms["relation/mse"]), loss(), rel_tol=1e-12)
    for name, value in zip(RELATION, g, strict=True):
        moved = (value - module.get_parameter(name).detach().numpy()) / LR
        np.testing.assert_allclose(moved, by_hand.differences(loss, value), rtol=1e-5, atol=1e-8, err_msg=name)
    for name, value in zip(NET, net, strict=True):
        np.testing.assert_array_equal(module.get_parameter(name).detach().numpy(), value)


def test_relation_step_on_maps() -> None:
    """The first layer is applied to halves and added up; it must be the convolution of the concatenated maps."""
    rng = np.random.default_rng(8)
    model = partial(MapCnn, hidden_channels=3, channels=2, kernel=3, padding=1, strides=(1, 1), hidden=4)
    client = partial(PFedPM, relation_hidden=4, predict="relation")
    w = world(client, Server(), model=model, data=dataset(shape=(1, 8, 8)), training=Training(lr=LR, batch_size=4))
    module = w.factory.build().double()
    assert isinstance(module, PFedPM) and module.net.feature_shape == (2, 2, 2)
    g = given(module, RELATION, rng)
    common = random(rng, 3, 8)
    module.receive(Message(prototypes=sent(common, [1, 1, 1])))
    _, y, tensors = batch_of(rng, [0, 2, 1, 2], (1, 8, 8))
    z = module.net.body(tensors[0]).detach().numpy()

    def loss() -> float:
        return relation_error(map_scores(g, z, common.reshape(3, 2, 2, 2)), y, np.full(3, True))

    terms = module.optimise(tensors, module.make_step(phase(module, "relation")))
    assert math.isclose(float(terms["relation/mse"]), loss(), rel_tol=1e-12)
    for name, value in zip(RELATION, g, strict=True):
        moved = (value - module.get_parameter(name).detach().numpy()) / LR
        np.testing.assert_allclose(moved, by_hand.differences(loss, value), rtol=1e-5, atol=1e-8, err_msg=name)
