"""FedGH: its equations by NumPy in float64, and what must hold of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import close, examples, features, head_steps, started, values
from support import BATCH_NORM, Pooled, dropout_mlp, run_cohorts, same, states, trained_states, world
from torch import nn

from lightning_modules.methods.fedgh import FedGH
from lightning_modules.methods.local import Local
from lightning_modules.nets.cnn import MapCnn
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.seeding import torch_generator
from pflsim.servers.fedgh import FedGH as Server
from pflsim.servers.local import Local as LocalServer

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (2, 1), (1, 4), (3, 10)])
def test_the_server_trains_its_head_on_the_class_means(epochs: int, size: int) -> None:
    """θ ← θ − η·∇ℓ(θ; C_ij, j) over all pairs that were sent, for three rounds of real clients."""
    rule = Server(server_lr=0.4, server_epochs=epochs, server_batch=size)
    with started(world(FedGH, rule, sizes=(12, 2, 1, 9))) as executor:
        head = values(states(executor)[0])[2:]
        for t in (1, 2, 3):
            executor.fuse(executor.run(TrainTask(t), executor.send(ALL)))
            pairs = []
            for client, state in states(executor).items():
                x, y = examples(executor, client)
                z = features(values(state), x)
                pairs += [(z[y == j].mean(0), j) for j in range(3) if (y == j).any()]
            assert len(pairs) == 3 + 2 + 1 + 3
            order = torch_generator(0, "global_head", round_number=t - 1)
            orders = [torch.randperm(len(pairs), generator=order).numpy() for _ in range(epochs)]
            head = [*head_steps(head[0], head[1], pairs, orders, 0.4, size)]
            sent = executor.server.downlinks([0])[0].weights
            close([sent[f"net.head.{k}"].numpy() for k in ("weight", "bias")], head)


@pytest.mark.parametrize("model", [None, dropout_mlp, BATCH_NORM])
def test_the_first_round_is_local(model: Any) -> None:
    """Before round 1 the server's head is the common initial one: to the bit; in round 2 it no longer is."""
    made, alone = world(FedGH, Server(), model=model), world(Local, LocalServer(), model=model)
    for count in (1, 2):
        assert same(*(states(run_cohorts(w, [ALL] * count)) for w in (made, alone))) == (count == 1)


class NormedHead(Net):
    """A head with running statistics."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 5), nn.ReLU())
        super().__init__(body, nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, classes)), (5,), classes)


def test_running_statistics_in_a_head_stay_with_the_client() -> None:
    executor = run_cohorts(world(FedGH, Server(), model=NormedHead), [ALL] * 2)
    sent = executor.server.downlinks([0])[0].weights
    assert not any("running" in key for key in sent) and "net.head.0.weight" in sent
    found = [s["net.head.0.running_mean"] for s in states(executor).values()]
    after = trained_states(executor, executor.run(TrainTask(3), executor.send([0])))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(after[0]["net.head.0.running_mean"], found[0])


def test_a_head_moves_no_statistics_of_the_body() -> None:
    """Under every setting of `buffers` they are the client's own, in training and as received."""
    found: list[Any] = []
    for buffers in ("aggregate", "local", "recalibrate"):
        training = Training(lr=0.1, batch_size=5, buffers=buffers)  # type: ignore[arg-type]
        executor = run_cohorts(world(FedGH, Server(), model=BATCH_NORM, training=training), [ALL] * 2)
        found.append((executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 3)), states(executor)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])


def test_feature_maps() -> None:
    """Maps are flattened for the class means; a head that cannot take flat ones is refused."""
    maps = partial(MapCnn, hidden_channels=2, channels=3, kernel=3, padding=1)
    sent = run_cohorts(world(FedGH, Server(), model=maps), [ALL] * 2).server.downlinks([0])[0].weights
    assert set(sent) == {f"net.head.{k}" for k in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
    with pytest.raises(SettingsError, match=r"class means.*\[n, 32\]"):
        world(FedGH, Server(), model=Pooled).inline()
