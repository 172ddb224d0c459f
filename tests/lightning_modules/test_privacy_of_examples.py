"""DP-SGD in local training: the steps, what is spent, and what is refused."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from support import inline, prepared, rounds, same, states

import pflsim
from lightning_modules import private_steps
from lightning_modules.base import ClientModule
from lightning_modules.contract.checks import Broken, takes_privacy_of_examples
from lightning_modules.contract.command import maker
from lightning_modules.methods.apfl import APFL
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedprox import FedProx
from lightning_modules.nets.cnn import Cnn
from lightning_modules.phases import Phase, Schedule
from lightning_modules.private_steps import NoisySteps
from lightning_modules.training import Training
from pflsim.analysis.runs import settings_by_key
from pflsim.config.components import COMPONENTS
from pflsim.config.compose import CONFIGS
from pflsim.data.federated import Examples
from pflsim.errors import RunError, SettingsError
from pflsim.privacy import epsilon
from pflsim.privacy_of_examples import rounded_up

B = 8


def client(rows: int = 5) -> tuple[ClientModule, Examples]:
    """FedProx with convolutions, away from the received model, and a client's examples."""
    torch.manual_seed(0)
    net = Cnn((1, 8, 8), 3, channels=[2, 3], kernel=3, padding=1, hidden=4)
    module = FedProx(net, Training(batch_size=B, lr=0.5), mu=0.3)
    module.received.store({name: torch.randn_like(module.get_parameter(name)) for name in module.shared_parameters()})
    return module.train(), Examples(torch.randn(rows, 1, 8, 8), torch.arange(rows) % 3)


def noisy(clip: float, noise: float, seed: int = 0) -> NoisySteps:
    return NoisySteps(clip, noise, torch.Generator().manual_seed(seed))


def gradient(module: ClientModule, batch: Any, steps: NoisySteps) -> tuple[torch.Tensor, Any]:
    parameters = [*module.parameters()]
    terms = steps.compute_gradients(module, batch, Phase(), parameters)
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), terms


def one_by_one(module: ClientModule, examples: Examples) -> list[torch.Tensor]:
    """The gradients of the objective on single examples, by autograd."""
    found = []
    for row in range(len(examples)):
        loss = torch.stack([*module.objective(examples.batch(torch.tensor([row]))).values()]).sum()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*module.parameters()])]))
    return found


@pytest.mark.parametrize("chunk", [1, 2**26])
def test_the_sum_of_clipped_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain loop; the run's batch size divides it, whatever the size of the batch."""
    monkeypatch.setattr(private_steps, "CHUNK_BYTES", chunk)
    module, examples = client()
    each = one_by_one(module, examples)
    clip = float(torch.stack(each).norm(dim=1).median())  # some are clipped
    expected = sum(g * min(1.0, clip / float(g.norm())) for g in each) / B
    found, terms = gradient(module, examples.batch(slice(None)), noisy(clip, 0.0))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        plain = module.objective(examples.batch(slice(None)))
    assert {name: float(v) for name, v in terms.items()} == pytest.approx({k: float(v) for k, v in plain.items()})


def test_without_clipping_it_is_the_gradient_of_the_batch() -> None:
    module, examples = client()
    loss = torch.stack([*module.objective(examples.batch(slice(None))).values()]).sum()
    whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*module.parameters()])])
    found, _ = gradient(module, examples.batch(slice(None)), noisy(1e9, 0.0))
    torch.testing.assert_close(found, whole * len(examples) / B, rtol=1e-5, atol=1e-7)


def test_the_noise_of_an_empty_batch() -> None:
    """Its deviation is σC/B; with examples, the same noise is added."""
    module, examples = client()
    none, terms = gradient(module, examples.batch(torch.arange(0)), noisy(0.7, 1.3))
    squares = float((none / (1.3 * 0.7 / B)).square().sum())
    assert chi2.ppf(1e-4, len(none)) < squares < chi2.ppf(1 - 1e-4, len(none)) and terms == {}
    both, clean = (gradient(module, examples.batch(slice(None)), noisy(0.7, noise))[0] for noise in (1.3, 0.0))
    torch.testing.assert_close(both - clean, none, rtol=1e-4, atol=1e-6)
    assert not torch.equal(none, gradient(module, examples.batch(torch.arange(0)), noisy(0.7, 1.3, seed=1))[0])


@pytest.mark.parametrize(("rows", "steps"), [(5, 2), (40, 10)])
def test_poisson_batches(rows: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of ⌈n/B⌉ steps; a client with at most B examples has all of them in each step."""
    module, examples = client(rows)
    module.training_settings = replace(module.training_settings, local_epochs=2)
    sizes = []
    for seed in range(30):
        monkeypatch.setattr(ClientModule, "optimise", lambda self, batch, *rest: sizes.append(len(batch[1])) or {})
        generator = torch.Generator().manual_seed(seed)
        assert len([*noisy(1.0, 1.0)(module, module.stages()[0], examples, generator)]) == steps
    n = len(sizes)
    if rows <= B:
        assert set(sizes) == {rows}
    else:
        assert abs(sum(sizes) / n - B) < 4 * (B * (1 - B / rows) / n) ** 0.5 and len({*sizes}) > 3


def test_phases_on_one_batch_get_batches_of_their_own() -> None:
    """The accountant composes independent steps."""
    seen = []
    made = run_prepared("method=ditto", "batch_size=16")
    module, own = made.factory.build(), inline(made).host.shards[3].train
    module.optimise = lambda batch, step, _: seen.append((step.phase.name, batch[1].tolist())) or {}  # type: ignore
    list(noisy(1.0, 1.0)(module, module.stages()[0], own, torch.Generator().manual_seed(0)))
    assert [name for name, _ in seen[:4]] == ["global", "personal"] * 2
    assert seen[0][1] != seen[1][1]


SMALL = ["data=digits", "clients=4", "rounds=2", "model=mlp", "model.hidden=[6]", "executor=inline", "method=fedavg"]
EXAMPLE = ["privacy=example", "privacy.delta=1e-4", "privacy.noise=0.8", "batch_size=32"]


def run_prepared(*overrides: str) -> Any:
    return prepared(*SMALL, *EXAMPLE, *overrides)


@pytest.mark.parametrize(("method", "warned"), [(["fedavg"], 0), (["fedbabu"], 1), (["fedbabu", 0], 0)])
def test_training_without_noise_before_an_evaluation_is_a_warning(method: list[Any], warned: int) -> None:
    name, *epochs = method
    made = run_prepared(f"method={name}", *(f"method.finetune_epochs={number}" for number in epochs))
    assert sum("without noise" in each for each in made.warnings) == warned


def test_a_run_is_a_function_of_its_seed() -> None:
    found = []
    for seed in (0, 0, 1):
        made = run_prepared()
        steps = replace(made.factory.private_steps, seed=seed)
        executor = inline(replace(made, factory=replace(made.factory, private_steps=steps)))
        rounds(executor, 2, 4)
        found.append(states(executor))
    assert same(found[0], found[1]) and not same(found[0], found[2])
    assert not made.factory.stacks


def test_every_client_and_round_has_noise_of_its_own() -> None:
    steps = run_prepared().factory.private_steps
    draws = [torch.randn(9, generator=steps.of(*one).generator) for one in ((0, 1), (1, 1), (0, 2), (0, 1))]
    assert torch.equal(draws[0], draws[3])
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


def test_steps_of_all_phases_are_counted() -> None:
    """FedRep: 3 epochs of the head, and 7 steps of the body; Ditto: two steps for every batch."""
    rep = run_prepared("method=fedrep", "method.head_epochs=3", "local_steps=7").factory.private_steps
    made = run_prepared("method=ditto", "local_epochs=2")
    sizes = [len(rows) for rows in made.partition.train]
    assert rep.steps == tuple(3 * math.ceil(n / 32) + 7 for n in sizes)
    assert made.factory.private_steps.steps == tuple(4 * math.ceil(n / 32) for n in sizes)
    assert all(32 / n <= q < 1.1 * 32 / n for n, q in zip(sizes, rep.sampling, strict=True))


@pytest.mark.parametrize(("given", "found"), [(4 / 199, 0.021), (0.05, 0.05), (0.0999, 0.1), (1.0, 1.0), (0.991, 1.0)])
def test_probabilities_are_rounded_up_to_two_digits(given: float, found: float) -> None:
    assert rounded_up(given) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["method=fedrod"], "method=fedrod"),
        (["method=fedbn"], "method=fedbn"),
        (["method=apfl"], "method=apfl"),
        (["model=cnn_bn", "model.channels=[2,3]", "model.kernel=3", "model.padding=1", "buffers=local"], "batch norm"),
        (["lockstep=true"], "lockstep"),
        (["task.class_weights=balanced"], "class_weights"),
        (["task.class_weights=[1,2,1,1,1,1,1,1,1,1]"], "class_weights"),
        (["faults.straggler=0.5"], "straggler"),
        (["optimizer.keep=true"], "optimizer.keep"),
        (["privacy.delta=0.1"], r"privacy\.delta=0\.1"),
        (["privacy.noise=null"], r"privacy\.epsilon"),
        (["privacy.noise=[1,2]"], "4 clients"),
        (["privacy.noise=-1"], r"privacy\.noise"),
    ],
)
def test_refusals(settings: list[str], named: str) -> None:
    given = {one.partition("=")[0]: one for one in [*SMALL, *EXAMPLE, *settings]}
    if "model=cnn_bn" in settings:
        given.pop("model.hidden")
    with pytest.raises(SettingsError, match=named) as error:
        prepared(*given.values())
    assert "\n" not in str(error.value)


def test_a_fixed_mixture_of_apfl_is_allowed() -> None:
    assert run_prepared("method=apfl", "method.adaptive=false").factory.private_steps is not None


class Heir(FedProx):
    """Does not say that its steps are private."""


def test_a_subclass_says_it_for_itself() -> None:
    with pytest.raises(SettingsError, match="private_steps"):
        prepared(*SMALL[:-1], *EXAMPLE, f"method.client={__name__}.Heir", "method.server=pflsim.servers.fedavg.FedAvg")


class Grows(FedAvg):
    """Trains longer from round 2 on, which the accountant does not know."""

    private_steps = True

    def schedule(self) -> Schedule:
        return (Phase(epochs=1 if self.round_number < 2 else 3),)


def test_more_steps_than_counted_are_refused(tmp_path: Path) -> None:
    own = f"method.client={__name__}.Grows", "method.server=pflsim.servers.fedavg.FedAvg"
    with pytest.raises((RunError, SettingsError), match="more steps than in round 1"):
        run(tmp_path / "run", *own)


class Adaptive(APFL):
    """Learns its mixture from all examples, and says that it does not."""

    private_steps = True

    def __init__(self, net: Any, training: Training):
        super().__init__(net, training)
        self.private_steps = True


def test_the_contract_notices_another_use_of_examples() -> None:
    make = maker(f"{__name__}.Adaptive", ["method.server=pflsim.servers.fedavg.FedAvg"], [CONFIGS])
    with pytest.raises(Broken, match="alpha"):
        takes_privacy_of_examples(make)


# What is spent --------------------------------------------------------------------------------------------------------


def run(folder: Path, *overrides: str) -> Any:
    return pflsim.run(progress="none", overrides=[*SMALL, *EXAMPLE, *overrides], run_dir=folder)


def privacy_of(made: Any) -> Any:
    return json.loads((made.folder / "summary.json").read_text())["privacy"]


def test_epsilon_of_a_run_and_of_its_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With half of the clients in a round, each client spends what its own rounds cost."""
    pytest.importorskip("dp_accounting")
    made, half = run(tmp_path / "run", "rounds=4", "fraction=0.5"), run(tmp_path / "half", "fraction=0.5")
    about = privacy_of(made)
    cohorts = [{*rows["client"]} for _, rows in made.per_client().query("up_bytes > 0").groupby("round")]
    sizes = [each["train"] for each in made.partition["class_counts"]]
    expected = [
        epsilon(rounded_up(32 / sum(n)), 0.8, 1e-4, sum(c in some for some in cohorts) * math.ceil(sum(n) / 32))
        for c, n in enumerate(sizes)
    ]
    assert about["epsilon"]["clients"] == pytest.approx(expected) and len({*expected}) > 2
    assert about["epsilon"]["max"] == max(expected)
    assert about["epsilon"]["mean"] == pytest.approx(sum(expected) / 4)
    assert privacy_of(half)["epsilon"]["max"] < max(expected)
    pflsim.resume(half, rounds=4)
    assert privacy_of(half) == about
    assert (half.folder / "per_client.csv").read_bytes() == (made.folder / "per_client.csv").read_bytes()
    figures = pflsim.compare([made], at="last")[0].rows[0].figures
    assert figures["epsilon"].values[0] == max(expected)


def test_a_budget(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("dp_accounting")
    made = run(tmp_path / "run", "privacy.noise=null", "privacy.epsilon=3", "clients=2")
    about, noise = privacy_of(made), made.config["privacy"]["noise"]
    each = zip(about["sampling"], noise, about["steps"], strict=True)
    assert all(epsilon(q, z, 1e-4, 2 * t) <= 3 < epsilon(q, z - 0.001, 1e-4, 2 * t) for q, z, t in each)
    assert len({*noise}) > 1 and 2.9 < about["epsilon"]["max"] <= 3
    with pytest.raises(SettingsError, match=r"above privacy\.epsilon=3"):
        pflsim.resume(made, rounds=20)
    monkeypatch.delattr("pflsim.privacy_of_examples.noise_for")
    again = pflsim.resume(made, rounds=2)  # calibrates nothing
    assert again.config["privacy"]["noise"] == noise
    names: dict[str, str] = dict.fromkeys(COMPONENTS, "")
    keys = [settings_by_key({"privacy": {"noise": own, "epsilon": 3.0}}, names) for own in (noise, noise[::-1])]
    assert keys[0] == keys[1]  # of two seeds


@pytest.mark.parametrize("noise", ["0", "0.8"])
def test_nothing_is_said_of_a_run_that_spends_nothing(noise: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Without noise, and without the package."""
    if noise != "0":
        monkeypatch.setitem(sys.modules, "dp_accounting", None)
        epsilon.cache_clear()
    made = run(tmp_path / "run", f"privacy.noise={noise}")
    assert privacy_of(made)["epsilon"] is None and "ε" not in repr(pflsim.compare([made]))


@pytest.mark.parametrize(("n", "noise"), [(199, 2.148), (172, 2.449), (30, 13.348), (85, 4.774)])
def test_the_noise_of_hearts_hospitals(n: int, noise: float) -> None:
    """1,500 steps with batches of 4 at ε = 1 and δ = 1e-3; two evaluations instead of a search."""
    pytest.importorskip("dp_accounting")
    assert epsilon(4 / n, noise, 1e-3, 1500) <= 1 < epsilon(4 / n, noise - 0.001, 1e-3, 1500)


@pytest.mark.slow
def test_equal_on_actors(pool: Any) -> None:
    from ray_actors.actors_equal import actors_equal_inline

    actors_equal_inline(lambda *more: run_prepared("method=ditto", *more), pool)
