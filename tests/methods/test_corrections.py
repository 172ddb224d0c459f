"""FedDyn and SCAFFOLD, of which corrections of the gradients travel or stay."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import anchored, batches, close, gradient, mean, plus, started, values
from support import ALL, World, normed, play, rounds, states, world

from lightning_modules.methods.feddyn import FedDyn
from lightning_modules.methods.scaffold import Scaffold
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, FinetuneTask
from pflsim.servers.feddyn import FedDyn as FedDynServer
from pflsim.servers.scaffold import Scaffold as ScaffoldServer

# FedDyn


def feddyn(alpha: float = 0.3, **settings: Any) -> World:
    return world(partial(FedDyn, alpha=alpha), FedDynServer(alpha=alpha), **settings)


def test_three_rounds_by_hand() -> None:
    """Algorithm 1, with all clients, then two of four, then others."""
    alpha, eta, cohorts = 0.7, 0.2, (ALL, (0, 2), (1, 2))
    with started(feddyn(alpha, training=Training(lr=eta, batch_size=4))) as executor:
        theta = values(executor.server.state.weights)
        zero = [np.zeros_like(v) for v in theta]
        h, own = zero, [zero] * 4
        for t, cohort in enumerate(cohorts, 1):
            trained = []
            for i in cohort:
                w = theta
                for x, y in batches(executor, i, t):
                    slope = plus(gradient(w, x, y), -1, own[i])
                    w = plus(w, -eta, plus(slope, alpha, plus(w, -1, theta)))
                own[i] = plus(own[i], -alpha, plus(w, -1, theta))
                trained.append(w)
            moved = mean([plus(w, -1, theta) for w in trained], [1] * len(cohort))
            h = plus(h, -alpha * len(cohort) / 4, moved)
            theta = plus(mean(trained, [1] * len(cohort)), -1 / alpha, h)
            play(executor, t, cohort)
        found = states(executor)
        for i in ALL:
            close(anchored(found[i], "gradient"), own[i])
        close(values(executor.server.state.weights), theta)
        close(values(executor.server.state.h), h)
        close(h, mean(own, [1] * 4))


def test_a_newcomer_starts_from_the_servers_model() -> None:
    executor = feddyn().inline()
    rounds(executor, 1, 3)
    executor.store(executor.run(FinetuneTask(2, 1), executor.send([3], joining=True)))
    moved = plus(values(states(executor)[3]), -1, values(executor.server.state.weights))
    close(anchored(states(executor)[3], "gradient"), [-0.3 * m for m in moved], 1e-6)


# SCAFFOLD


def scaffold(server_lr: float = 1.0, **settings: object) -> World:
    return world(Scaffold, ScaffoldServer(server_lr=server_lr), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_three_rounds_of_scaffold_by_hand(server_lr: float) -> None:
    """Algorithm 1 with option II: all clients, then two of four, then others; η falls from round to round."""
    eta, decay, cohorts = 0.2, 0.5, (ALL, (0, 2), (1, 2))
    with started(scaffold(server_lr, training=Training(lr=eta, lr_decay=decay, batch_size=4))) as executor:
        x = values(executor.server.state.weights)
        zero = [np.zeros_like(v) for v in x]
        c, own = zero, [zero] * 4
        for t, cohort in enumerate(cohorts, 1):
            rate, trained, changes = eta * decay ** (t - 1), [], []
            for i in cohort:
                y, taken = x, 0
                for inputs, labels in batches(executor, i, t):
                    corrected = plus(plus(gradient(y, inputs, labels), -1, own[i]), 1, c)
                    y, taken = plus(y, -rate, corrected), taken + 1
                new = [a - b + (p - q) / (taken * rate) for a, b, p, q in zip(own[i], c, x, y, strict=True)]
                changes.append(plus(new, -1, own[i]))
                trained.append(plus(y, -1, x))
                own[i] = new
            x = plus(x, server_lr, mean(trained, [1] * len(cohort)))
            c = plus(c, len(cohort) / 4, mean(changes, [1] * len(cohort)))
            play(executor, t, cohort)
        found = states(executor)
        for i in ALL:
            close(anchored(found[i], "control"), own[i])
        close(values(executor.server.state.weights), x)
        close(values(executor.server.state.control), c)
        close(c, mean(own, [1] * 4))


def test_a_newcomer_starts_without_a_control_variate() -> None:
    """It receives x and c, and its steps in two epochs of fine-tuning all count, at the rate before the schedule."""
    with started(scaffold(training=Training(lr=0.1, lr_decay=0.5, batch_size=4))) as executor:
        rounds(executor, 1, 3)
        x, c = values(executor.server.state.weights), values(executor.server.state.control)
        sent = executor.send([3], joining=True)
        executor.store(executor.run(FinetuneTask(2, 2), sent))
        state = states(executor)[3]
        moved = plus(x, -1, values(state))
        close(anchored(state, "control"), [a / (6 * 0.1) - b for a, b in zip(moved, c, strict=True)], 1e-9)


@pytest.mark.parametrize(("made", "correction"), [(feddyn, "h"), (partial(scaffold, 1.4), "control")])
def test_running_statistics_are_averaged_without_corrections(made: Any, correction: str) -> None:
    executor = made(model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    key, state = "net.body.2.running_var", executor.server.state
    corrected = getattr(state, correction)
    assert key not in corrected and "net.body.2.weight" in corrected
    torch.testing.assert_close(state.weights[key], torch.stack([s[key] for s in states(executor).values()]).mean(0))


def test_a_client_that_takes_no_step_keeps_its_control_variate() -> None:
    """A single example cannot be a batch under batch normalisation."""
    executor = scaffold(sizes=(1, 7, 9, 6), model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    assert all(not v.any() for k, v in states(executor)[0].items() if k.startswith("control."))
    assert all(v.isfinite().all() for v in executor.server.state.control.values())
    assert all(np.isfinite(r.loss) for r in executor.evaluate(EvalRequest("global", "received", ALL, ("test",), 2)))
