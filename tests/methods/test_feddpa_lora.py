"""FedDPA-LoRA: rounds by hand, the mixture, and what does not depend on it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, batches, started
from support import ALL, prepared, refusing, rounds, run_cohorts, same, states, world
from torch.nn.functional import cross_entropy

from lightning_modules.contract import checks
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.feddpa_lora import FedDPALoRA
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.frozen import frozen
from lightning_modules.nets.mlp import Mlp
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message
from pflsim.seeding import torch_generator
from pflsim.servers.fedavg import FedAvg as Server

pytest.importorskip("peft")
R, ALPHA = 2, 6
LAYERS = ("fc1", "fc2")
HEAD = ("net.head.weight", "net.head.bias")
ADAPTED: dict[str, Any] = {
    "adjust": Adjustments(lora={"r": R, "lora_alpha": ALPHA}),
    "model": partial(Mlp, hidden=[5, 4]),
    "training": Training(lr=0.3, batch_size=4),
}
Values = dict[str, torch.Tensor]


def matrix(layer: str, kind: str, private: bool = False) -> str:
    name = f"body.{layer}.lora_{kind}.default.weight"
    return f"private.{name.replace('.', '/')}" if private else f"net.{name}"


PRIVATE = [matrix(layer, kind, True) for layer in LAYERS for kind in "AB"]
COMMON = [matrix(layer, kind) for layer in LAYERS for kind in "AB"]


def mixed(share: float = 0.5, **more: Any) -> Any:
    return world(partial(FedDPALoRA, share=share), Server(), **{**ADAPTED, **more})


def scores(w: Values, x: torch.Tensor, share: float) -> torch.Tensor:
    """Of W₀ + α/r·((1 − a)·B_gA_g + a·B_lA_l); with a = 0 of the common adapter alone."""
    for layer in LAYERS:
        common, private = (w[matrix(layer, "B", own)] @ w[matrix(layer, "A", own)] for own in (False, True))
        weight = w[f"net.body.{layer}.base_layer.weight"] + ALPHA / R * ((1 - share) * common + share * private)
        x = torch.relu(x @ weight.T + w[f"net.body.{layer}.base_layer.bias"])
    return x @ w[HEAD[0]].T + w[HEAD[1]]


def epochs(executor: Any, client: int, t: int, phases: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The mini-batches of each phase in turn."""
    found = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches(executor, client, t, epochs=phases)]
    return [found[at : at + len(found) // phases] for at in range(0, len(found), len(found) // phases)]


def test_rounds_by_hand() -> None:
    """In float64: private matrices from round 2 on, first, with the exact gradient through both adapters."""
    share = 0.3
    with started(mixed(share)) as executor:
        module = executor.factory.build()
        fixed = {name: value.detach() for name, value in frozen(module).items()}
        start = {name: value.detach().clone() for name, value in module.named_parameters()}
        assert {*start} == {*PRIVATE, *COMMON, *HEAD} and {*module.shared_parameters()} == {*COMMON, *HEAD}
        for layer in LAYERS:
            private, common = start[matrix(layer, "A", True)], start[matrix(layer, "A")]
            assert private.any() and not torch.equal(private, common) and not start[matrix(layer, "B", True)].any()
        own: list[Any] = [dict(start) for _ in ALL]
        known: Values = {name: start[name] for name in (*COMMON, *HEAD)}
        for t, cohort in enumerate([(0, 1, 3), ALL, (1, 2, 3)], 1):
            for client in cohort:
                own[client] |= known
                phases = [(PRIVATE, share)] * (t > 1) + [([*COMMON, *HEAD], 0.0)]
                for (names, mix), some in zip(phases, epochs(executor, client, t, len(phases)), strict=True):
                    for x, y in some:
                        w = fixed | own[client] | {n: own[client][n].clone().requires_grad_() for n in names}
                        slopes = torch.autograd.grad(cross_entropy(scores(w, x, mix), y), [w[n] for n in names])
                        own[client] |= {n: own[client][n] - 0.3 * g for n, g in zip(names, slopes, strict=True)}
            shares = torch.tensor([SIZES[c] for c in cohort]).double() / sum(SIZES[c] for c in cohort)
            known = {n: torch.tensordot(shares, torch.stack([own[c][n] for c in cohort]), 1) for n in known}
            executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
            for found, expected in [
                *zip(states(executor).values(), own, strict=True),
                (executor.server.state.weights, known),
            ]:
                for name in found:
                    np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-10)
        for model, mix in (("personal", share), ("global", 0.0)):
            for row in executor.evaluate(EvalRequest(model, "received", ALL, ("test",), 3)):  # type: ignore[arg-type]
                test = executor.host.shards[row.client].test
                out = scores(fixed | own[row.client] | known, test.x.flatten(1), mix)
                assert row.loss == pytest.approx(float(cross_entropy(out, test.y, reduction="sum")), rel=1e-9)


def test_the_stacked_adapter_is_the_mixture() -> None:
    with started(mixed(0.3)) as executor:
        module = executor.host.module
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=torch_generator(0, "test"))
        w = {**frozen(module), **dict(module.named_parameters())}
        x = executor.host.shards[2].train.batch(slice(None))[0]
        found, expected = module.predict(x), scores(w, x.flatten(1), 0.3)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_without_a_share_it_is_fedavg() -> None:
    """To the bit; the private adapter stays, and the common one predicts."""
    ends, cohorts = [], [ALL, (0, 2), ALL]
    for made in (mixed(0.0), world(FedAvg, Server(), **ADAPTED)):
        executor = run_cohorts(made, cohorts)
        rows = executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 3))
        ends.append((states(executor), rows, executor.factory.build()))
    own, plain = ({c: {n: v for n, v in s.items() if n[:3] == "net"} for c, s in found.items()} for found, *_ in ends)
    assert same(own, plain) and ends[0][1] == ends[1][1]
    start = ends[0][2].state_dict()
    assert all(torch.equal(state[name], start[name]) for state in ends[0][0].values() for name in PRIVATE)


def test_the_common_adapter_does_not_depend_on_the_share() -> None:
    found = [run_cohorts(mixed(share), [ALL, (0, 2), ALL]) for share in (0.2, 0.9)]
    common = [{c: {n: v for n, v in s.items() if n[:3] == "net"} for c, s in states(e).items()} for e in found]
    assert same(*common)
    assert not any(torch.equal(*(states(e)[1][name] for e in found)) for name in PRIVATE)


def test_with_full_batches_the_common_adapter_is_that_of_fedavg() -> None:
    ends, training = [], Training(lr=0.3, batch_size=20, local_epochs=2)
    for made in (mixed(training=training), world(FedAvg, Server(), **{**ADAPTED, "training": training})):
        with started(made) as executor:
            rounds(executor, 3, 4, 0.75)
            ends.append(executor.server.state.weights)
    assert ends[0].keys() == ends[1].keys() == {*COMMON, *HEAD}
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=1e-9)


def test_a_newcomer_has_the_newest_common_and_the_initial_private_adapter() -> None:
    """And so has a client that has not taken part."""
    executor = run_cohorts(mixed(), [(0, 1), (0, 1)])
    module, initial = executor.host.module, executor.factory.build()
    message = Message(weights=executor.server.state.weights)
    for joining in (False, True):
        request = EvalRequest("personal", "received", (3,), ("test",), 2, joining=joining)
        with executor.host.module_for(request, 3, message):
            assert all(torch.equal(module.get_parameter(name), message.weights[name]) for name in COMMON)
            private = dict(module.named_parameters())
            assert all(torch.equal(private[name], dict(initial.named_parameters())[name]) for name in PRIVATE)


CONTRACT = [*checks.SMALL[:-1], "method=feddpa_lora", "lora={r: 2}"]
REFUSED: dict[str, tuple[str, ...]] = {
    "method.share=-0.1": ("method.share",),
    "method.share=1.1": ("method.share",),
    "method.share=nan": ("method.share",),
    "privacy=example privacy.delta=1e-4 privacy.noise=1": ("privacy=example", "method=feddpa_lora"),
    "model.variants=[{hidden:[8]},{hidden:[6]}]": ("feddpa_lora", "client 1"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_refused(given: str) -> None:
    with refusing(*REFUSED[given]):
        prepared(*CONTRACT, *given.split())


@pytest.mark.parametrize(
    "given", ["attack=alie attack.fraction=0.5", "server_optimizer=fedadam", "optimizer.keep=true", "lockstep=true"]
)
def test_what_is_taken(given: str) -> None:
    """In rounds with one phase and with two."""
    rounds(checks.inline(prepared(*CONTRACT, *given.split())), 2, 4)
