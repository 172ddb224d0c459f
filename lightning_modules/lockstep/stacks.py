"""Chooses the clients that train in lockstep. This depends on the settings of a run, not on its placement."""

import math
from collections.abc import Sequence

from torch import nn

from lightning_modules.base import ClientModule
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError

CLIENTS_PER_STACK = {"cpu": 5, "cuda": 64}
"""Clients of a stack that take part in a round, by device: few fit into a CPU's cache, and a GPU is fast with many. On
a CPU, a client with convolutions is a stack of its own: more are not faster, and a single one can use channels_last."""
MAX_STACK, MIN_STACKS, SMALL_BYTES = 64, 16, 2**18
"""On a CPU, stacks of models with fewer bytes of weights have up to `MAX_STACK` clients that take part in a round, if
there are so many that these are at least `MIN_STACKS` stacks."""
STACK_SCORES = 2**26
"""Scores of next tokens of the batches of a stack at most, if those of one client are not more."""
MAX_GROUP, MIN_GROUPS, MIN_CLIENTS = 32, 64, 512
"""Most clients of a group for evaluation, and fewest groups, where clients do not train in stacks. With fewer clients
there are no such groups, since a group cannot be divided among actors."""


def stacks(
    settings: Settings, method: str, module: ClientModule, device: str, sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Divide the clients that train into stacks of clients with similar shard sizes.

    Args:
        settings: `lockstep`, `lockstep_clients`, `fraction` and `model.variants` matter.
        method: the name of the method, for errors.
        module: a client's module.
        device: the torch device of the clients.
        sizes: the number of training examples of each client that trains.

    Returns:
        The stacks, each with the largest shard first; empty if clients train one by one.

    Raises:
        SettingsError: lockstep=true, but the method or the optimiser does not support it.
    """
    lockstep = str(settings.lockstep).lower()
    if lockstep == "true" and not _stackable(module):
        raise SettingsError(
            f"lockstep=true: {method} with optimizer={settings.optimizer.name} does not support it: expected a method "
            "and a model that do, and sgd, or adam or adamw with betas and eps, without optimizer.keep; leave it out"
        )
    if lockstep == "false" or not _stackable(module):
        return ()
    found: list[tuple[int, ...]] = []
    variants = len(settings.model.get("variants") or [None])
    for variant in range(variants):
        clients = sorted(range(variant, len(sizes), variants), key=lambda c: (-sizes[c], c))
        found += _divide(clients, settings.lockstep_clients or _stack_size(settings, module, device))
    return tuple(found)


def new_stack_size(settings: Settings, variants: Sequence[ClientModule], device: str) -> int | None:
    """Return `lockstep_clients` of a run that begins with null; null stays where stacks have the size of older runs."""
    size = int(settings.trained * settings.fraction) // (MIN_STACKS * len(variants))
    small = all(sum(p.nbytes for p in module.net.parameters()) < SMALL_BYTES for module in variants)
    stackable = settings.lockstep is not False and all(_stackable(module) for module in variants)
    large = device != "cpu" or not small or any(_convolves(module) for module in variants)
    if settings.lockstep_clients or size <= CLIENTS_PER_STACK["cpu"] or large or not stackable:
        return settings.lockstep_clients
    return math.ceil(min(size, MAX_STACK, *(_most(settings, module) for module in variants)) / settings.fraction)


def _stackable(module: ClientModule) -> bool:
    settings = module.training_settings
    able = module.lockstep and module.net.stackable
    return able and settings.optimizer.stackable and settings.accumulate_grad_batches == 1


def _convolves(module: nn.Module) -> bool:
    """Return whether a module has convolutions that are not frozen."""
    convolutions = (layer for layer in module.modules() if isinstance(layer, nn.modules.conv._ConvNd))
    return any([*layer.parameters()] for layer in convolutions)


def _stack_size(settings: Settings, module: ClientModule, device: str) -> int:
    if device == "cpu" and _convolves(module):
        return 1
    return math.ceil(min(CLIENTS_PER_STACK[device.partition(":")[0]], _most(settings, module)) / settings.fraction)


def _most(settings: Settings, module: ClientModule) -> int:
    """Return how many clients' scores of next tokens are in memory at a time; of other tasks any number."""
    if module.criterion.task.name != "language_model":
        return MAX_STACK
    return max(1, STACK_SCORES // (settings.batch_size * module.net.feature_shape[0] * module.net.num_classes))


def _divide(clients: Sequence[int], max_size: int) -> list[tuple[int, ...]]:
    """Divide a sequence into as few pieces as possible, whose sizes differ by at most one."""
    count = -(-len(clients) // max_size)
    ends = [len(clients) * k // count for k in range(count + 1)] if count else [0]
    return [tuple(clients[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def groups(settings: Settings, stacks: Sequence[tuple[int, ...]], variants: int) -> tuple[tuple[int, ...], ...]:
    """Return which clients are evaluated together.

    Args:
        settings: `clients`, `lockstep` and `lockstep_clients` matter.
        stacks: clients that train in lockstep; those of more than one client are groups.
        variants: the number of architectures; client i has number i mod `variants`.

    Returns:
        Groups of one architecture, so many that their work can be divided among actors; none with lockstep=false.
    """
    found = [stack for stack in stacks if len(stack) > 1]
    left = sorted({*range(settings.clients)}.difference(*found)) if settings.lockstep is not False else []
    few = settings.clients < MIN_CLIENTS
    size = min(MAX_GROUP, settings.lockstep_clients or (1 if few else settings.clients // MIN_GROUPS))
    for variant in range(variants):
        found += _divide([client for client in left if client % variants == variant], size)
    return tuple(found)
