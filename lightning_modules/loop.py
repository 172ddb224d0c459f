"""The training loop. Batches are index slices of tensors in memory."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_modules.base import ClientModule, Step, Terms
from lightning_modules.phases import Phase, Stage, stages
from pflsim.data.federated import Examples


def epoch_orders(
    n: int, stage: Stage, batch_size: int, generator: torch.Generator, smallest: int = 1, work: float = 1.0,
    accumulate: int = 1,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the row numbers of a stage's examples in training order, one permutation per epoch.

    Args:
        n: examples in the shard.
        stage: its length in epochs or in steps; a length in steps takes as many epochs as needed.
        batch_size: the last batch of an epoch may be smaller.
        generator: draws the permutations. All of them are drawn whatever `work` is, so that the next stage's
            permutations do not depend on it.
        smallest: a last batch with fewer examples is left out.
        work: take only the first ⌈work · steps⌉ steps of the stage; in (0, 1].
        accumulate: mini-batches of a step.
    """
    rest = n % batch_size
    used = n if rest == 0 or rest >= smallest else n - rest
    per_step = batch_size * accumulate
    per_epoch = -(-used // per_step)
    if not per_epoch:
        return
    planned = stage.batches(per_epoch)
    trained = math.ceil(work * planned)
    for first in range(0, planned, per_epoch):
        order = torch.randperm(n, generator=generator)
        if first < trained:
            yield order[: min(used, (trained - first) * per_step)]


def train(
    module: ClientModule,
    examples: Examples,
    generator: torch.Generator,
    work: float = 1.0,
    train_stage: Callable[..., Iterator[list[Terms]]] | None = None,
) -> tuple[int, dict[str, float]]:
    """Train a module for one round on a client's training examples.

    Args:
        module: holds the initial state; changed in place.
        examples: on the module's device.
        generator: draws the order of the examples.
        work: take only this share of each stage's steps, in (0, 1].
        train_stage: takes the steps of a stage, see `lightning_modules.private_steps`; None: those of its mini-batches.

    Returns:
        The number of steps, and the mean over them of each named loss term.
    """
    module.train()
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    trained = 0
    for stage in module.stages():
        for steps in (train_stage or _train_stage)(module, stage, examples, generator, work):
            for name, value in (item for terms in steps for item in terms.items()):
                sums[name] = sums[name] + value if name in sums else value.clone()
                counts[name] = counts.get(name, 0) + 1
            trained += 1
    module.zero_grad(set_to_none=True)
    return trained, {name: float(total) / counts[name] for name, total in sums.items()}


def train_phase(module: ClientModule, phase: Phase, examples: Examples) -> None:
    """Train one phase outside the schedule, for a method's `before_training` or `before_evaluation`.

    The order of the examples is drawn from torch's global generator, which is seeded for client and round. The module's
    mode is kept afterwards.

    Args:
        module: changed in place.
        phase: what is trained; its length is the run's unless it has its own.
        examples: on the module's device.
    """
    mode = module.training
    module.train()
    for stage in stages((phase,), module.training_settings):
        for _ in _train_stage(module, stage, examples, torch.default_generator, keep=False):
            pass
    module.zero_grad(set_to_none=True)
    module.train(mode)


def _train_stage(
    module: ClientModule,
    stage: Stage,
    examples: Examples,
    generator: torch.Generator,
    work: float = 1.0,
    keep: bool = True,
) -> Iterator[list[Terms]]:
    """Train a stage; yield each step's loss terms of all phases."""
    settings, steps = module.training_settings, list[Step]()
    size, several = settings.batch_size, settings.accumulate_grad_batches
    orders = epoch_orders(len(examples), stage, size, generator, module.smallest_batch, work, several)
    for index in (index for order in orders for index in examples.vary(order).split(size * several)):
        batch = examples.batch(index)
        steps = steps or [module.make_step(phase) for phase in stage.phases]
        yield [module.optimise(batch, step) for step in steps]
    if keep:
        for step in steps:
            module.store_optimizer(step)
