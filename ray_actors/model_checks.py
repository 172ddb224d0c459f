"""Models held to what a method needs of them, to the data, and to the memory there is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_modules.base import ClientModule
from pflsim.config.settings import Settings
from pflsim.data.federated import Partition
from pflsim.errors import SettingsError
from pflsim.memory import check_room
from ray_actors.components import part_name
from ray_actors.hosts.client_factory import ClientFactory


def check_sizes(factory: ClientFactory, settings: Settings) -> None:
    """Hold the models to the memory of this machine, before any of them is built.

    Raises:
        SettingsError: a client's module alone would take more than is free; inline, the states of all clients.
    """
    total = 0
    for variant in range(len(factory.models)):
        try:
            with torch.device("meta"):
                module = factory.build(variant)
        except SettingsError:
            raise
        except (
            Exception
        ):  # a user's own model or method that looks at its values: it is built with them, and judged then
            continue
        size = sum(t.numel() * t.element_size() for t in module.state_dict().values())
        name = f"{part_name(settings, 'method')} with model={part_name(settings, 'model')}: a client's state"
        check_room(name, 2 * size, "take a smaller model, or smaller widths in the method's settings")
        total += size * (settings.clients // len(factory.models))
    if settings.executor == "inline":
        check_room(f"clients={settings.clients}: the states of all", total, "use fewer clients or a smaller model")


def check_variants(method: str, variants: Sequence[ClientModule]) -> None:
    """Hold models of several kinds to what the method needs of them; client i < len(variants) has variant i.

    Raises:
        SettingsError: what is averaged, or compared, has not the same shape everywhere; names the client.
    """
    first = variants[0]
    shapes, parts = _shared_shapes(first), _shared_parts(first)
    for client, module in enumerate(variants):
        if module.compares_features and module.net.feature_shape != first.net.feature_shape:
            raise SettingsError(
                f"{method} compares features, so all clients need the same feature shape: client 0 has "
                f"{first.net.feature_shape}, client {client} has {module.net.feature_shape}; change model.variants"
            )
        other = _shared_shapes(module)
        for key in {**shapes, **other}:
            here, there = shapes.get(key, "none"), other.get(key, "none")
            if here != there:
                raise SettingsError(_differs(method, first, f"{key} has shape {here}", f"{there} at client {client}"))
        for here, there in zip(parts, _shared_parts(module), strict=True):
            if here != there:  # equal shapes are not enough: strides, for example, have none
                raise SettingsError(_differs(method, first, here, f"{there} at client {client}"))


def _shared_shapes(module: ClientModule) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.shared_tensors().items()}


def _shared_parts(module: ClientModule) -> list[str]:
    """What the shared submodules are made of, a line for each part."""
    made = dict(module.named_modules())
    return [line.strip() for name in module.shared.under if name in made for line in repr(made[name]).splitlines()]


def _differs(method: str, module: ClientModule, here: str, there: str) -> str:
    whole = "net" in module.shared.under or "" in module.shared.under
    what = "weights, so all clients need one architecture" if whole else (
        f"{', '.join(module.shared.under)} of all clients, so this part must be the same everywhere"
    )  # fmt: skip
    instead = "leave model.variants empty, or choose a method that exchanges prototypes" if whole else (
        "change model.variants"
    )  # fmt: skip
    return f"{method} fuses {what}: {here} at client 0, but {there}; {instead}"


def check_phases(method: str, variants: Sequence[ClientModule]) -> None:
    """Hold the models to what the method trains apart.

    Raises:
        SettingsError: a phase would train nothing, as that of the body where there is only a head.
    """
    for client, module in enumerate(variants):
        for phase in {phase.name: phase for stage in module.stages() for phase in stage.phases}.values():
            if not phase.trainable.parameters(module):
                raise SettingsError(
                    f"{method} trains {', '.join(phase.trainable.under)} apart (phase {phase.name}), where the model "
                    f"of client {client} has no parameters: take another model, for example with more in model.hidden"
                )


def check_batches(module: ClientModule, partition: Partition, batch_size: int) -> None:
    """Hold the shards and the batch size to the smallest batch that the model can be trained on.

    Raises:
        SettingsError: batches, or a client's whole shard, are too small; names the client.
    """
    least = module.smallest_batch
    if batch_size < least:
        raise SettingsError(f"batch_size={batch_size}: a model with batch normalisation needs at least {least}")
    short = [client for client, rows in enumerate(partition.train) if len(rows) < least]
    if short:
        raise SettingsError(
            f"client {short[0]} has {len(partition.train[short[0]])} training examples, and a model with batch "
            f"normalisation needs at least {least}: use fewer clients, split.validation=0, or a model without it"
        )


def check_validation(method: str, module: ClientModule, partition: Partition) -> None:
    """Hold the split to a method that uses validation examples.

    Raises:
        SettingsError: a client has none; names the client.
    """
    without = [client for client, rows in enumerate(partition.val) if not len(rows)]
    if module.needs_validation and without:
        raise SettingsError(
            f"{method} needs validation examples at every client, but client {without[0]} has none (so do "
            f"{len(without)} of {partition.clients}): set split.validation above 0, and give each client at least two "
            "training examples"
        )
