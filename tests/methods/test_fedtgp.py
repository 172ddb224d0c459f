"""FedTGP: FedProto whose global prototypes are trained by the server."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, softmax, states, world

from lightning_modules.methods.fedproto import FedProto
from lightning_modules.methods.fedtgp import FedTGP
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.messages import Prototypes, Uplink
from pflsim.seeding import torch_generator
from pflsim.servers.fedtgp import FedTGP as Server
from pflsim.servers.fedtgp import adaptive_margin
from pflsim.servers.pfedpm import PFedPM

ALL = (0, 1, 2, 3)
LR, EPOCHS, BATCH = 0.05, 3, 4
PARTS = ["embeddings.weight", "in.weight", "in.bias", "out.weight", "out.bias"]
Arrays = list[np.ndarray]


def fedtgp(client: Any = FedTGP, rule: Any = None, **settings: Any) -> World:
    rule = rule or Server(server_lr=LR, server_epochs=EPOCHS, server_batch=BATCH)
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
    wrong = (softmax(-distances - margin * chosen) - chosen) / len(points)
    back = -(wrong[..., None] * gaps / distances[..., None]).sum(0)  # [C, D]
    inner = (back @ net[3]) * (hidden > 0)
    slopes = [inner @ net[1], inner.T @ net[0], inner.sum(0), back.T @ hidden, back.sum(0)]
    return [a - LR * b for a, b in zip(net, slopes, strict=True)]


def test_three_rounds_by_hand() -> None:
    """Margin, network and prototypes from the uploads in NumPy float64, with absent clients."""
    w = fedtgp()
    executor = w.inline()
    net = [executor.server.state.net[k].double().numpy() for k in PARTS]
    assert [v.shape for v in net] == [(3, 5), (5, 5), (5,), (5, 5), (5,)]
    for t, cohort in ((1, ALL), (2, (1, 3)), (3, ALL)):
        done = executor.run(TrainTask(t), executor.send(cohort))
        ups = [up for handle in done.uplinks for up in executor.uplinks(handle)]
        executor.fuse(done)
        pairs = []
        for up in ups:
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


def after(w: World) -> dict[int, dict[str, torch.Tensor]]:
    executor = w.inline()
    rounds(executor, 3, 4, fraction=0.75)
    return states(executor)


def test_it_differs_from_fedproto_in_the_server_alone() -> None:
    """With one server they are equal to the bit, whichever it is."""
    for rule in (PFedPM(), Server(server_epochs=2)):
        assert same(after(fedtgp(FedTGP, rule)), after(fedtgp(FedProto, rule)))
    assert not same(after(fedtgp(FedTGP, Server(server_epochs=2))), after(fedtgp(FedProto, PFedPM())))


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
    w = fedtgp(rule=Server(server_epochs=1, server_batch=1))
    state = w.rule.init(w.federation)
    net = [state.net[k].double().numpy() for k in PARTS]
    made = torch.from_numpy(generated(net)[0]).float()
    up = sent({j: made[j].tolist() for j in range(3)})
    assert all(v.isfinite().all() for v in w.rule.fuse(state, [up]).net.values())
