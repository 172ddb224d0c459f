"""Optimisers, learning-rate schedules and clipping: the loop is torch's own, and stacks of clients equal the loop."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from support import World, after, dataset, exact, prepared, rounds, states, world
from torch import nn

from lightning_modules.base import ClientModule
from lightning_modules.lockstep.updates import clipped
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.feddyn import FedDyn
from lightning_modules.methods.fedem import FedEM
from lightning_modules.methods.fedmrl import FedMRL
from lightning_modules.methods.fedrep import FedRep
from lightning_modules.methods.fml import FML
from lightning_modules.methods.l2gd import L2GD
from lightning_modules.methods.local import Local
from lightning_modules.methods.per_fedavg import PerFedAvg
from lightning_modules.methods.pfedme import PFedMe
from lightning_modules.methods.scaffold import Scaffold
from lightning_modules.nets.mlp import Mlp
from lightning_modules.optimizers import OptimizerChoice
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.errors import ClientError, SettingsError
from pflsim.seeding import coin, torch_generator
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.feddyn import FedDyn as FedDynServer
from pflsim.servers.l2gd import L2GD as L2GDServer
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.scaffold import Scaffold as ScaffoldServer

ADAM = OptimizerChoice("adam", {"betas": (0.8, 0.95), "eps": 1e-6})
CASES: list[dict[str, Any]] = [
    {"momentum": 0.6, "weight_decay": 0.3},
    {"optimizer": OptimizerChoice("adam")},
    {"optimizer": ADAM, "weight_decay": 0.02, "clip_grad_norm": 0.5},
    {"optimizer": OptimizerChoice("adamw"), "weight_decay": 0.1},
    {"clip_grad_norm": 0.3},
    {"momentum": 0.5, "weight_decay": 0.01, "clip_grad_norm": 0.3},
]


def by_torch(w: World, client: int, count: int, keep: bool, **settings: Any) -> dict[str, torch.Tensor]:
    """A client of Local trained by torch.optim alone."""
    module = w.factory.build()
    shard = w.inline().host.shards[client]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    choice, training = settings.get("optimizer", OptimizerChoice()), w.factory.training
    given = dict(choice.options) | ({"momentum": training.momentum} if choice.name == "sgd" else {})
    optimizer = None
    for t in range(1, count + 1):
        lr = training.lr * training.lr_factor(t)
        if optimizer is None or not keep:
            made = kinds.get(choice.name, torch.optim.RMSprop)
            optimizer = made(module.parameters(), lr=lr, weight_decay=training.weight_decay, **given)
        optimizer.param_groups[0]["lr"] = lr
        generator = torch_generator(w.factory.seed, "batches", client, t)
        for index in torch.randperm(len(shard.train), generator=generator).split(training.batch_size):
            inputs, labels = shard.train.batch(index)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module.net(inputs), labels).backward()
            if training.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip_grad_norm)
            optimizer.step()
    return {name: value for name, value in module.state_dict().items() if name.startswith("net.")}


@pytest.mark.parametrize("stacks", [(), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("settings", CASES)
def test_equal_to_torch(settings: dict[str, Any], stacks: Any, double: None) -> None:
    """Two rounds with ragged shards, one by one and as a stack."""
    training = Training(lr=0.02, lr_decay=0.9, batch_size=4, **settings)
    w = world(Local, LocalServer(), training=training, stacks=stacks, data=exact(dataset()))
    executor = w.inline()
    rounds(executor, 2, 4)
    for client, state in states(executor).items():
        expected = by_torch(w, client, 2, keep=False, **settings)
        torch.testing.assert_close(dict(state), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.6}, {"optimizer": ADAM}, {"optimizer": OptimizerChoice("torch.optim.RMSprop")}]
)
@pytest.mark.slow
def test_kept_states(settings: dict[str, Any], double: None) -> None:
    """An optimiser that goes on from round to round, whoever trains on the same module in between."""
    choice = settings.get("optimizer", OptimizerChoice())
    kept = OptimizerChoice(choice.name, choice.options, keep=True)
    training = Training(lr=0.02, batch_size=4, **{**settings, "optimizer": kept})
    w = world(Local, LocalServer(), training=training, data=exact(dataset()))
    executor = w.inline()
    rounds(executor, 3, 4)
    for client, state in states(executor).items():
        expected = by_torch(w, client, 3, keep=True, **settings)
        found = {name: value for name, value in state.items() if name.startswith("net.")}
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        assert any(not torch.equal(expected[k], v) for k, v in by_torch(w, client, 3, keep=False, **settings).items())


@pytest.mark.parametrize(
    ("client", "rule"),
    [(Local, LocalServer()), (PerFedAvg, Server()), (Scaffold, ScaffoldServer()), (FedDyn, FedDynServer(alpha=0.01))],
)
def test_accumulated_batches(client: type[ClientModule], rule: Any, double: None) -> None:
    """The mean over mini-batches is that of their examples together; the last step of an epoch has a batch of one.

    Terms that do not depend on the examples count once.
    """
    found = list[Any]()
    for sizes in ({"batch_size": 6}, {"batch_size": 2, "accumulate_grad_batches": 3}):
        training = Training(lr=0.02, momentum=0.5 * (client is Local), **sizes)
        executor = world(client, rule, training=training, data=exact(dataset())).inline()
        found.append((rounds(executor, 2, 4), states(executor)))
    for number, state in found[0][1].items():
        torch.testing.assert_close(dict(found[1][1][number]), dict(state), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("keep", [False, True])
def test_parts_of_a_net(keep: bool, double: None) -> None:
    """A factor for the body, none for the head, whose last pattern counts; biases have no weight decay."""
    choice = OptimizerChoice(keep=keep, parts={"head": 7.0, "net.body": 0.1, "head.*": 1.0}, no_decay=True)
    training = Training(lr=0.02, batch_size=4, momentum=0.6, weight_decay=0.3, optimizer=choice)
    w = world(Local, LocalServer(), training=training, data=exact(dataset()))
    executor = w.inline()
    rounds(executor, 2, 4)
    for client, state in states(executor).items():
        module, shard, optimizer = w.factory.build(), w.inline().host.shards[client], None
        for t in (1, 2):
            if optimizer is None or not keep:
                groups = [
                    {"params": [p], "lr": 0.002 if ".body." in name else 0.02, "weight_decay": 0.3 * (p.dim() > 1)}
                    for name, p in module.named_parameters() if name.startswith("net.")
                ]  # fmt: skip
                optimizer = torch.optim.SGD(groups, momentum=0.6)
            for index in torch.randperm(len(shard.train), generator=torch_generator(0, "batches", client, t)).split(4):
                optimizer.zero_grad()
                inputs, labels = shard.train.batch(index)
                nn.functional.cross_entropy(module.net(inputs), labels).backward()
                optimizer.step()
        for name, value in module.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("client", "part", "stays"),
    [
        (FML, "body", ["net.body.", "common.body."]),
        (FML, "common.head", ["common.head."]),
        (FedMRL, "projection", ["projection."]),
        (FedEM, "head", ["net.head.", "others.0.head.", "others.1.head."]),
    ],
)
def test_parts_of_a_method_with_several_nets(client: Any, part: str, stays: list[str]) -> None:
    """A pattern is of every net, or of what the method has beside the client's."""
    common: dict[str, Any] = {} if client is FedEM else {"common": (partial(Mlp, hidden=[5]),)}
    training = Training(lr=0.1, batch_size=4, optimizer=OptimizerChoice(parts={part: 1e-30}))
    executor = world(client, Server(), training=training, **common).inline()
    before = {name: value.clone() for name, value in states(executor)[0].items()}
    module = executor.host.module
    rounds(executor, 1, 4)
    for name, value in states(executor)[0].items():
        if name in dict(module.named_parameters()):
            assert torch.equal(value, before[name]) == name.startswith(tuple(stays))


def test_parts_that_a_run_does_not_have() -> None:
    for client, parts, words in ((Local, {"bdy": 0.1}, "optimizer.parts=bdy"), (PFedMe, {"body": 0.1}, "pfedme")):
        training = Training(lr=0.02, optimizer=OptimizerChoice(parts=parts))
        with pytest.raises(SettingsError, match=words):
            module = world(client, LocalServer(), training=training).factory.build()
            module.make_step(Phase())


@pytest.mark.slow
def test_kept_states_of_several_phases() -> None:
    """Head and body have one each; none travels."""
    training = Training(lr=0.02, batch_size=4, momentum=0.5, optimizer=OptimizerChoice(keep=True))
    w = world(FedRep, Server(), training=training)
    executor = w.inline()
    plain = world(FedRep, Server(), training=Training(lr=0.02, batch_size=4, momentum=0.5)).inline()
    reports, expected = rounds(executor, 2, 4), rounds(plain, 2, 4)
    assert [r.up_bytes for r in reports] == [r.up_bytes for r in expected]
    module = executor.host.modules[0]
    assert module.kept_optimizers is not None and module.kept_optimizers.used.tolist() == [True, True]


def test_kept_states_of_a_schedule_that_depends_on_the_round() -> None:
    """With this seed, L2GD aggregates in round 1 only. An own method has to say which phases it keeps."""
    assert [coin(1, t, 0.2) for t in (1, 2, 3, 4)] == [True, False, False, False]

    class OwnL2GD(L2GD):
        kept_phases = ClientModule.kept_phases

    def made(client: type[L2GD], keep: bool) -> World:
        training = Training(lr=0.02, batch_size=4, momentum=0.5, seed=1, optimizer=OptimizerChoice(keep=keep))
        return world(partial(client, p=0.2, lam=1.0), L2GDServer(p=0.2), training=training, seed=1)

    kept, new = (after(made(L2GD, keep)) for keep in (True, False))
    for client, state in kept.items():
        assert state["kept_optimizers.used"].tolist() == [True]
        assert not torch.equal(state["net.head.weight"], new[client]["net.head.weight"])
    with pytest.raises(ClientError, match=r"optimizer\.keep=true: .*kept_phases"):
        after(made(OwnL2GD, True))


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"lr_schedule": "constant"}, [1, 1, 1, 1]),
        ({"lr_decay": 0.5}, [1, 0.5, 0.25, 0.125]),
        ({"lr_schedule": "step", "lr_decay": 0.5, "lr_step": 2}, [1, 1, 0.5, 0.5]),
        ({"lr_schedule": "cosine"}, [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.5 - math.sqrt(0.125)]),
        ({"lr_warmup": 3}, [1 / 3, 2 / 3, 1, 1]),
        ({"lr_schedule": "cosine", "lr_warmup": 2}, [0.5, 0.5 + math.sqrt(0.125), 0.5]),
    ],
)
def test_learning_rates_by_round(settings: dict[str, Any], factors: list[float]) -> None:
    training = Training(lr=0.2, rounds=4, **settings)
    found = [training.lr_factor(t + 1) for t in range(len(factors))]
    assert found == pytest.approx(factors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "cosine", "lr_decay": 0.9}, "lr_decay=0.9 .*cosine"),
        ({"lr_schedule": "constant", "lr_decay": 0.9}, "lr_decay=0.9 .*constant"),
        ({"lr_step": 3}, "lr_step=3 needs lr_schedule=step"),
        ({"optimizer": OptimizerChoice("adam"), "momentum": 0.9}, "momentum=0.9"),
    ],
)
def test_settings_that_contradict(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Training(**settings)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (OptimizerChoice("adma"), "optimizer=adma.*sgd, adam, adamw"),
        (OptimizerChoice("torch.nn.Linear"), "not a subclass of torch.optim.Optimizer"),
        (OptimizerChoice("adam", {"beta": 0.9}), "optimizer.options.beta: .*betas"),
        (OptimizerChoice("adam", {"betas": [0.9]}), "optimizer=adam .*betas"),
        (OptimizerChoice("sgd", {"momentum": 0.9}), "optimizer.options.momentum: set momentum=0.9"),
        (OptimizerChoice("adam", {"lr": 0.9}), "optimizer.options.lr: set lr=0.9"),
        (OptimizerChoice("adam", {"betas": (2.0, 0.9)}), "optimizer=adam .*beta"),
        (OptimizerChoice("torch.optim.Muon"), "optimizer=torch.optim.Muon .*2D"),
        (OptimizerChoice("torch.optim.Rprop", {"capturable": True}, keep=True), "optimizer=Rprop: .*capturable"),
    ],
)
def test_optimisers_that_are_refused(choice: OptimizerChoice, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        world(FedAvg, Server(), training=Training(optimizer=choice)).factory.build().make_step(Phase())


class OwnSparse(torch.optim.SparseAdam):
    """Of a user."""


class TwoSteps(torch.optim.SGD):
    """Of a user; takes anything, and needs a second step's closure by name."""

    def step(self, *arguments: Any, second: Any, **options: Any) -> Any: ...


class Anything(TwoSteps):
    """Of a user; takes anything, and needs nothing."""

    def step(self, *arguments: Any, **options: Any) -> Any: ...


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("torch.optim.LBFGS", "closure"),
        ("torch.optim.SparseAdam", "sparse"),
        (f"{__name__}.OwnSparse", "sparse"),
        (f"{__name__}.TwoSteps", "second"),
        ("torch.optim.Adafactor", ""),
        (f"{__name__}.Anything", ""),
    ],
)
def test_optimisers_whose_steps_need_more_are_refused_before_the_data_are_loaded(name: str, needs: str) -> None:
    what = f"optimizer={name} needs .*{needs}" if needs else "nowhere.npz"
    with pytest.raises(SettingsError, match=what):
        prepared("data=npz", "data.path=nowhere.npz", f"optimizer={name}")


@pytest.mark.parametrize("client", [PFedMe, PerFedAvg, partial(L2GD, p=0.2)])
def test_methods_of_gradient_descent_refuse_others(client: Any) -> None:
    with pytest.raises(SettingsError, match="optimizer=adam: .*gradient descent"):
        world(client, Server(), training=Training(lr=0.01, optimizer=OptimizerChoice("adam"))).factory.build()


def test_clipping_a_stack_with_a_scalar_parameter() -> None:
    """Each client's gradients are scaled as `clip_grad_norm_` does."""
    gradients = [torch.randn(3), torch.randn(3, 2), torch.randn(3, 2, 4)]
    found = clipped(gradients, 0.5, stacked=True)
    for row in range(3):
        parameters = [nn.Parameter(torch.zeros(g.shape[1:])) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[row].clone()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        for value, parameter in zip(found, parameters, strict=True):
            torch.testing.assert_close(value[row], parameter.grad)
