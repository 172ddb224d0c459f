"""The one training loop: batches as index slices of tensors in memory, phases in turn on each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Step
from lightning_modules.phases import Stage
from pflsim.data.federated import Examples


def passes(n: int, stage: Stage, batch_size: int, generator: torch.Generator, smallest: int = 1) -> Iterator[Tensor]:
    """Row numbers of a stage's examples in the order in which they are taken, pass by pass, a new permutation for each.

    Args:
        n: examples in the shard.
        stage: says for how many epochs (all batches of a pass) or steps (passes go on as needed).
        batch_size: the last batch of a pass may be smaller.
        generator: decides the permutations.
        smallest: a last batch with fewer examples is left out (those of a pass; another pass leaves others out).
    """
    rest = n % batch_size
    used = n if rest == 0 or rest >= smallest else n - rest
    count, taken, done = -(-used // batch_size), 0, 0
    while count and (stage.steps is None or taken < stage.steps) and (stage.epochs is None or done < stage.epochs):
        due = count if stage.steps is None else min(count, stage.steps - taken)
        yield torch.randperm(n, generator=generator)[: min(used, due * batch_size)]
        taken, done = taken + due, done + 1


def batch_indices(
    n: int, stage: Stage, batch_size: int, generator: torch.Generator, smallest: int = 1
) -> Iterator[Tensor]:
    """Row numbers of a stage's mini-batches; see `passes`."""
    for order in passes(n, stage, batch_size, generator, smallest):
        yield from order.split(batch_size)


def batches(module: ClientModule, examples: Examples, generator: torch.Generator) -> Iterator[tuple[Stage, Batch]]:
    """All mini-batches of a round, each with the stage it belongs to."""
    for stage in module.stages():
        size, smallest = module.training_settings.batch_size, module.smallest_batch
        for index in batch_indices(len(examples), stage, size, generator, smallest):
            yield stage, examples.batch(index)


def train(module: ClientModule, examples: Examples, generator: torch.Generator) -> tuple[int, dict[str, float]]:
    """Train a module for one round on a client's training examples.

    Args:
        module: in the state it starts the round from; changed in place.
        examples: on the module's device.
        generator: decides the order of the examples.

    Returns:
        The number of mini-batches, and the mean over them of every named loss term.
    """
    module.train()
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    current: Stage | None = None
    steps: list[Step] = []
    taken = 0
    for stage, batch in batches(module, examples, generator):
        if stage is not current:
            current, steps = stage, [module.step_of(phase) for phase in stage.phases]
        for step in steps:
            for name, value in module.optimise(batch, step).items():
                sums[name] = sums[name] + value if name in sums else value.clone()
                counts[name] = counts.get(name, 0) + 1
        taken += 1
    module.zero_grad(set_to_none=True)
    return taken, {name: float(total) / counts[name] for name, total in sums.items()}
