"""FedSA-LoRA and FFA-LoRA: what of the adapters is trained, shared and frozen, and rounds by hand."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import SIZES, batches
from support import check_contract, check_loaded, rounds, same, slow_except, states, world
from torch.nn.functional import cross_entropy

import pflsim
from lightning_modules.contract.checks import CHECKS, SMALL, Make, lockstep_equals_loop, rounds_run
from lightning_modules.contract.command import maker
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedper import FedPer
from lightning_modules.methods.fedsa_lora import FedSALoRA
from lightning_modules.methods.ffa_lora import FFALoRA
from lightning_modules.methods.local import Local
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.frozen import frozen
from lightning_modules.training import Training
from pflsim.config.compose import CONFIGS
from pflsim.records.evaluation import Scope
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.local import Local as Alone
from ray_actors.actors_equal import actors_equal_inline
from ray_actors.resources import ActorPool

pytest.importorskip("peft")
R, ALPHA = 2, 6
ADAPTED = {"adjust": Adjustments(lora={"r": R, "lora_alpha": ALPHA}), "training": Training(lr=0.3, batch_size=4)}
LAYER = "net.body.fc1."
A, B = f"{LAYER}lora_A.default.weight", f"{LAYER}lora_B.default.weight"
HEAD = ("net.head.weight", "net.head.bias")
IN, OUT = 16, 5
"""Inputs and outputs of the layer with an adapter."""


METHODS = ("feddpa_lora", "fedsa_lora", "ffa_lora", "flexlora", "hetlora")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check", slow_except({rounds_run, lockstep_equals_loop}, CHECKS), ids=lambda c: c.__name__)
def test_contract(method: str, check: Callable[[Make], None]) -> None:
    check_contract(method, check, maker(method, ["lora={r: 16}"], [CONFIGS]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[:1] + METHODS[3:])
def test_equal_on_actors(method: str, pool: ActorPool) -> None:
    actors_equal_inline(maker(method, ["lora={r: 16}"], [CONFIGS]), pool)


@pytest.mark.slow
@pytest.mark.parametrize("head", [[], ["freeze=[head]"]])
@pytest.mark.parametrize("method", METHODS[:1] + METHODS[3:])
def test_runs_and_models_that_are_loaded(method: str, head: list[str], tmp_path: Path) -> None:
    """In lockstep, with absent clients and a newcomer; with a frozen head, adapters alone are sent."""
    given = [*SMALL, f"method={method}", "lora={r: 16}", "model.hidden=[8,6]", "fraction=0.5", "lockstep=true", *head]
    run = pflsim.run(overrides=[*given, "eval.holdout_clients=1"], run_dir=str(tmp_path / "run"), progress="none")
    check_loaded(run, 0, 1, 2)
    check_loaded(run, 1, scope=Scope("global", "test", "received"), export=False)
    traffic = run.history[-1].traffic.up_bytes
    layers = 64 + 8 + 8 + 6  # inputs and outputs of both
    ranks = (4, 8, 16) if method in ("hetlora", "flexlora") else (16,)
    assert traffic in {4 * (sum(pair) * layers + 2 * (not head) * (6 * 10 + 10)) for pair in product(ranks, ranks)}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_adapters_is_refused(method: str, refused: Callable[..., str]) -> None:
    error = refused(f"method={method}", "data=digits", "model=mlp", "executor=inline")
    assert "lora=" in error and f"method={method} " in error


@pytest.mark.parametrize(
    ("client", "trained", "sent"), [(FedSALoRA, (A, B, *HEAD), (A,)), (FFALoRA, (B, *HEAD), (B, *HEAD))]
)
def test_two_rounds_by_hand(client: Any, trained: tuple[str, ...], sent: tuple[str, ...]) -> None:
    """SGD on y = W₀x + α/r·B(Ax), with gradients of the product in float64; then the mean over the examples."""
    executor = world(client, Server(), **ADAPTED).inline()
    module = executor.factory.build()
    start = {name: value.detach().double() for name, value in [*module.named_parameters(), *frozen(module).items()]}
    fixed = {name: start[name] for name in start if name not in trained}
    assert not start[B].any() and {*trained} == {*module.state_dict()}
    own = [{name: start[name] for name in trained} for _ in SIZES]
    for t in (1, 2):
        for number, values in enumerate(own):
            for x, y in batches(executor, number, t):
                leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
                w, inputs = {**fixed, **leaves}, torch.from_numpy(x) / 255
                weight = w[f"{LAYER}base_layer.weight"] + ALPHA / R * w[B] @ w[A]
                hidden = torch.relu(inputs @ weight.T + w[f"{LAYER}base_layer.bias"])
                loss = cross_entropy(hidden @ w[HEAD[0]].T + w[HEAD[1]], torch.from_numpy(y))
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                values.update({name: values[name] - 0.3 * g for name, g in zip(leaves, slopes, strict=True)})
        ends = [dict(values) for values in own]
        means = {name: sum(n * v[name] for n, v in zip(SIZES, own, strict=True)) / sum(SIZES) for name in sent}
        for values in own:
            values.update(means)
    reports = rounds(executor, 2, 4)
    for found, expected in [*zip(states(executor).values(), ends, strict=True), (executor.server.state.weights, means)]:
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-5)
    counts = {A: R * IN, B: OUT * R, HEAD[0]: OUT * 3, HEAD[1]: 3}
    assert {report.up_bytes for report in reports} == {4 * sum(counts[name] for name in sent)}


def test_the_first_step_leaves_a_as_it_is() -> None:
    executor = world(
        FedSALoRA, Server(), adjust=ADAPTED["adjust"], training=Training(lr=0.3, batch_size=4, local_steps=1)
    ).inline()
    first = executor.factory.build().get_parameter(A)
    rounds(executor, 1, 4)
    assert all(torch.equal(state[A], first) and state[B].any() for state in states(executor).values())


def test_one_client_of_fedsa_is_local() -> None:
    ends = []
    for client, server in ((FedSALoRA, Server()), (Local, Alone())):
        executor = world(client, server, sizes=(12,), **ADAPTED).inline()
        rounds(executor, 3, 1)
        ends.append(states(executor))
    assert same(*ends)


def test_fedsim_with_private_heads_and_matrices_b_is_fedsa() -> None:
    ends = []
    for client in (FedSALoRA, partial(FedPer, private=["head", "*.lora_B.*"])):
        executor = world(client, Server(), **ADAPTED).inline()
        assert {report.up_bytes for report in rounds(executor, 3, 4, 0.75)} == {4 * R * IN}
        ends.append(states(executor))
    assert same(*ends)


def test_ffa_is_fedavg_where_a_is_the_identity() -> None:
    """With α = r, B is the change of W: FedAvg on this layer alone; the head stays."""
    ends = []
    adapters, others = Adjustments(lora={"r": IN, "lora_alpha": IN}), Adjustments(freeze=("head", "*.bias"))
    for client, adjust in ((partial(FFALoRA, head="frozen"), adapters), (FedAvg, others)):
        made = world(client, Server(), adjust=adjust, training=ADAPTED["training"])
        executor = made.inline()
        if adjust is adapters:
            frozen(executor.host.module)[A].copy_(torch.eye(IN))
        start = made.factory.build()
        rounds(executor, 3, 4)
        found = executor.server.state.weights
        ends.append(found[B] if adjust is adapters else found[f"{LAYER}weight"] - start.get_parameter(f"{LAYER}weight"))
    assert ends[0].abs().max() > 0.01
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-5)
