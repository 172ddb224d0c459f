"""FedMRL: two heads on one projection by their gradients, and the projections that leave out a net."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, batches, close, evaluates, features, mean, plus, scores, slope, started, values
from support import ALL, World, inline, play, refusing, rounds, states, world

from lightning_modules.contract.command import maker
from lightning_modules.methods.fedmrl import FedMRL
from lightning_modules.nets.mlp import Mlp
from lightning_modules.training import Training
from pflsim.config.compose import CONFIGS
from pflsim.servers.fedavg import FedAvg as Server

LR, COHORTS = 0.4, (ALL, (0, 2), (1, 2, 3))
COMMON = 3
"""Features of the common net; the client's own has 5."""


def fedmrl(hidden: int = COMMON, **given: Any) -> World:
    training = Training(lr=LR, batch_size=4)
    return world(FedMRL, Server(), training=training, common=(partial(Mlp, hidden=[hidden]),), **given)


def projection(state: Any) -> Arrays:
    return [state[f"projection.{name}"].double().numpy().copy() for name in ("weight", "bias")]


def joined(f: Arrays, g: Arrays, p: Arrays, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The features of both nets, the common ones first, and r."""
    z = np.concatenate((features(g, x), features(f, x)), 1)
    return z, z @ p[0].T + p[1]


def step(f: Arrays, g: Arrays, p: Arrays, x: np.ndarray, y: np.ndarray) -> tuple[Arrays, Arrays, Arrays]:
    """All three after a step, by the chain rule."""
    z, r = joined(f, g, p, x)
    by_own, by_common = slope(r @ f[2].T + f[3], y), slope(r[:, :COMMON] @ g[2].T + g[3], y)
    by_r = by_own @ f[2]
    by_r[:, :COMMON] += by_common @ g[2]
    by_z = by_r @ p[0] * (z > 0)
    by_g, by_f = by_z[:, :COMMON], by_z[:, COMMON:]
    slopes = (
        [by_f.T @ x, by_f.sum(0), by_own.T @ r, by_own.sum(0)],
        [by_g.T @ x, by_g.sum(0), by_common.T @ r[:, :COMMON], by_common.sum(0)],
        [by_r.T @ z, by_r.sum(0)],
    )
    own, common, projected = (plus(w, -LR, d) for w, d in zip((f, g, p), slopes, strict=True))
    return own, common, projected


def test_rounds_by_hand() -> None:
    """The common net is the mean over the round's clients; a client predicts with the one that it has trained last."""
    with started(fedmrl()) as executor:
        common = values(executor.server.state.weights, "common")
        own = {i: (values(s), common, projection(s)) for i, s in states(executor).items()}
        for t, cohort in enumerate(COHORTS, 1):
            for i in cohort:
                f, g, p = own[i][0], common, own[i][2]
                for x, y in batches(executor, i, t):
                    f, g, p = step(f, g, p, x, y)
                own[i] = f, g, p
            common = mean([own[i][1] for i in cohort], [SIZES[i] for i in cohort])
            play(executor, t, cohort)
            close(values(executor.server.state.weights, "common"), common)
            for i, state in states(executor).items():
                close([*values(state), *projection(state)], [*own[i][0], *own[i][2]])

            def predicted(i: int, x: np.ndarray, g: Arrays | None = None) -> np.ndarray:
                f, last, p = own[i]
                return joined(f, g or last, p, x)[1] @ f[2].T + f[3]

            evaluates(executor, t, predicted)
            evaluates(executor, t, lambda i, x, g=common, f=predicted: f(i, x, g), "personal received")
            evaluates(executor, t, lambda _, x, g=common: scores(g, x), "global received")


@pytest.mark.parametrize("hidden", [COMMON, 5])
def test_projections_that_leave_out_a_net(hidden: int) -> None:
    """[0, I] leaves the own net, and [I, 0] in the first rows the common one; with equal widths too."""
    executor = fedmrl(hidden).inline()
    module, (x, y) = executor.factory.build(), executor.host.shards[0].train.batch(slice(None))
    with torch.no_grad():
        module.projection.bias.zero_()
        module.projection.weight.copy_(torch.cat((torch.zeros(5, hidden), torch.eye(5)), 1))
        torch.testing.assert_close(module.predict(x), module.net(x))
        module.projection.weight[:hidden].copy_(torch.eye(hidden, hidden + 5))
        terms = module.objective((x, y))
    torch.testing.assert_close(terms["common_ce"], module.task_loss(module.common(x), y))


def test_the_projection_is_equal_at_clients_of_one_width() -> None:
    """Whatever their nets draw, and with init=per_client; it does not travel."""
    models = ["model.variants=[{hidden: [9, 6]}, {hidden: [6]}]", "model.common={hidden: [4]}"]
    executor = inline(maker("fedmrl", models, [CONFIGS])("init=per_client"))
    found = [projection(state) for state in states(executor).values()]
    for each in found[1:]:
        close(each, found[0], 0)
    size = {4 * (4 * 64 + 4 + 10 * 4 + 10)}
    assert {*executor.send(ALL).down_bytes.values()} == size
    assert {report.up_bytes for report in rounds(executor, 1, 4)} == size


def test_a_common_net_that_is_wider_is_refused() -> None:
    for given, wide, least in (("model.common={hidden: [9]}", 9, 8), ("model.variants=[{hidden: [7]}, {}]", 8, 7)):
        with refusing("method=fedmrl", f"{wide} features", f"at most {least}", "model.common", "model.variants"):
            maker("fedmrl", [given], [CONFIGS])()
