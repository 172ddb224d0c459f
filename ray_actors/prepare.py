"""From settings to everything a run needs, with every check that can be made before an actor starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.components import bind, bind_method, bind_variants
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset, Loader, check_dataset
from pflsim.data.federate import PartitionRule, SplitRule, federate
from pflsim.data.federated import Partition
from pflsim.errors import SettingsError
from pflsim.memory import check_room
from pflsim.on_error import OnError
from pflsim.sampling import befallen, cohort
from pflsim.servers.base import Federation, ServerRule
from pflsim.settings import Settings
from pflsim.simulation import Plan
from pflsim.summary import RunMeta
from pflsim.threads import torch_threads
from pflsim.types import ClientInfo, Split, Tensors
from ray_actors.recipe import Recipe
from ray_actors.stacks import stacks


class MakesClient(Protocol):
    """What a method's `client` is, its settings filled in."""

    def __call__(self, net: Net, training: Training, /) -> ClientModule:
        """A client's module."""
        ...


class MakesRule(Protocol):
    """What a method's `server` is, its settings filled in."""

    def __call__(self) -> ServerRule:
        """The server rule."""
        ...


class MakesNet(Protocol):
    """What a model is, its settings filled in."""

    def __call__(self, input_shape: tuple[int, ...], num_classes: int, /) -> Net:
        """A network."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A run, ready to start.

    Args:
        settings: as given.
        dataset, partition: the data and who holds what.
        recipe: for the client hosts.
        rule, federation: for the server.
        plan: for the round loop.
        meta: for whatever is written down.
        work: mini-batches a round of every client, for the placement.
        initial: a client's private state at the beginning, for its size.
    """

    settings: Settings
    dataset: Dataset
    partition: Partition
    recipe: Recipe
    rule: ServerRule[Any]
    federation: Federation
    plan: Plan
    meta: RunMeta
    work: tuple[int, ...]
    initial: Tensors

    @property
    def on_error(self) -> OnError:
        """What becomes of clients that fail."""
        return OnError.of(self.settings.on_client_error)


def prepare(settings: Settings) -> Job:
    """Load and divide the data, build one module and the server rule, draw the cohorts.

    Raises:
        SettingsError: something in the settings cannot be run; nothing has been started or written.
    """
    make_client, make_rule = bind_method(settings.method, client_kind=MakesClient, server_kind=MakesRule)
    models = bind_variants(settings.model, kind=MakesNet)
    load = bind(settings.data, field="data", kind=Loader)
    rules = (
        bind(settings.partition, field="partition", kind=PartitionRule),
        bind(settings.split, field="split", kind=SplitRule),
    )
    dataset: Dataset = load()
    check_dataset(dataset, f"data={part_name(settings, 'data')}")
    partition = federate(dataset, *rules, settings.clients, settings.seed)
    training = _training(settings)
    recipe = Recipe(
        client=make_client,
        models=models,
        training=training,
        input_shape=dataset.input_shape,
        num_classes=dataset.num_classes,
        seed=settings.seed,
        init=cast(Any, settings.init),
        device=_device(settings),
        gpu_share=1 / settings.placement.actors_per_gpu,
        threads=settings.placement.threads,
        eval_batch_size=settings.eval.batch_size,
        on_nonfinite=cast(Any, settings.on_nonfinite),
    )
    if len(recipe.models) > settings.clients:
        raise SettingsError(
            f"model.variants has {len(recipe.models)} models for clients={settings.clients}: some would not be used"
        )
    check_sizes(recipe, settings)
    with torch_threads(recipe.threads):
        variants = [recipe.build(v) for v in range(len(recipe.models))]
    module = variants[0]
    check_variants(part_name(settings, "method"), variants)
    check_phases(part_name(settings, "method"), variants)
    check_batches(module, partition, settings.batch_size)
    check_validation(part_name(settings, "method"), module, partition)
    rule: ServerRule[Any] = make_rule()
    federation = _federation(settings, partition, module, _trained(settings))
    rule.init(federation)
    if 0 in settings.trace.rounds and not rule.opening:
        raise SettingsError("trace.rounds: round 0 is the opening, which this method has not; rounds count from 1")
    meta = _meta(settings, dataset, partition, module)
    sizes = [len(rows) for rows in partition.train]
    trained = sizes[: _trained(settings)]
    recipe = replace(recipe, stacks=stacks(settings, meta.method, module, recipe.device, trained))
    work = tuple(training.local_steps or training.local_epochs * -(-n // training.batch_size) for n in sizes)
    return Job(
        settings,
        dataset,
        partition,
        recipe,
        rule,
        federation,
        _plan(settings, partition, module, meta, rule),
        meta,
        work,
        module.state_dict(),
    )


def _training(settings: Settings) -> Training:
    return Training(
        lr=settings.lr,
        lr_decay=settings.lr_decay,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        local_epochs=settings.local_epochs or 1,
        local_steps=settings.local_steps,
        batch_size=settings.batch_size,
        buffers=cast(Any, settings.buffers),
        seed=settings.seed,
        last_round=settings.rounds + (settings.eval.holdout_clients > 0),  # newcomers train in one more
    )


def _device(settings: Settings) -> str:
    """The device of a host: of the GPUs that Ray shows it, the first."""
    choice = settings.placement.device
    if choice == "auto":
        choice = "cuda" if settings.placement.gpus else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            f"placement.gpus={settings.placement.gpus}, but torch sees no GPU on this machine: set placement.gpus=0 to "
            "train on the CPU"
        )
    return "cuda:0" if choice == "cuda" else "cpu"


def _trained(settings: Settings) -> int:
    """How many clients train: all but the last ones, which are held out."""
    return settings.clients - settings.eval.holdout_clients


def _federation(settings: Settings, partition: Partition, module: ClientModule, clients: int) -> Federation:
    return Federation(
        clients=tuple(ClientInfo(i, len(rows)) for i, rows in enumerate(partition.train[:clients])),
        initial=module.shared_tensors(),
        layouts={by: module.layout(by) for by in ("module", "tensor", "model")},
        seed=settings.seed,
        rounds=settings.rounds,
        num_classes=module.net.num_classes,
        feature_width=module.net.feature_width,
        head=deepcopy(module.net.head),
    )


def _meta(settings: Settings, dataset: Dataset, partition: Partition, module: ClientModule) -> RunMeta:
    return RunMeta(
        method=part_name(settings, "method"),
        data=part_name(settings, "data"),
        partition=describe(settings, "partition"),
        partition_hash=partition_hash(dataset, partition),
        model=part_name(settings, "model"),
        clients=settings.clients,
        rounds=settings.rounds,
        seed=settings.seed,
        judged_by=module.judged_by,
        judged_phase=module.judged_phase,
        evaluated_on=cast(Any, settings.eval.on),
        newcomers=settings.eval.holdout_clients,
        finetune_epochs=settings.eval.finetune_epochs,
    )


def _plan(settings: Settings, partition: Partition, module: ClientModule, meta: RunMeta, rule: ServerRule[Any]) -> Plan:
    splits: tuple[Split, ...] = ("test", "val") if any(len(rows) for rows in partition.val) else ("test",)
    cohorts = tuple(_cohort(settings, t, rule) for t in range(1, settings.rounds + 1))
    return Plan(
        method=meta.method,
        cohorts=cohorts,
        clients=_trained(settings),
        splits=splits,
        judged_phase=module.judged_phase,
        received=settings.eval.received,
        eval_every=settings.eval.every,
        eval_all=settings.eval.on == "all",
        trace_rounds=tuple(settings.trace.rounds),
        checkpoint_every=settings.checkpoint.every,
        checkpoint_seconds=60 * settings.checkpoint.minutes,
        checkpoint_keep=settings.checkpoint.keep,
        header={"data": meta.data, "model": meta.model, "partition_hash": meta.partition_hash, "seed": meta.seed},
        opening=rule.opening,
        units=tuple(u.name for u in module.layout(rule.unit)),
        newcomers=tuple(range(_trained(settings), settings.clients)),
        finetune_epochs=settings.eval.finetune_epochs,
        judged_by=module.judged_by,
        absentees=_befallen(settings, "dropout", settings.faults.dropout, cohorts),
        stragglers=_befallen(settings, "straggler", settings.faults.straggler, cohorts),
        straggler_work=settings.faults.straggler_work,
    )


def _befallen(
    settings: Settings, what: str, p: float, cohorts: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Whom something befalls in every round; nothing at all where it cannot."""
    rounds = enumerate(cohorts, start=1)
    return tuple(befallen(settings.seed, what, t, clients, p) for t, clients in rounds) if p > 0 else ()


def _cohort(settings: Settings, round_number: int, rule: ServerRule[Any]) -> tuple[int, ...]:
    if rule.everyone(round_number, settings.rounds):
        return tuple(range(_trained(settings)))
    return cohort(settings.seed, round_number, _trained(settings), settings.fraction)


def check_sizes(recipe: Recipe, settings: Settings) -> None:
    """Hold the models to the memory of this machine, before any of them is built.

    Raises:
        SettingsError: a client's module alone would take more than is free; inline, the states of all clients.
    """
    total = 0
    for variant in range(len(recipe.models)):
        try:
            with torch.device("meta"):
                module = recipe.build(variant)
        except SettingsError:
            raise
        except (
            Exception
        ):  # a user's own model or method that looks at its values: it is built with them, and judged then
            continue
        size = sum(t.numel() * t.element_size() for t in module.state_dict().values())
        name = f"{part_name(settings, 'method')} with model={part_name(settings, 'model')}: a client's state"
        check_room(name, 2 * size, "take a smaller model, or smaller widths in the method's settings")
        total += size * (settings.clients // len(recipe.models))
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


def part_name(settings: Settings, group: str) -> str:
    """What a part is called: its option on the command line, or else the name in its target.

    Raises:
        SettingsError: the part is missing.
    """
    if group in settings.names:
        return settings.names[group]
    node: Mapping[str, Any] = getattr(settings, group)
    target = (node.get("client") or {}).get("_target_") if group == "method" else node.get("_target_")
    if not target:
        raise SettingsError(f"{group} is not set: choose one")
    module, _, last = str(target).rpartition(".")
    return module.rpartition(".")[2] if group in ("method", "model") or last == "load" else last


def describe(settings: Settings, group: str) -> str:
    """A part with its settings, for the record: `dirichlet(alpha=0.1)`."""
    node: Mapping[str, Any] = getattr(settings, group)
    chosen = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
    return f"{part_name(settings, group)}({chosen})" if chosen else part_name(settings, group)
