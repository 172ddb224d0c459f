"""CFL: divisions and means by NumPy, and its special cases."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import losses, scores, uplinks, values
from support import after, inline, prepared, same, world

from lightning_modules.contract.checks import rounds
from lightning_modules.methods.cfl import CFL
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest
from pflsim.fusion.clusters import bipartition
from pflsim.servers.base import Federation
from pflsim.servers.cfl import CFL as Server
from pflsim.servers.cfl import State
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.types import ClientInfo, Unit

Arrays = dict[str, np.ndarray]
SHAPES = {"a.weight": (3, 2), "bn.weight": (3,), "bn.running_var": (3,), "head.weight": (2, 3)}
PARAMETERS = tuple(key for key in SHAPES if key != "bn.running_var")


def federation(initial: Arrays, sizes: Iterable[int]) -> Federation:
    clients = tuple(ClientInfo(i, n) for i, n in enumerate(sizes))
    unit = Unit("model", PARAMETERS if len(initial) > 1 else tuple(initial), ())
    return Federation(clients, {k: torch.from_numpy(v) for k, v in initial.items()}, {"model": (unit,)})


def flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[key].ravel() for key in PARAMETERS])


def halves(cosines: np.ndarray, linkage: str) -> tuple[set[int], set[int]]:
    """Positions in two groups: the two nearest groups are joined until two are left."""
    groups = [{i} for i in range(len(cosines))]
    far = {"complete": max, "single": min}[linkage]
    while len(groups) > 2:
        pairs = combinations(range(len(groups)), 2)
        a, b = min(pairs, key=lambda p: far(1 - cosines[i, j] for i in groups[p[0]] for j in groups[p[1]]))
        groups[a] |= groups.pop(b)
    first, second = sorted(groups, key=min)
    return first, second


def by_numpy(
    clusters: list[tuple[list[int], Arrays]], sent: Mapping[int, Arrays], sizes: list[int], number: int, rule: Server
) -> list[tuple[list[int], Arrays]]:
    """The clients, by id, and the model of each cluster after a round."""
    found = []
    for members, model in clusters:
        here = [i for i in members if i in sent]
        parts, updates = [members], {i: flat(sent[i]) - flat(model) for i in here}
        share = {i: sizes[i] / sum(sizes[j] for j in here) for i in here}
        mean = np.linalg.norm(sum(share[i] * updates[i] for i in here)) if here else 0
        largest = max((np.linalg.norm(u) for u in updates.values()), default=0)
        if here == members and len(here) >= 3 and number > rule.after and mean < rule.eps1 and largest > rule.eps2:
            unit = np.stack([updates[i] / np.linalg.norm(updates[i]) for i in here])
            parts = [[members[k] for k in sorted(half)] for half in halves(unit @ unit.T, rule.linkage)]
        for part in parts:
            own = [i for i in part if i in sent]
            total = sum(sizes[i] for i in own)
            means = {k: sum(sizes[i] / total * sent[i][k] for i in own) for k in SHAPES} if own else model
            found.append((part, means))
    return found


def test_the_numbers_of_a_division() -> None:
    """Norms, cosines and groups of four updates in the plane, which belong to clients 4 to 7."""
    ids, at = (4, 5, 6, 7), np.array([[1, 0], [0.8, 0.2], [-1, 0.1], [-0.9, -0.2]])
    rule = Server(eps1=0.1, eps2=1.0, after=0)
    start: State = rule.init(federation({"w": np.zeros(2)}, [1] * 8))
    two = replace(start, groups=torch.tensor([0] * 4 + [1] * 4), models=start.models * 2, norms=torch.zeros(2, 2))
    ups = uplinks({i: {"w": row} for i, row in zip(ids, at, strict=True)}, [1] * 8)
    state: State = rule.fuse(two, ups)
    np.testing.assert_allclose(state.norms, [[0, 0], *[[0.035355, 1.004988]] * 2], rtol=1e-5)  # of both parts
    assert state.groups.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(state.models[1]["w"], [0.9, 0.1])
    np.testing.assert_allclose(state.models[2]["w"], [-0.95, -0.05])
    np.testing.assert_array_equal(state.models[0]["w"], [0, 0])  # nobody of the first cluster has replied
    for other in ({"eps1": 0.03}, {"eps2": 1.01}, {"after": 1}):
        once = Server(**{"eps1": 0.1, "eps2": 1.0, "after": 0, **other}).fuse(two, ups)
        assert once.groups.tolist() == two.groups.tolist()
        np.testing.assert_allclose(once.models[1]["w"], at.mean(0))


@pytest.mark.parametrize("linkage", ["complete", "single"])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_by_numpy(seed: int, linkage: Any) -> None:
    """Five rounds of nine clients, whose updates differ; in the third, some replies are missing."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, 9).tolist()
    initial = {key: rng.random(shape) for key, shape in SHAPES.items()}
    rule = Server(eps1=2.2, eps2=1.0, after=1, linkage=linkage)
    state: State = rule.init(federation(initial, sizes))
    clusters, counts = [([*range(9)], initial)], []
    for number in range(1, 6):
        present = [i for i in range(9) if number != 3 or i not in (2, 5)]
        received = [{k: v.numpy() for k, v in rule.downlink(state, i).weights.items()} for i in range(9)]
        sent = {i: {k: v + rng.normal(size=v.shape) for k, v in received[i].items()} for i in present}
        state = rule.fuse(state, uplinks(sent, sizes))
        clusters = by_numpy(clusters, sent, sizes, number, rule)
        counts.append(len(clusters))
        assert len(state.models) == len(state.norms) == len(clusters)
        for members, model in clusters:
            assert len({int(state.groups[i]) for i in members}) == 1
            for key, value in state.models[int(state.groups[members[0]])].items():
                np.testing.assert_allclose(value, model[key], rtol=1e-12, atol=1e-12)
    assert sorted(i for members, _ in clusters for i in members) == [*range(9)]
    assert counts[0] == 1 and counts[-1] >= 3 and sorted(counts) == counts


def test_single_linkage_is_the_optimal_bipartition() -> None:
    """It minimises the largest cosine between the groups; complete linkage does not always."""
    worse = 0
    for seed in range(40):
        n = 3 + seed % 6
        vectors = np.random.default_rng(seed).normal(size=(n, 3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = vectors @ vectors.T

        def across(second: Iterable[int], cosines: np.ndarray = cosines) -> float:
            inside = np.isin(np.arange(len(cosines)), [*second])
            return float(cosines[inside][:, ~inside].max())

        best = min(across(some) for size in range(1, n) for some in combinations(range(n), size))
        found = [bipartition(torch.from_numpy(cosines), how).nonzero()[:, 0].tolist() for how in ("single", "complete")]
        assert across(found[0]) == pytest.approx(best, abs=1e-15)
        worse += across(found[1]) > best
    assert 0 < worse < 40


def test_clients_in_another_order_are_in_the_same_groups() -> None:
    rng = np.random.default_rng(4)
    initial, sizes = {key: rng.random(shape) for key, shape in SHAPES.items()}, rng.integers(1, 9, 7).tolist()
    rule, order = Server(eps1=9.0, eps2=0.0, after=0), rng.permutation(7)
    steps = [[{k: rng.normal(size=s) for k, s in SHAPES.items()} for _ in range(7)] for _ in range(3)]
    found = []
    for places in (np.arange(7), order):  # client i of the second federation is client order[i] of the first
        state = rule.init(federation(initial, [sizes[i] for i in places]))
        for step in steps:
            down = [rule.downlink(state, i).weights for i in range(7)]
            sent = {i: {k: down[i][k].numpy() + step[place][k] for k in SHAPES} for i, place in enumerate(places)}
            state = rule.fuse(state, uplinks(sent, [sizes[i] for i in places]))
        groups = state.groups.numpy()
        found.append({frozenset(places[groups == k].tolist()) for k in range(len(state.models))})
    assert found[0] == found[1] and len(found[0]) > 2


def test_without_a_division_it_is_fedavg() -> None:
    """To the bit; with a larger ε₁ it is not."""
    training = Training(lr=0.1, batch_size=4)
    average = after(world(FedAvg, FedAvgServer(), training=training))
    assert same(after(world(CFL, Server(eps1=0, eps2=0, after=0), training=training)), average)
    assert not same(after(world(CFL, Server(eps1=9, eps2=0, after=0), training=training)), average)
    assert Server().full_participation(3, 9)


def test_rotated_halves_are_found() -> None:
    """Half of the clients have their images turned by 180°; a newcomer of each kind takes the model of its kind."""
    settings = ["shift=rotation", "shift.groups=2", "eval.holdout_clients=2", "rounds=12", "lr=0.1", "momentum=0.9"]
    few = ["data=digits", "clients=10", "partition=iid", "model.hidden=[32]", "batch_size=20", "local_epochs=2"]
    made = prepared("method=cfl", *few, *settings, "method.after=5", "method.eps1=0.7", "seed=1")
    executor = inline(made)
    rounds(executor, range(1, 13), range(8))
    kinds, state = made.partition.shift.groups, executor.server.state
    cluster = dict(zip(kinds, state.groups.tolist(), strict=False))
    assert [cluster[kind] for kind in kinds[:8]] == state.groups.tolist() and sorted(cluster.values()) == [0, 1]
    sent = executor.send([8, 9], joining=True)
    rows = executor.evaluate(EvalRequest("personal", "received", (8, 9), ("test",), 12, joining=True), sent)
    for row in rows:
        x, y = executor.host.shards[row.client].test.batch(slice(None))
        logits = scores(values(state.models[cluster[kinds[row.client]]]), x.double().flatten(1).numpy())
        expected = losses(logits, y.numpy()).sum()
        assert row.loss == pytest.approx(expected, rel=1e-4)
    assert {kinds[row.client] for row in rows} == {0, 1}
