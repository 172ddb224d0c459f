"""MOON: the contrast of features by its equation, and when there is none."""

from functools import partial
from typing import Any

import numpy as np
from by_hand import SIZES, Arrays, backward, batches, close, features, mean, plus, scores, slope, started, values
from support import ALL, World, play, rounds, states, world
from torch import nn

from lightning_modules.methods.moon import Moon
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.servers.fedavg import FedAvg as Server


def moon(mu: float = 1.0, **settings: Any) -> World:
    return world(partial(Moon, mu=mu), Server(), **settings)


def cosine(z: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos(z, other) [B] and its gradient by z [B, D]."""
    a, b = (np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-8) for v in (z, other))
    cos = (z * other).sum(1, keepdims=True) / (a * b)
    return cos[:, 0], other / (a * b) - cos * z / a**2


def contrast(w: Arrays, x: np.ndarray, glob: Arrays, prev: Arrays, tau: float) -> tuple[float, np.ndarray]:
    """The contrastive loss of a mini-batch, and its gradient by the features."""
    z = features(w, x)
    (p, by_p), (q, by_q) = cosine(z, features(glob, x)), cosine(z, features(prev, x))
    share = 1 / (1 + np.exp((p - q) / tau))  # of the previous model
    return float(-np.log(1 - share).mean()), (share[:, None] * (by_q - by_p)) / (tau * len(x))


def test_three_rounds_by_hand() -> None:
    """A client that was absent compares with its last body; the first round of each client is FedAvg's."""
    eta, mu, tau, cohorts = 0.3, 0.8, 0.5, ((0, 1, 3), (0, 2), ALL)
    with started(moon(mu, training=Training(lr=eta, batch_size=4))) as executor:
        common = values(executor.server.state.weights)
        previous: list[Arrays | None] = [None] * 4
        for t, cohort in enumerate(cohorts, 1):
            trained, losses = [], []
            for i in cohort:
                w, own, found = common, previous[i], []
                for x, y in batches(executor, i, t):
                    loss, by_features = (0.0, 0.0) if own is None else contrast(w, x, common, own, tau)
                    found.append(mu * loss)
                    w = plus(w, -eta, backward(w, x, slope(scores(w, x), y), mu * np.asarray(by_features)))
                previous[i] = w
                trained.append(w)
                losses.append(np.mean(found))
            common = mean(trained, [SIZES[i] for i in cohort])
            done, _ = play(executor, t, cohort)
            np.testing.assert_allclose([r.losses["con"] for r in done.reports], losses, rtol=1e-9)
        for i, state in states(executor).items():
            close(values(state), previous[i] or [])
        close(values(executor.server.state.weights), common)


def dead(input_shape: tuple[int, ...], classes: int) -> Net:
    """All features are 0."""
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU()), nn.Linear(6, classes), (6,), classes)
    nn.init.constant_(net.body[1].bias, -100.0)  # type: ignore[index]
    return net


def test_features_of_zero_are_not_an_error() -> None:
    executor = moon(model=dead).inline()
    rounds(executor, 3, 4)
    assert all(v.isfinite().all() for v in executor.server.state.weights.values())
