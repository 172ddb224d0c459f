"""FedRep: head on the fixed body, then body under the new head; heads never travel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from by_hand import SIZES, batches, close, gradient, mean, plus, started, values
from support import World, normed, rounds, states, steps_of, world

from lightning_modules.methods.fedrep import FedRep
from lightning_modules.training import Training
from pflsim.servers.fedavg import FedAvg as Server

LR = 0.3


def fedrep(head_epochs: int = 2, body_epochs: int | None = None, **training: Any) -> World:
    client = partial(FedRep, head_epochs=head_epochs, body_epochs=body_epochs)
    return world(client, Server(), training=Training(lr=LR, batch_size=4, **training), model=normed)


@pytest.mark.parametrize(
    ("epochs", "run", "steps"), [(None, {"local_epochs": 4}, 12), (None, {"local_steps": 5}, 5), (2, {}, 6)]
)
def test_the_head_first_then_the_body(epochs: int | None, run: Any, steps: int) -> None:
    """12 examples make 3 batches; each phase moves its own values only, running statistics those of the body."""
    seen = steps_of(fedrep(3, epochs, **run).inline())
    assert "".join(name[0] for name, _ in seen) == "h" * 9 + "b" * steps
    moved = {name: set().union(*(m for n, m in seen if n == name)) for name in ("head", "body")}
    assert moved["head"] == {"net.head.weight", "net.head.bias"}
    assert "net.body.2.running_mean" in moved["body"] and not moved["body"] & moved["head"]


def test_a_round_by_hand() -> None:
    """Two epochs of the head, one of the body, and the mean of the bodies."""
    with started(world(partial(FedRep, head_epochs=2), Server(), training=Training(lr=LR, batch_size=4))) as executor:
        ends, start = [], values(states(executor)[0])
        rounds(executor, 1, 4)
        for client, state in states(executor).items():
            w, steps = start, [*batches(executor, client, 1, epochs=3)]
            for number, (x, y) in enumerate(steps):
                new = plus(w, -LR, gradient(w, x, y))
                w = w[:2] + new[2:] if number < len(steps) * 2 / 3 else new[:2] + w[2:]
            close(values(state), w)
            ends.append(w)
        body = [executor.server.state.weights[f"net.body.fc1.{k}"].numpy() for k in ("weight", "bias")]
        close(body, mean(ends, SIZES)[:2])
