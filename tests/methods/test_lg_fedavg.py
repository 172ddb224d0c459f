"""LG-FedAvg: bodies stay, heads are averaged and are all that travels."""

from __future__ import annotations

from functools import partial

from by_hand import SIZES, close, mean, sgd, started, values
from support import World, rounds, same, states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.lg_fedavg import LGFedAvg
from lightning_modules.nets.mlp import Mlp
from lightning_modules.training import Training
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)


def lg(**settings: object) -> World:
    return world(LGFedAvg, Server(), **settings)  # type: ignore[arg-type]


def test_two_rounds_by_hand() -> None:
    """Body and head take the same SGD steps; the next round begins with the own body and the mean of the heads."""
    with started(lg(training=Training(lr=0.3, batch_size=4))) as executor:
        models = [values(states(executor)[client]) for client in ALL]
        for t in (1, 2):
            ends = [sgd(executor, client, t, models[client], 0.3) for client in ALL]
            head = mean([w[2:] for w in ends], SIZES)
            models = [w[:2] + head for w in ends]
        rounds(executor, 2, 4)
        for client in ALL:
            close(values(states(executor)[client]), ends[client])
        close([executor.server.state.weights[f"net.head.{k}"].numpy() for k in ("weight", "bias")], head)


def test_without_a_body_it_is_fedavg() -> None:
    found = []
    for client in (LGFedAvg, FedAvg):
        executor = world(client, Server(), model=partial(Mlp, hidden=[])).inline()
        rounds(executor, 3, 4, fraction=0.75)
        found.append(states(executor))
    assert same(*found)
