"""FedPer, LG-FedAvg, FedRep and FedBN: which layers travel, and rounds by hand; private parts by name."""

from functools import partial
from typing import Any

import pytest
from by_hand import SIZES, batches, close, gradient, mean, plus, sgd, started, values
from support import ALL, World, after, normed, play, rounds, same, states, steps_of, world
from torch import nn

from lightning_modules.base import ClientModule
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedbn import FedBN
from lightning_modules.methods.fedper import FedPer
from lightning_modules.methods.fedrep import FedRep
from lightning_modules.methods.lg_fedavg import LGFedAvg
from lightning_modules.methods.local import Local
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.params import BODY
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.local import Local as Alone

BASE = {"net.body.fc1.weight", "net.body.fc1.bias"}


def fedper(base: Any, **settings: Any) -> ClientModule:
    return world(partial(FedPer, base=base), Server(), **settings).factory.build()


def test_layers_are_counted_from_the_input() -> None:
    one, share, body, two = (fedper(base, model=partial(Mlp, hidden=[5, 4])) for base in (1, 0.34, "body", 2))
    assert set(one.shared_parameters()) == set(share.shared_parameters()) == BASE
    assert body.shared_parameters() == BODY.parameters(one) == two.shared_parameters()


def private(method: Any, names: list[str], **given: Any) -> World:
    return world(partial(method, private=names), Server(), **given)


@pytest.mark.parametrize("epochs", [0, 2], ids=["fedsim", "fedalt"])
def test_a_private_input_layer_by_hand(epochs: int) -> None:
    """FedSim: all in one phase. FedAlt: two epochs of the private layer, then one of the head; both: the mean head."""
    method = partial(FedRep, head_epochs=epochs) if epochs else FedPer
    with started(private(method, ["body.fc?"], training=Training(lr=LR, batch_size=4))) as executor:
        models = [values(states(executor)[client]) for client in ALL]
        for t in (1, 2):
            for client, w in enumerate(models):
                steps = [*batches(executor, client, t, epochs=epochs + 1)]
                for number, (x, y) in enumerate(steps):
                    new = plus(w, -LR, gradient(w, x, y))
                    first = number * (epochs + 1) < len(steps) * epochs
                    w = new if not epochs else new[:2] + w[2:] if first else w[:2] + new[2:]
                models[client] = w
            head = mean([w[2:] for w in models], SIZES)
            trained, _ = play(executor, t)
            assert {report.up_bytes for report in trained.reports} == {(5 * 3 + 3) * 8}
            for client in ALL:
                close(values(states(executor)[client]), models[client])
            close(values(executor.server.state.weights), head)
            models = [w[:2] + head for w in models]


def test_a_part_without_parameters_has_no_phase() -> None:
    """Of FedAlt; a frozen head that is named private leaves nothing private."""
    trained, frozen = Training(lr=0.1, batch_size=4, local_epochs=2), Adjustments(freeze=("head",))
    every = private(partial(FedRep, head_epochs=2), ["*"], training=trained)
    assert same(after(every, 3, 0.75), after(world(Local, Alone(), training=trained), 3, 0.75))
    none = private(FedRep, ["head"], training=trained, adjust=frozen)
    assert same(after(none, 3, 0.75), after(world(FedAvg, Server(), training=trained, adjust=frozen), 3, 0.75))


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
        close(values(executor.server.state.weights), head)


def test_without_a_body_it_is_fedavg() -> None:
    flat = partial(Mlp, hidden=[])
    assert same(*(after(world(client, Server(), model=flat), 3, 0.75) for client in (LGFedAvg, FedAvg)))


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
        close(values(executor.server.state.weights), mean(ends, SIZES)[:2])


def misnamed(input_shape: tuple[int, ...], classes: int) -> Net:
    """Normalisation layers of two kinds with ordinary names, and a linear layer that is called bn."""
    body = nn.Sequential()
    body.add_module("flatten", nn.Flatten())
    body.add_module("bn", nn.Linear(16, 6))
    body.add_module("scale", nn.BatchNorm1d(6))
    body.add_module("act", nn.ReLU())
    body.add_module("level", nn.LayerNorm(6))
    return Net(body, nn.Linear(6, classes), (6,), classes)


NORMS = {f"net.body.scale.{k}" for k in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
NORMS |= {f"net.body.level.{k}" for k in ("weight", "bias")}

REST = {f"net.{layer}.{k}" for layer in ("body.bn", "head") for k in ("weight", "bias")}


def with_norms(buffers: Any = "aggregate") -> World:
    training = Training(lr=0.1, batch_size=5, buffers=buffers)
    return world(FedBN, Server(), model=misnamed, training=training)


@pytest.mark.parametrize("buffers", ["aggregate", "local", "recalibrate"])
def test_normalisation_layers_never_travel(buffers: Any) -> None:
    """By their class, not by their name, and under every setting for running statistics."""
    w = with_norms(buffers)
    executor = w.inline()
    assert set(w.factory.build().state_dict()) == NORMS | REST
    for t in (1, 2):
        sent = executor.send(ALL)
        trained = executor.run(TrainTask(t), sent)
        executor.fuse(trained)
        assert all(set(executor.downlink(h).weights) == REST for h in sent.downlinks.values())
        assert all(set(up.weights) == REST for h in trained.uplinks for up in executor.uplinks(h))
        assert {r.up_bytes for r in trained.reports} == set(sent.down_bytes.values()) == {(16 * 6 + 6 + 6 * 3 + 3) * 4}


def test_private_norms_keep_their_statistics() -> None:
    """FedSim with the normalisation layers private is FedBN; with FedAlt, statistics move in both phases."""
    given = {"training": Training(lr=0.1, batch_size=5), "model": misnamed}
    assert same(after(private(FedPer, ["body.scale", "body.level"], **given)), after(with_norms()))
    seen = steps_of(private(partial(FedRep, head_epochs=1), ["body.scale", "body.level"], **given).inline())
    moved = {name: set().union(*(m for n, m in seen if n == name)) for name in ("private", "shared")}
    statistics = {name for name in NORMS if "running" in name or "tracked" in name}
    assert moved == {"private": NORMS, "shared": REST | statistics}
