"""IFCA and FeSEM: clusters of clients."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import NAMES, SIZES, close, evaluates, examples, losses, mean, scores, sgd, started, values
from support import ALL, BATCH_NORM, World, dataset, normed, play, same, states, world
from torch import Tensor

from lightning_modules.methods.fesem import FeSEM
from lightning_modules.methods.ifca import IFCA
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, FinetuneTask
from pflsim.messages import Message, Uplink
from pflsim.servers.fesem import FeSEM as FeSEMServer
from pflsim.servers.fesem import State
from pflsim.servers.ifca import IFCA as IFCAServer

# IFCA

LR = 0.4


def ifca(groups: int = 3, training: Training | None = None, **settings: Any) -> World:
    return world(IFCA, IFCAServer(groups=groups), training=training or Training(lr=LR, batch_size=4), **settings)


def test_three_rounds_by_hand() -> None:
    """Choices, local training and cluster means; client 1 is absent at first."""
    with started(ifca()) as executor:
        models = [values(m) for m in executor.server.state.models]
        chosen: dict[int, int] = {}

        def best(client: int) -> int:
            x, y = examples(executor, client)
            return int(np.argmin([losses(scores(m, x), y).mean() for m in models]))

        for t, cohort in ((1, (0, 2, 3)), (2, ALL), (3, (1, 2))):
            trained, sent = play(executor, t, cohort)
            own = {}
            for client in cohort:
                chosen[client] = best(client)
                assert sent[client].numbers == {"cluster": chosen[client]}
                own[client] = sgd(executor, client, t, models[chosen[client]], LR)
                close(values(states(executor)[client]), own[client])
            for j in range(3):
                inside = [c for c in cohort if chosen[c] == j]
                models[j] = mean([own[c] for c in inside], [SIZES[c] for c in inside]) if inside else models[j]
                close(values(executor.server.state.models[j]), models[j])
            assert executor.server.state.groups.tolist() == [chosen.get(c, -1) for c in ALL]
        evaluates(executor, 3, lambda client, x: scores(models[best(client)], x), "personal received", "train")


# Must hold --------------------------------------------------------------------------------------------------------


def test_the_models_start_differently() -> None:
    """The first is the run's; others have the same values in another order; norm layers start alike."""
    w = ifca(groups=3, model=BATCH_NORM)
    first, second, third = w.rule.init(w.federation).models
    assert same({0: dict(first)}, {0: dict(w.federation.initial)})
    for key, value in first.items():
        constant = value.unique().numel() == 1
        if not constant and value.numel() < 6:
            continue  # the same order may be drawn twice
        for other in (second[key], third[key]):
            assert torch.equal(other.flatten().sort().values, value.flatten().sort().values)
            assert torch.equal(other, value) == constant
        assert torch.equal(second[key], third[key]) == constant
    again = w.rule.init(w.federation).models
    assert all(same({0: dict(a)}, {0: dict(b)}) for a, b in zip(again, (first, second, third), strict=True))


# Details ----------------------------------------------------------------------------------------------------------


def test_a_diverged_model_is_not_chosen() -> None:
    w = ifca(groups=2)
    module, own = w.factory.build(), w.inline().host.shards[0]
    good = module.shared_tensors()
    for bad in (math.nan, math.inf):
        broken = {k: torch.full_like(v, bad) for k, v in good.items()}
        for order in ((broken, good), (good, broken)):
            extra = {f"model/{j}/{k}": v for j, model in enumerate(order) for k, v in model.items()}
            module.receive(Message(extra=extra))
            module.before_training(own)
            assert all(torch.equal(module.state_dict()[k], v) for k, v in good.items())


# FeSEM

KEYS = [f"net.{name}" for name in NAMES]


def flat(weights: Any) -> np.ndarray:
    return np.concatenate([value.ravel() for value in values(weights)])


def sent(rng: np.random.Generator, like: Any, client: int, scale: float = 1.0) -> Uplink:
    """Weights that have nothing to do with anything, and a number of examples that must not matter."""
    weights = {k: torch.from_numpy(rng.normal(size=v.shape) * scale).float() for k, v in like.items()}
    return Uplink(weights, client=client, num_examples=7 * client + 1)


def test_two_fusions_golden() -> None:
    """E: the nearest centre by ‖w_i − c_k‖². M: the plain mean. Those absent keep their cluster."""
    w, rng = world(FeSEM, FeSEMServer(groups=3), sizes=(12, 7, 20, 9, 3, 5)), np.random.default_rng(0)
    state: State = w.rule.init(w.federation)
    groups = state.groups.numpy().copy()
    centres = [flat(w.federation.initial)] * 3
    for number, cohort in enumerate([range(6), (0, 2, 3, 5), range(6), (1, 4)]):
        ups = [sent(rng, w.federation.initial, i) for i in cohort]
        for up in ups if number else []:
            groups[up.client] = np.argmin([((flat(up.weights) - c) ** 2).sum() for c in centres])
        for k in range(3):
            members = [flat(up.weights) for up in ups if groups[up.client] == k]
            centres[k] = np.mean(members, axis=0) if members else centres[k]
        state = w.rule.fuse(state, ups)
        assert state.groups.tolist() == groups.tolist()
        for found, expected in zip(state.centres, centres, strict=True):
            np.testing.assert_allclose(flat(found), expected, rtol=1e-6, atol=1e-6)
    for client in range(6):
        assert w.rule.downlink(state, client).weights is state.centres[groups[client]]


def test_clusters_begin_as_an_equal_random_division() -> None:
    """A function of the run's seed; no cluster is empty; all start from the same model, which is moved once."""
    groups = {}
    for seed in (0, 0, 1, 2):
        w = world(FeSEM, FeSEMServer(groups=3), sizes=(3,) * 10, seed=seed, data=dataset(per_class=80))
        state = w.rule.init(w.federation)
        assert sorted(np.bincount(state.groups.numpy())) == [3, 3, 4]
        assert groups.setdefault(seed, state.groups.tolist()) == state.groups.tolist()
        assert len({id(w.rule.downlink(state, i).weights) for i in range(10)}) == 1
    assert len({tuple(g) for g in groups.values()}) > 1


def test_a_client_as_near_to_another_centre_stays() -> None:
    w = world(FeSEM, FeSEMServer(groups=2))
    like = w.federation.initial
    centres = tuple({k: torch.full_like(v, sign) for k, v in like.items()} for sign in (1.0, -1.0))
    state = State(w.federation.layouts["model"], torch.tensor([0, 1, 0, 1]), centres)
    ups = [Uplink({k: torch.zeros_like(v) for k, v in like.items()}, client=i) for i in range(4)]
    assert w.rule.fuse(state, ups).groups.tolist() == [0, 1, 0, 1]


def test_running_statistics_go_with_their_cluster_but_decide_nothing() -> None:
    w = world(FeSEM, FeSEMServer(groups=2), model=normed)
    (mean,) = [k for k in w.federation.initial if k.endswith("running_mean")]
    like = w.federation.initial
    centres = tuple({k: torch.full_like(v, sign) for k, v in like.items()} for sign in (1.0, -1.0))
    state = State(w.federation.layouts["model"], torch.tensor([1, 1, 1, 1]), centres)
    ups = [
        Uplink(
            {k: torch.full_like(v, 0.5) for k, v in like.items()} | {mean: centres[1][mean] * (i + 1) * 100}, client=i
        )
        for i in range(2)
    ]
    after: State = w.rule.fuse(state, ups)
    assert after.groups.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(after.centres[0][mean], torch.full_like(like[mean], -150.0))


def numpy_losses(centre: Any, x: Tensor, y: Tensor) -> np.ndarray:
    return losses(scores(values(centre), x.double().flatten(1).numpy()), y.numpy())


def test_a_newcomer_takes_the_centre_that_fits_its_training_examples_best() -> None:
    """It receives all centres, which count as traffic, and starts from the one with the lowest mean loss."""
    w, taken = world(FeSEM, FeSEMServer(), training=Training(lr=0.1, batch_size=4)), []
    two = replace(w, federation=replace(w.federation, clients=w.federation.clients[:2]), rule=FeSEMServer(groups=2))
    for seed in range(4):
        executor, rng = two.inline(), np.random.default_rng(seed)
        ups = [sent(rng, w.federation.initial, i) for i in range(2)]
        executor.server.state = two.rule.fuse(executor.server.state, ups)
        centres = executor.server.state.centres
        joining = executor.send([2, 3], joining=True)
        assert set(joining.down_bytes.values()) == {2 * sum(v.numel() * 4 for v in centres[0].values())}
        rows = executor.evaluate(EvalRequest("personal", "received", (2, 3), ("test",), joining=True), joining)
        executor.store(executor.run(FinetuneTask(3, 0), joining))
        for client, row in zip((2, 3), rows, strict=True):
            shard = executor.host.shards[client]
            train, test = (s.batch(slice(None)) for s in (shard.train, shard.test))
            best = int(np.argmin([numpy_losses(c, *train).mean() for c in centres]))
            assert row.loss == pytest.approx(numpy_losses(centres[best], *test).sum(), rel=1e-5)
            assert all(torch.equal(executor.host.states[client][k], centres[best][k]) for k in KEYS)
            taken.append((best, int(np.argmin([numpy_losses(c, *test).mean() for c in centres]))))
    assert {best for best, _ in taken} == {0, 1} and any(train != test for train, test in taken)


def test_a_centre_that_has_diverged_is_not_taken() -> None:
    w = world(FeSEM, FeSEMServer(groups=2))
    module, shard = w.factory.build(), w.inline().host.shards[1]
    good = {k: v + 0.1 for k, v in w.federation.initial.items()}
    broken = {k: torch.full_like(v, float("nan")) for k, v in good.items()}
    for centres in ((broken, good), (good, broken)):
        state = State(w.federation.layouts["model"], torch.tensor([0, 1, 0, 1]), centres)
        module.join(w.rule.join(state, 4))
        module.before_training(shard)
        assert all(torch.equal(module.state_dict()[k], good[k]) for k in KEYS)
    assert not module._centres  # type: ignore[attr-defined]
