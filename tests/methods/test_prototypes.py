"""FedProto, FedTGP and FedGH, of which prototypes travel."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import support
import torch
from by_hand import NAMES, backward, close, examples, features, head_steps, losses, plus, scores, slope, started, values
from support import ALL, BATCH_NORM, World, after, dropout_mlp, play, run_cohorts, same, states, trained_states, world
from torch import nn

from lightning_modules.methods.fedgh import FedGH
from lightning_modules.methods.fedproto import FedProto
from lightning_modules.methods.fedtgp import FedTGP
from lightning_modules.methods.local import Local
from lightning_modules.nets.net import Net
from lightning_modules.prototypes import nearest_scores
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.params import load
from pflsim.seeding import torch_generator
from pflsim.servers.fedgh import FedGH as FedGHServer
from pflsim.servers.fedtgp import FedTGP as FedTGPServer
from pflsim.servers.fedtgp import adaptive_margin
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedpm import PFedPM
from pflsim.servers.pfedpm import PFedPM as PFedPMServer

# FedProto

LR, LAM = 0.3, 2.5
TRAINING = Training(lr=0.1, momentum=0.5, batch_size=4)


def fedproto(*, training: Training = TRAINING, model: Any = None, data: Any = None, **settings: Any) -> World:
    return world(partial(FedProto, **settings), PFedPMServer(), training=training, model=model, data=data)


# Equations --------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """CE + λ/(B·D)·Σ ‖z − C̄_y‖² (eq. 7) and three steps of its gradient; class 1 has no global mean."""
    rng = np.random.default_rng(3)
    w = [rng.normal(0, 0.5, s) for s in ((5, 16), (5,), (3, 5), (3,))]
    means, held = rng.normal(0, 0.5, (3, 5)), np.array([True, False, True])
    module = fedproto(lam=LAM, training=Training(lr=LR, batch_size=8)).factory.build().double()
    load(module, {f"net.{name}": torch.from_numpy(value) for name, value in zip(NAMES, w, strict=True)})
    sent = torch.from_numpy(np.where(held[:, None], means, np.nan))
    module.receive(Message(prototypes=Prototypes(sent, torch.tensor([4, 0, 9]))))
    step = module.make_step(module.schedule()[0])  # type: ignore[arg-type]
    for _ in range(3):
        x, y = rng.random((8, 16)), np.array([0, 1, 2, 2, 1, 0, 0, 2])
        pull = np.where(held[y][:, None], features(w, x) - means[y], 0)
        found = module.optimise((torch.from_numpy(x.reshape(8, 1, 4, 4)), torch.from_numpy(y)), step)
        assert math.isclose(float(found["ce"]), losses(scores(w, x), y).mean(), rel_tol=1e-12)
        assert math.isclose(float(found["align"]), LAM * (pull**2).sum() / (8 * 5), rel_tol=1e-12)
        w = plus(w, -LR, backward(w, x, slope(scores(w, x), y), LAM * 2 / (8 * 5) * pull))
        close(values(module.state_dict()), w)


def test_nearest_prototype() -> None:
    """argmin_j ‖z − C̄_j‖₂ (eq. 4) over the classes that have one."""
    rng = np.random.default_rng(5)
    z, means, held = rng.normal(size=(40, 6)), rng.normal(size=(4, 6)), np.array([True, False, True, True])
    means[1] = z.mean(0)  # the nearest to most of them, if it counted
    distances = np.stack([[np.sqrt(((a - c) ** 2).sum()) for c in means] for a in z])
    found = nearest_scores(*(torch.from_numpy(v) for v in (z, means, held))).numpy()
    np.testing.assert_allclose(found[:, held], -distances[:, held], rtol=1e-12)
    np.testing.assert_array_equal(found.argmax(1), np.where(held, distances, np.inf).argmin(1))
    assert (found[:, 1] < found[:, held].min(1)).all() and np.isfinite(found).all()


def test_no_prototype_at_all_is_finite() -> None:
    found = nearest_scores(torch.randn(5, 3), torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool))
    assert found.isfinite().all() and torch.equal(found, found[:1, :1].expand(5, 4))


def test_small_distances_between_large_features_are_exact() -> None:
    """A distance by way of a matrix product would lose them."""
    means = torch.full((30, 8), 1000.0) + torch.arange(30)[:, None] * 0.01
    found = nearest_scores(means, means, torch.ones(30, dtype=torch.bool))
    assert torch.equal(found.argmax(1), torch.arange(30)) and float(found.diagonal().abs().max()) == 0


def test_features_that_are_not_finite_are_not_hidden() -> None:
    """A diverged model must not be credited with a class."""
    found = nearest_scores(torch.tensor([[math.inf, 0.0], [math.nan, 1.0]]), torch.eye(2), torch.tensor([True, False]))
    assert not found.isfinite().all(1).any()


def test_class_means_are_those_of_the_trained_body() -> None:
    """Eq. 3; their global means are those of pFedPM's server."""
    executor = fedproto().inline()
    _, sent = play(executor, 1)
    for client, up in sent.items():
        x, y = examples(executor, client)
        z = features(values(states(executor)[client]), x / 255.0)
        for j in set(y):
            np.testing.assert_allclose(up.prototypes.means[j].numpy(), z[y == j].mean(0), rtol=2e-5, atol=1e-6)


# Must hold --------------------------------------------------------------------------------------------------------


def test_evaluated_with_the_newest_means() -> None:
    """Received: the trained body with what the server has fused since; trained: with what it trained with."""
    w = fedproto()
    executor = run_cohorts(w, (ALL, ALL))
    assert FedProto.reported_phase == "received"
    module, own = w.factory.build(), executor.host.shards[1].test
    newest = executor.server.downlinks([1])[1]
    for phase in ("received", "trained"):
        module.load_state_dict(dict(states(executor)[1]))
        if phase == "received":
            module.receive(newest)
        scores = module.eval().predict(own.batch(slice(None))[0]).detach()
        (row,) = executor.evaluate(EvalRequest("personal", phase, (1,), ("test",)))  # type: ignore[arg-type]
        assert row.loss == pytest.approx(float(torch.nn.functional.cross_entropy(scores, own.y, reduction="sum")))
    assert not torch.equal(states(executor)[1]["means"], newest.prototypes.means)
    assert executor.evaluate(EvalRequest("global", "received", ALL, ("test",))) == []


def test_rows_of_missing_classes_do_not_matter() -> None:
    module = fedproto().factory.build()
    for fill in (math.nan, 7.0):
        means = torch.ones(3, 5)
        means[1] = fill
        module.receive(Message(prototypes=Prototypes(means, torch.tensor([1, 0, 1]))))
        assert module.state_dict()["means"][1].tolist() == [0.0] * 5
    batch = torch.rand(2, 1, 4, 4), torch.tensor([1, 1])
    assert float(module.objective(batch)["align"].detach()) == 0
    with pytest.raises(ValueError, match="class means"):
        module.receive(Message())


# FedTGP

TGP_LR, EPOCHS, BATCH = 0.05, 3, 4
PARTS = ["embeddings.weight", "in.weight", "in.bias", "out.weight", "out.bias"]
Arrays = list[np.ndarray]


def fedtgp(client: Any = FedTGP, rule: Any = None, **settings: Any) -> World:
    rule = rule or FedTGPServer(server_lr=TGP_LR, server_epochs=EPOCHS, server_batch=BATCH)
    return world(partial(client, **settings), rule, training=Training(lr=0.1, batch_size=4))


def generated(net: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """P̂ [C, D] and the hidden layer."""
    hidden = np.maximum(net[0] @ net[1].T + net[2], 0)
    return hidden @ net[3].T + net[4], hidden


def margin_of(pairs: list[tuple[np.ndarray, int]], most: float) -> float:
    means = {j: np.mean([p for p, y in pairs if y == j], axis=0) for j in {y for _, y in pairs}}
    nearest = [min([np.linalg.norm(means[a] - means[b]) for b in means if b != a], default=math.inf) for a in means]
    return min(max(nearest), most)


def step(net: Arrays, points: np.ndarray, labels: np.ndarray, margin: float) -> Arrays:
    """A step on the mean of −log softmax_j(−d_j − δ·1[j = y])_y, by hand in float64."""
    made, hidden = generated(net)
    gaps = made[None] - points[:, None]  # [B, C, D]
    distances = np.sqrt((gaps**2).sum(2))
    chosen = np.eye(len(made))[labels]
    wrong = (support.softmax(-distances - margin * chosen) - chosen) / len(points)
    back = -(wrong[..., None] * gaps / distances[..., None]).sum(0)  # [C, D]
    inner = (back @ net[3]) * (hidden > 0)
    slopes = [inner @ net[1], inner.T @ net[0], inner.sum(0), back.T @ hidden, back.sum(0)]
    return [a - TGP_LR * b for a, b in zip(net, slopes, strict=True)]


def test_three_rounds_by_hand() -> None:
    """Margin, network and prototypes from the uploads in NumPy float64, with absent clients."""
    w = fedtgp()
    executor = w.inline()
    net = [executor.server.state.net[k].double().numpy() for k in PARTS]
    assert [v.shape for v in net] == [(3, 5), (5, 5), (5,), (5, 5), (5,)]
    for t, cohort in ((1, ALL), (2, (1, 3)), (3, ALL)):
        pairs = []
        for up in play(executor, t, cohort)[1].values():
            means, counts = up.prototypes.means.double().numpy(), up.prototypes.counts.numpy()
            pairs += [(means[j], j) for j in range(3) if counts[j]]
        points, labels = np.stack([p for p, _ in pairs]), np.array([y for _, y in pairs])
        margin = margin_of(pairs, 100.0)
        generator = torch_generator(0, "global_prototypes", -1, t - 1)
        for order in [torch.randperm(len(pairs), generator=generator).numpy() for _ in range(EPOCHS)]:
            for first in range(0, len(pairs), BATCH):
                rows = order[first : first + BATCH]
                net = step(net, points[rows], labels[rows], margin)
        state = executor.server.state
        assert float(state.margin) == pytest.approx(margin, rel=1e-5) and margin > 0
        for key, value in zip(PARTS, net, strict=True):
            np.testing.assert_allclose(state.net[key].numpy(), value, rtol=1e-4, atol=1e-6)
        down = executor.server.downlinks([0])[0].prototypes
        np.testing.assert_allclose(down.means.numpy(), generated(net)[0], rtol=1e-4, atol=1e-6)


# Must hold --------------------------------------------------------------------------------------------------------


def test_it_differs_from_fedproto_in_the_server_alone() -> None:
    """With one server they are equal to the bit, whichever it is."""
    for rule in (PFedPM(), FedTGPServer(server_epochs=2)):
        assert same(after(fedtgp(FedTGP, rule)), after(fedtgp(FedProto, rule)))
    assert not same(after(fedtgp(FedTGP, FedTGPServer(server_epochs=2))), after(fedtgp(FedProto, PFedPM())))


# Details ----------------------------------------------------------------------------------------------------------


def sent(rows: dict[int, list[float]], client: int = 0) -> Uplink:
    """An uplink with these class means; rows of missing classes are undefined."""
    means, counts = torch.full((3, 5), math.nan), torch.zeros(3, dtype=torch.int64)
    for j, row in rows.items():
        means[j], counts[j] = torch.tensor(row), 4
    return Uplink(prototypes=Prototypes(means, counts), client=client, num_examples=9)


def test_classes_that_nobody_reported_are_missing_until_somebody_does() -> None:
    w = fedtgp()
    state, counts = w.rule.init(w.federation), []
    assert state.prototypes.counts.tolist() == [0, 0, 0]
    for up in (sent({0: [1.0] * 5, 2: [2.0] * 5}), sent({1: [0.5] * 5}), sent({0: [3.0] * 5})):
        before, state = state, w.rule.fuse(state, [up])
        counts.append((state.prototypes.counts > 0).tolist())
        assert state.prototypes.means.isfinite().all()
        assert not torch.equal(state.net["in.weight"], before.net["in.weight"])
    assert counts == [[True, False, True], [True] * 3, [True] * 3]
    empty = w.rule.fuse(state, [])
    assert empty.fusions == 4 and empty.net is state.net and empty.prototypes is state.prototypes


@pytest.mark.parametrize(("most", "expected"), [(100.0, 5.0), (4.0, 4.0), (0.0, 0.0)])
def test_the_margin_is_the_largest_distance_to_a_nearest_class(most: float, expected: float) -> None:
    """Classes at 0, 1 and 6 on a line: the nearest are at 1, 1 and 5. A class without a mean has no part in it."""
    means = torch.tensor([[0.0], [1.0], [6.0], [math.nan]])
    assert float(adaptive_margin(Prototypes(means, torch.tensor([1, 1, 1, 0])), most)) == expected
    assert float(adaptive_margin(Prototypes(means, torch.tensor([0, 1, 0, 0])), most)) == most


def test_a_prototype_at_the_generated_one_has_a_gradient() -> None:
    """The distance has none at 0; the network must stay finite."""
    w = fedtgp(rule=FedTGPServer(server_epochs=1, server_batch=1))
    state = w.rule.init(w.federation)
    net = [state.net[k].double().numpy() for k in PARTS]
    made = torch.from_numpy(generated(net)[0]).float()
    up = sent({j: made[j].tolist() for j in range(3)})
    assert all(v.isfinite().all() for v in w.rule.fuse(state, [up]).net.values())


# FedGH


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (2, 1), (1, 4), (3, 10)])
def test_the_server_trains_its_head_on_the_class_means(epochs: int, size: int) -> None:
    """θ ← θ − η·∇ℓ(θ; C_ij, j) over all pairs that were sent, for three rounds of real clients."""
    rule = FedGHServer(server_lr=0.4, server_epochs=epochs, server_batch=size)
    with started(world(FedGH, rule, sizes=(12, 2, 1, 9))) as executor:
        head = values(states(executor)[0])[2:]
        for t in (1, 2, 3):
            play(executor, t)
            pairs = []
            for client, state in states(executor).items():
                x, y = examples(executor, client)
                z = features(values(state), x)
                pairs += [(z[y == j].mean(0), j) for j in range(3) if (y == j).any()]
            assert len(pairs) == 3 + 2 + 1 + 3
            order = torch_generator(0, "global_head", round_number=t - 1)
            orders = [torch.randperm(len(pairs), generator=order).numpy() for _ in range(epochs)]
            head = [*head_steps(head[0], head[1], pairs, orders, 0.4, size)]
            close(values(executor.server.downlinks([0])[0].weights), head)


@pytest.mark.parametrize("model", [None, dropout_mlp, BATCH_NORM])
def test_the_first_round_is_local(model: Any) -> None:
    """Before round 1 the server's head is the common initial one: to the bit; in round 2 it no longer is."""
    made, alone = world(FedGH, FedGHServer(), model=model), world(Local, LocalServer(), model=model)
    for count in (1, 2):
        assert same(*(states(run_cohorts(w, [ALL] * count)) for w in (made, alone))) == (count == 1)


class NormedHead(Net):
    """A head with running statistics."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 5), nn.ReLU())
        super().__init__(body, nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, classes)), (5,), classes)


def test_running_statistics_in_a_head_stay_with_the_client() -> None:
    executor = run_cohorts(world(FedGH, FedGHServer(), model=NormedHead), [ALL] * 2)
    sent = executor.server.downlinks([0])[0].weights
    assert not any("running" in key for key in sent) and "net.head.0.weight" in sent
    found = [s["net.head.0.running_mean"] for s in states(executor).values()]
    after = trained_states(executor, executor.run(TrainTask(3), executor.send([0])))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(after[0]["net.head.0.running_mean"], found[0])


def test_a_head_moves_no_statistics_of_the_body() -> None:
    """Under every setting of `buffers` they are the client's own, in training and as received."""
    found: list[Any] = []
    for buffers in ("aggregate", "local", "recalibrate"):
        training = Training(lr=0.1, batch_size=5, buffers=buffers)  # type: ignore[arg-type]
        executor = run_cohorts(world(FedGH, FedGHServer(), model=BATCH_NORM, training=training), [ALL] * 2)
        found.append((executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 3)), states(executor)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])
