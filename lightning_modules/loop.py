"""The one training loop: batches as index slices of tensors in memory, phases in turn on each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Step
from lightning_modules.phases import Stage
from pflsim.data.federated import Examples


def passes(
    n: int, stage: Stage, batch_size: int, generator: torch.Generator, smallest: int = 1, work: float = 1.0
) -> Iterator[Tensor]:
    """Row numbers of a stage's examples in the order in which they are taken, pass by pass, a new permutation for each.

    Args:
        n: examples in the shard.
        stage: says for how many epochs (all batches of a pass) or steps (passes go on as needed).
        batch_size: the last batch of a pass may be smaller.
        generator: decides the permutations; they are drawn whatever the share, so that the next stage has its own.
        smallest: a last batch with fewer examples is left out (those of a pass; another pass leaves others out).
        work: the share of the stage's batches that is taken, the first ones; see `shortened`.
    """
    rest = n % batch_size
    used = n if rest == 0 or rest >= smallest else n - rest
    count = -(-used // batch_size)
    if not count:
        return
    limits = stage.steps, None if stage.epochs is None else stage.epochs * count
    whole = min(limit for limit in limits if limit is not None)
    taken = shortened(whole, work)
    for first in range(0, whole, count):
        order = torch.randperm(n, generator=generator)
        if first < taken:
            yield order[: min(used, (taken - first) * batch_size)]


def shortened(batches: int, work: float) -> int:
    """How many of a stage's batches a client takes that does a share of its work: ⌈work · batches⌉, so at least one.

    Raises:
        ValueError: the share is not in (0, 1].
    """
    if not 0 < work <= 1:
        raise ValueError(f"work={work} is not in (0, 1]: it is the share of its mini-batches that a client takes")
    return math.ceil(work * batches)


def batch_indices(
    n: int, stage: Stage, batch_size: int, generator: torch.Generator, smallest: int = 1, work: float = 1.0
) -> Iterator[Tensor]:
    """Row numbers of a stage's mini-batches; see `passes`."""
    for order in passes(n, stage, batch_size, generator, smallest, work):
        yield from order.split(batch_size)


def batches(
    module: ClientModule, examples: Examples, generator: torch.Generator, work: float = 1.0
) -> Iterator[tuple[Stage, Batch]]:
    """All mini-batches of a round, each with the stage it belongs to."""
    for stage in module.stages():
        size, smallest = module.training_settings.batch_size, module.smallest_batch
        for index in batch_indices(len(examples), stage, size, generator, smallest, work):
            yield stage, examples.batch(index)


def train(
    module: ClientModule, examples: Examples, generator: torch.Generator, work: float = 1.0
) -> tuple[int, dict[str, float]]:
    """Train a module for one round on a client's training examples.

    Args:
        module: in the state it starts the round from; changed in place.
        examples: on the module's device.
        generator: decides the order of the examples.
        work: the share of every stage's mini-batches that it takes, in (0, 1]: those it would have taken first.

    Returns:
        The number of mini-batches, and the mean over them of every named loss term.
    """
    module.train()
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    current: Stage | None = None
    steps: list[Step] = []
    taken = 0
    for stage, batch in batches(module, examples, generator, work):
        if stage is not current:
            current, steps = stage, [module.step_of(phase) for phase in stage.phases]
        for step in steps:
            for name, value in module.optimise(batch, step).items():
                sums[name] = sums[name] + value if name in sums else value.clone()
                counts[name] = counts.get(name, 0) + 1
        taken += 1
    module.zero_grad(set_to_none=True)
    return taken, {name: float(total) / counts[name] for name, total in sums.items()}
