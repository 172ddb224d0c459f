"""The workloads of the benchmarks (cases), and the ways to run each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pflsim.config.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "out"
CORES = 2
"""Threads of the plain loop, maximum of workers and actors, and processes in the measurement of the machine."""

BASELINES = {
    "plain": "plain loop",
    "plain1": "plain loop, one thread",
    "workers": "plain Ray workers",
}
OURS = {
    "loop": "loop",
    "lockstep": "lockstep",
    "ray1": "Ray, 1 actor",
    "ray2": "Ray, 2 actors",
}
WAYS = {**BASELINES, **OURS, "bf16": "Ray, 2 actors, bf16", "start": "start", "small": "per client"}
"""The name of each way in the tables."""

EXECUTION = {
    "loop": ("executor=inline", "lockstep=false"),
    "lockstep": ("executor=inline", "lockstep=true"),
    "ray1": ("executor=ray", "placement.actors=1", f"placement.cpus={CORES}"),
    "ray2": ("executor=ray", "placement.actors=2", f"placement.cpus={CORES}"),
    "bf16": ("executor=ray", "placement.actors=2", f"placement.cpus={CORES}", "precision=bf16"),
}
"""The settings of each way of pflsim; the baselines use the data and the training settings of `loop`."""

COMMON = (
    "method=fedavg",
    "partition=dirichlet",
    "split=merged",
    "split.stratify=true",
    "split.validation=0",
    "batch_size=10",
    "lr=0.01",
)
ALL = (*BASELINES, *OURS)
LOCAL = ("loop", "lockstep")


@dataclass(frozen=True)
class Case:
    """One workload.

    Args:
        name: for --cases.
        about: a description for the tables.
        settings: overrides of the command line, after `COMMON`.
        ways: the ways to run it, each in its own process.
        rounds: measured rounds, after a first one that is reported separately.
        examples: images of Fashion-MNIST, training and test together; None: all.
        data: the data set.
        quick: overrides for --quick.
        growth: record the memory after every round.
    """

    name: str
    about: str
    settings: tuple[str, ...] = ()
    ways: tuple[str, ...] = ALL
    rounds: int = 3
    examples: int | None = None
    data: str = "fashion_mnist"
    quick: tuple[str, ...] = ()
    growth: bool = False


def _case(
    model: str,
    clients: int,
    about: str,
    *,
    ways: tuple[str, ...] = ALL,
    rounds: int = 3,
    examples: int | None = None,
) -> Case:
    first, *rest = model.split()
    name = f"{first.removesuffix('18')}-{clients}"
    settings = (f"model={first}", *rest, f"clients={clients}")
    return Case(name, f"{about}, {clients} clients", settings, ways, rounds, examples)


MLP, CNN, BN, RESNET = (
    "MLP 784-100-10",
    "CNN (32, 64; 512)",
    "the same with BatchNorm, 10,000 images",
    "ResNet-18 of width 16, 5,000 images",
)
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("mlp", 20, MLP, rounds=5),
        _case("mlp", 100, MLP, rounds=5),
        _case("cnn", 20, CNN, ways=(*ALL, "bf16")),
        _case("cnn", 100, CNN),
        _case("cnn_bn", 20, BN, examples=10_000),
        _case("cnn_bn", 100, BN, examples=10_000),
        _case("resnet18 model.width=16", 20, RESNET, examples=5_000),
        _case("resnet18 model.width=16", 100, RESNET, examples=5_000),
        Case("memory-mlp", f"{MLP}, 100 clients, 100 rounds", ("model=mlp", "clients=100"), ("ray2",), 99, growth=True),
        Case(
            "memory-cnn", f"{CNN}, 100 clients, 100 rounds, 5,000 images", ("model=cnn", "clients=100"), ("ray2",), 99,
            5_000, growth=True,
        ),
        Case(
            "thousand", "MLP 784-100-10 on MNIST, 1,000 clients, 100 a round",
            ("model=mlp", "clients=1000", "fraction=0.1"), ("ray2",), data="mnist", quick=("clients=100",),
        ),
        Case("pfedla", f"pFedLA, {CNN}, 100 clients", ("method=pfedla", "model=cnn", "clients=100"), ("ray2",)),
        Case("pfedme", f"pFedMe, {MLP}, 20 clients", ("method=pfedme", "model=mlp", "clients=20"), LOCAL),
        Case("perfedavg", f"Per-FedAvg, {MLP}, 20 clients", ("method=per_fedavg", "model=mlp", "clients=20"), LOCAL),
        Case(
            "lora", "ViT of 0.8 M parameters, LoRA adapters of rank 8, 20 clients, 2,000 images",
            ("model=benchmarks.lora.vit", "lora.r=8", "lora.targets=[q_proj,v_proj]", "clients=20"), LOCAL,
            examples=2_000,
        ),
        Case("start", "from the command line", ways=("start",)),
        Case("per-client", "1,000 clients of a small model, inline, one thread", ways=("small",)),
    )
}  # fmt: skip
QUICK_IMAGES = 2_000
"""Images of each case with --quick."""


def overrides(case: Case, way: str, rounds: int, root: str, quick: bool = False) -> list[str]:
    """Return the command line of a case.

    Args:
        case: the case.
        way: one of `WAYS`.
        rounds: all rounds of the run.
        root: the folder of the data sets.
        quick: whether to use few images.
    """
    examples = QUICK_IMAGES if quick else case.examples
    data = (f"data={case.data}",) if examples is None else ("data=few_fashion_mnist", f"data.examples={examples}")
    chosen = {o.partition("=")[0]: o for o in (*COMMON, *case.settings, *(case.quick if quick else ()))}
    return [*data, f"data.root={root}", *chosen.values(), f"rounds={rounds}", *EXECUTION.get(way, EXECUTION["loop"])]


def settings_of(lines: Sequence[str]) -> Settings:
    """Return the settings of a command line, as launch.py composes them."""
    from pflsim.config.compose import CONFIGS, composed, parse, to_settings

    return to_settings(composed(parse(lines), [CONFIGS, ROOT / "benchmarks" / "configs"]))
