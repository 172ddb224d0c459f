"""FedDBE: a private vector beside the features, and their running mean near the global one."""

from functools import partial
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import SIZES, close, evaluates, examples, features, gradient, mean, plus, scores, slope, started, values
from support import ALL, World, play, rounds, states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.feddbe import FedDBE
from lightning_modules.training import Training
from pflsim.engine.execution import ReplyTask, Sent
from pflsim.messages import Message
from pflsim.seeding import seeded_global
from pflsim.servers.feddbe import FedDBE as Server

LR, DECAY, KAPPA, MU = 0.3, 0.5, 3.0, 0.4


def feddbe(model: Any = None, data: Any = None, **settings: Any) -> World:
    training = Training(lr=LR, lr_decay=DECAY, batch_size=4)
    return world(partial(FedDBE, **settings), Server(), training=training, model=model, data=data)


def opened(executor: InlineExecutor, clients: tuple[int, ...] = ALL) -> InlineExecutor:
    """The executor after the initial round, in which these clients reply."""
    executor.fuse(executor.run(ReplyTask(), Sent.nothing(clients)))
    return executor


def with_vector(w: by_hand.Arrays, vector: np.ndarray, x: np.ndarray) -> np.ndarray:
    return scores(w, x) + vector @ w[2].T


def test_the_initial_round_and_two_rounds_by_hand() -> None:
    """The global mean of two clients, the vectors, the nets, their mean and the losses of both models."""
    with started(feddbe(kappa=KAPPA, mean_momentum=MU)) as executor:
        opened(executor, (0, 2))
        common, means = values(states(executor)[0]), []
        for client in (0, 2):
            w, (x, y) = common, examples(executor, client)
            with seeded_global(0, "open", client, 0):
                order = torch.randperm(SIZES[client])
            for rows in (part.numpy() for part in order.split(4)):
                w = plus(w, -LR, gradient(w, x[rows], y[rows]))
            means.append([features(w, x).mean(0)])
        (target,) = mean(means, [12, 20])
        vectors = [np.zeros(5)] * 4
        for t in (1, 2):
            (done, _), own, rate = play(executor, t), [], LR * DECAY ** (t - 1)
            for client, state in states(executor).items():
                w, v, running, terms = common, vectors[client], np.zeros(5), []
                for x, y in by_hand.batches(executor, client, t):
                    z, by = features(w, x), slope(with_vector(w, v, x), y)
                    running = (1 - MU) * running + MU * z.mean(0)
                    terms.append(KAPPA / 10 * ((running - target) ** 2).sum())
                    step = by_hand.backward(w, x, by, KAPPA / 5 * (running - target) * MU / len(y))
                    step[2] = by.T @ (z + v)
                    w, v = plus(w, -rate, step), v - rate * (by @ w[2]).sum(0)
                vectors[client] = v
                own.append(w)
                close([*values(state), state["vector"].numpy()], [*w, v])
                assert dict(done.reports[client].losses)["mean"] == pytest.approx(np.mean(terms), rel=1e-9)
            common = mean(own, SIZES)
            close(values(executor.server.state.weights), common)
        np.testing.assert_allclose(executor.server.state.extra["mean_features"].numpy(), target, rtol=1e-9)
        evaluates(executor, 2, lambda client, x: with_vector(own[client], vectors[client], x))
        evaluates(executor, 2, lambda client, x: scores(common, x), "global received")


def test_without_replies_in_the_initial_round_there_is_no_global_mean() -> None:
    executor = opened(feddbe().inline(), ())
    assert not executor.server.state.extra
    assert all(set(r.losses) == {"ce"} for r in rounds(executor, 1, 4))


def test_newcomers_get_model_and_mean() -> None:
    w = feddbe()
    down = w.rule.join(opened(w.inline()).server.state, 9)
    module = w.factory.build()
    module.join(Message(weights={k: v + 1 for k, v in down.weights.items()}, extra=down.extra))
    assert torch.equal(module.means.tensors["target"], down.extra["mean_features"])  # type: ignore[union-attr]
    assert (module.vector == 0).all()  # type: ignore[operator]
