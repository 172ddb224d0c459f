"""Ditto: w is FedAvg's, v is pulled towards w as received; v is what counts."""

from __future__ import annotations

from functools import partial

from by_hand import SIZES, batches, close, evaluates, gradient, mean, plus, scores, sgd, started, values
from support import rounds, states, world

from lightning_modules.methods.ditto import Ditto
from lightning_modules.training import Training
from pflsim.servers.fedavg import FedAvg as Server


def test_two_rounds_by_hand() -> None:
    """w and v of all clients, the server's mean, and the two models that are reported."""
    lr, lam = 0.4, 1.5
    with started(world(partial(Ditto, lam=lam), Server(), training=Training(lr=lr, batch_size=4))) as executor:
        common = values(executor.server.state.weights)
        v = [common] * 4
        for t in (1, 2):
            for client in range(4):
                for x, y in batches(executor, client, t):
                    slope = plus(gradient(v[client], x, y), lam, plus(v[client], -1, common))
                    v[client] = plus(v[client], -lr, slope)
            common = mean([sgd(executor, client, t, common, lr) for client in range(4)], SIZES)
        rounds(executor, 2, 4)
        for client, state in states(executor).items():
            close(values(state, "personal"), v[client])
        close(values(executor.server.state.weights), common)
        evaluates(executor, 2, lambda client, x: scores(v[client], x))
        evaluates(executor, 2, lambda client, x: scores(common, x), "global received")
