"""IFCA: clients choose among several models by their training loss; clusters are averaged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from by_hand import SIZES, close, evaluates, examples, losses, mean, scores, sgd, started, values
from support import BATCH_NORM, World, same, states, uplinks_of, world

from lightning_modules.methods.ifca import IFCA
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.messages import Message, Uplink, unpacked
from pflsim.servers.ifca import IFCA as Server

ALL = (0, 1, 2, 3)
LR = 0.4


def ifca(groups: int = 3, training: Training | None = None, **settings: Any) -> World:
    return world(IFCA, Server(groups=groups), training=training or Training(lr=LR, batch_size=4), **settings)


def test_three_rounds_by_hand() -> None:
    """Choices, local training and cluster means; client 1 is absent at first."""
    with started(ifca()) as executor:
        models = [values(m) for m in executor.server.state.models]
        chosen: dict[int, int] = {}

        def best(client: int) -> int:
            x, y = examples(executor, client)
            return int(np.argmin([losses(scores(m, x), y).mean() for m in models]))

        for t, cohort in ((1, (0, 2, 3)), (2, ALL), (3, (1, 2))):
            trained = executor.run(TrainTask(t), executor.send(cohort))
            sent = uplinks_of(executor, trained)
            executor.fuse(trained)
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


def test_empty_clusters_keep_their_model() -> None:
    w = ifca(groups=3)
    state = w.rule.init(w.federation)
    sent = {k: v + 1 for k, v in w.federation.initial.items()}
    fused = w.rule.fuse(state, [Uplink(sent, client=2, num_examples=20, numbers={"cluster": 1.0})])
    assert same(
        {0: dict(fused.models[0]), 2: dict(fused.models[2])}, {0: dict(state.models[0]), 2: dict(state.models[2])}
    )
    assert all(torch.equal(fused.models[1][k], v) for k, v in sent.items())
    assert fused.groups.tolist() == [-1, -1, 1, -1] and w.rule.fuse(state, []) is state


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


def test_newcomers_choose_too() -> None:
    w = ifca()
    down = w.rule.join(w.rule.init(w.federation), 9)
    assert set(unpacked(down, "model/")) == {0, 1, 2}
