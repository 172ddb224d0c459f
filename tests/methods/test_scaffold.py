"""SCAFFOLD: control variates by its equations, what they cost, and what they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import Arrays, batches, close, gradient, mean, plus, started, values
from support import World, normed, rounds, states, world

from lightning_modules.methods.scaffold import Scaffold
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, FinetuneTask, TrainTask
from pflsim.errors import SettingsError
from pflsim.servers.scaffold import Scaffold as Server

ALL: tuple[int, ...] = (0, 1, 2, 3)


def scaffold(server_lr: float = 1.0, **settings: object) -> World:
    return world(Scaffold, Server(server_lr=server_lr), **settings)  # type: ignore[arg-type]


def control(state: dict[str, torch.Tensor]) -> Arrays:
    """c_i in a client's state."""
    found = {k.removeprefix("control.").replace("/", "."): v for k, v in state.items() if k.startswith("control.")}
    return values(found)


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_three_rounds_by_hand(server_lr: float) -> None:
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
            executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
        found = states(executor)
        for i in ALL:
            close(control(found[i]), own[i])
        close(values(executor.server.state.weights), x)
        close(values(executor.server.state.control), c)
        close(c, mean(own, [1] * 4))


@pytest.mark.parametrize("setting", ["momentum", "weight_decay"])
def test_momentum_and_weight_decay_are_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match=f"{setting}=0.5.*scaffold.*{setting}=0"):
        scaffold(training=Training(**{setting: 0.5}))  # type: ignore[arg-type]


def test_a_newcomer_starts_without_a_control_variate() -> None:
    """It receives x and c, and its steps in two epochs of fine-tuning all count."""
    with started(scaffold(training=Training(lr=0.1, batch_size=4))) as executor:
        rounds(executor, 1, 3)
        x, c = values(executor.server.state.weights), values(executor.server.state.control)
        sent = executor.send([3], joining=True)
        executor.store(executor.run(FinetuneTask(2, 2), sent))
        state = states(executor)[3]
        moved = plus(x, -1, values(state))
        close(control(state), [a / (6 * 0.1) - b for a, b in zip(moved, c, strict=True)], 1e-9)


def test_running_statistics_are_averaged_without_control_variates() -> None:
    executor = scaffold(1.4, model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    key, state = "net.body.2.running_var", executor.server.state
    assert key not in state.control and "net.body.2.weight" in state.control
    own = torch.stack([s[key] for s in states(executor).values()])
    torch.testing.assert_close(state.weights[key], own.mean(0))


def test_a_client_that_takes_no_step_keeps_its_control_variate() -> None:
    """A single example cannot be a batch under batch normalisation."""
    executor = scaffold(sizes=(1, 7, 9, 6), model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    assert all(not v.any() for k, v in states(executor)[0].items() if k.startswith("control."))
    assert all(v.isfinite().all() for v in executor.server.state.control.values())
    assert all(np.isfinite(r.loss) for r in executor.evaluate(EvalRequest("global", "received", ALL, ("test",), 2)))
