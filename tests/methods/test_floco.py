"""Floco: heads on a simplex of weights, and a region of it for each client after a survey."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, batches, close, evaluates, examples, gradient, mean, plus, scores, started
from support import ALL, BATCH_NORM, Records, World, after, dataset, plan, play, same, states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.floco import Floco
from lightning_modules.training import Training
from pflsim.engine.execution import ReplyTask
from pflsim.engine.simulation import Simulation
from pflsim.messages import payload_bytes
from pflsim.records.history import client_traffic
from pflsim.seeding import seeded_global
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.floco import Floco as Server
from pflsim.servers.floco import subregions
from pflsim.types import Traffic

LR, RHO, M = 0.4, 0.3, 3
TRAINING = Training(lr=LR, batch_size=4)


def floco(client: Any = Floco, endpoints: int = M, rho: float = RHO, sampling: str = "simplex", **more: Any) -> World:
    made = partial(client, endpoints=endpoints, rho=rho, sampling=sampling)
    return world(made, Server(endpoints=endpoints), **{"training": TRAINING, **more})


# The projection -----------------------------------------------------------------------------------------------------


def nearest(points: np.ndarray) -> np.ndarray:
    """The nearest points of the simplex [..., M], by bisection of the threshold."""
    low, high = points.min(-1, keepdims=True) - 1, points.max(-1, keepdims=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = np.maximum(points - middle, 0).sum(-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.maximum(points - low, 0)


def components(g: np.ndarray, count: int) -> np.ndarray:
    """Principal components from the covariance of the updates; the largest entry of each direction is positive."""
    centred = g - g.mean(0)
    sizes, directions = np.linalg.eigh(centred.T @ centred)
    found = []
    for direction in directions.T[np.argsort(-sizes)][:count]:
        found.append(centred @ (direction * np.sign(direction[abs(direction).argmax()])))
    return np.array(found).T


def energy(points: np.ndarray) -> float:
    pairs = [max(np.sqrt(((a - b) ** 2).sum()), 1e-4) for a, b in combinations(points, 2)]
    return math.log(np.mean([1 / d**2 for d in pairs]))


def points_by_hand(g: np.ndarray, count: int) -> np.ndarray:
    tried = nearest(components(g, count) / np.linspace(1e-4, 1, 1000)[:, None, None])
    return tried[int(np.argmin([energy(points) for points in tried]))]


def test_projection_by_hand() -> None:
    g = np.random.default_rng(4).normal(size=(6, 8)) * 0.4
    np.testing.assert_allclose(subregions(torch.from_numpy(g), M), points_by_hand(g, M), rtol=1e-9, atol=1e-9)


def test_more_endpoints_than_clients_and_equal_clients() -> None:
    """Components without variance are 0; equal clients have the centre."""
    found = subregions(torch.randn(3, 8), 5)
    assert found.shape == (3, 5) and torch.allclose(found.sum(1), torch.ones(3).double()) and (found >= 0).all()
    assert torch.allclose(subregions(torch.ones(4, 8), 5), torch.full((4, 5), 0.2).double())


# Rounds -------------------------------------------------------------------------------------------------------------


def draw(alpha: np.ndarray | None) -> np.ndarray:
    """The next point from torch's generator: of the simplex, or on the way to it from a client's own point."""
    point = -np.log(1 - torch.rand(M).numpy())
    point /= point.sum()
    if alpha is None:
        return point
    way = point - alpha
    return alpha + min(1.0, RHO * torch.rand(()).item() / abs(way).sum()) * way


def trained(w: Arrays, steps: Iterator[tuple[np.ndarray, np.ndarray]], alpha: np.ndarray | None) -> Arrays:
    """Body, endpoints [M, C, D] and bias after some mini-batches, each at a new point."""
    for x, y in steps:
        a = draw(alpha)
        by = gradient([*w[:2], np.einsum("m,mcd->cd", a, w[2]), w[3]], x, y)
        by[2] = np.einsum("m,cd->mcd", a, by[2])
        w = plus(w, -LR, by)
    return w


def arrays(tensors: Any) -> Arrays:
    names = "body.fc1.weight", "body.fc1.bias", "head.endpoints", "head.bias"
    return [tensors[f"net.{name}"].numpy().copy() for name in names]


def at(w: Arrays, alpha: Any) -> Arrays:
    return [*w[:2], np.einsum("m,mcd->cd", np.asarray(alpha), w[2]), w[3]]


def test_rounds_before_and_after_a_survey_by_hand() -> None:
    """All draws by the clients' generators; what the survey trains is discarded, and client 2 does not reply to it."""
    with started(floco()) as executor:
        w, alphas = arrays(executor.server.state.weights), dict[int, np.ndarray]()
        for t, cohort in ((1, (0, 1, 2)), (2, ALL)):
            if t == 2:
                before, updates = states(executor), []
                executor.fuse(executor.run(ReplyTask(t), executor.send((0, 1, 3))))
                assert same(before, states(executor))
                for client in (0, 1, 3):
                    x, y = examples(executor, client)
                    with seeded_global(0, "open", client, t):
                        order = torch.randperm(len(y)).numpy()
                        parts = (order[k : k + 4] for k in range(0, len(y), 4))
                        end = trained(w, ((x[rows], y[rows]) for rows in parts), None)
                    updates.append((w[2] - end[2]).ravel())
                found = points_by_hand(np.array(updates), M)
                alphas = dict(zip((0, 1, 3), found, strict=True))
                for client, alpha in alphas.items():
                    close([executor.server.state.alphas[client].numpy()], [alpha], 1e-8)
                close(arrays(executor.server.state.weights), w)
            play(executor, t, cohort)
            ends = []
            for client in cohort:
                with seeded_global(0, "train", client, t):
                    ends.append(trained(w, batches(executor, client, t), alphas.get(client)))
                close(arrays(states(executor)[client]), ends[-1], 1e-7)
            w = mean(ends, [SIZES[client] for client in cohort])
            close(arrays(executor.server.state.weights), w, 1e-7)
            centre = at(w, np.full(M, 1 / M))
            own = {client: at(w, alphas[client]) if client in alphas else centre for client in ALL}
            evaluates(executor, t, lambda client, x, own=own: scores(own[client], x), "personal received")
            evaluates(executor, t, lambda client, x, own=centre: scores(own, x), "global received")


def region(alpha: list[float], **settings: Any) -> Floco:
    """A client that has received its point."""
    module: Any = floco(**settings).factory.build()
    module.alpha.copy_(torch.tensor(alpha))
    module.region.store({"alpha": module.alpha})
    return module


def test_points_stay_in_simplex_and_region() -> None:
    """Within ρ of a sparse point, some of them near that bound; those of the authors' program leave the simplex."""
    torch.manual_seed(1)
    centre = torch.tensor([0.9, 0.1, 0.0])
    drawn = torch.stack([region(centre.tolist()).draw() for _ in range(200)])
    distances = (drawn - centre).abs().sum(1)
    assert (drawn > -1e-6).all() and torch.allclose(drawn.sum(1), torch.ones(200))
    assert distances.max() <= RHO + 1e-6 and distances.max() > 0.9 * RHO and distances.min() < 0.1 * RHO
    raw = torch.stack([region(centre.tolist(), sampling="raw_l1").draw() for _ in range(200)])
    assert (raw - centre).abs().sum(1).max() <= RHO + 1e-6
    assert (raw < 0).any() and not torch.allclose(raw.sum(1), torch.ones(200), atol=0.05)
    assert torch.equal(region(centre.tolist(), rho=0.0).draw(), centre)
    far = torch.stack([region(centre.tolist(), rho=9.0).draw() for _ in range(50)])
    assert (far > -1e-6).all()


class SameHead(Floco):
    """Begins with the head that the model has."""

    def __init__(self, net: Any, training: Training, **settings: Any):
        start = net.head.weight.detach().clone()
        super().__init__(net, training, **settings)
        self.get_parameter("net.head.endpoints").data.copy_(start[None])


@pytest.mark.parametrize("model", [None, BATCH_NORM])
def test_one_endpoint_is_fedavg(model: Any) -> None:
    """To the bit, without a survey."""
    training = Training(lr=0.1, batch_size=4, momentum=0.5, weight_decay=0.01)
    alike = {"training": training, "model": model, "data": dataset(shape=(1, 8, 8)) if model else None}
    expected = after(world(FedAvg, FedAvgServer(), **alike), fraction=0.75)
    found = after(floco(SameHead, 1, **alike), fraction=0.75)
    for state in found.values():
        del state["alpha"]
        state["net.head.weight"] = state.pop("net.head.endpoints")[0]
    assert same(found, expected)
    assert not any(Server(endpoints=1).surveys(t, 4) for t in range(1, 5))
    assert [t for t in range(1, 6) if Server(endpoints=2).surveys(t, 5)] == [4]


# The survey in a run ------------------------------------------------------------------------------------------------


def test_a_survey_is_no_round_but_counts_as_traffic(tmp_path: Any) -> None:
    """All clients reply to it, those of the round train after it, and nothing else is kept."""
    executor, records, cohorts = floco().inline(), Records(), ((0, 1), (1, 2), (0, 3))
    drawn = plan(4, 3, cohorts=cohorts, surveys=frozenset({2}), eval_every=0)
    Simulation(executor, drawn, tmp_path, records).run()
    assert [record.round for record in records.records] == [1, 2, 3]
    assert ("survey", 4) in [seen[1:] for seen in records.phases if isinstance(seen, tuple)]
    first, second, _ = records.records
    model = sum(value.nbytes for value in executor.server.state.weights.values())
    update, point = executor.server.state.weights["net.head.endpoints"].nbytes, M * 4
    assert client_traffic(first) == {c: Traffic(model, model) for c in (0, 1)}
    surveyed, both = Traffic(update, model), Traffic(model + update, 2 * model + point)
    assert client_traffic(second) == {0: surveyed, 1: both, 2: both, 3: surveyed}
    assert [report.client for report in second.reports] == [1, 2]
    assert payload_bytes(executor.server.downlinks([0])[0]) == model + point
    by_rounds = floco().inline()
    for t, cohort in enumerate(cohorts, start=1):
        if t == 2:
            by_rounds.fuse(by_rounds.run(ReplyTask(2), by_rounds.send(ALL)))
        play(by_rounds, t, cohort)
    assert same(states(executor), states(by_rounds))
