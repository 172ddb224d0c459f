"""From settings to everything a run needs, with every check that can be made before an actor starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.components import bind, bind_method, bind_variants
from pflsim.config.on_client_error import OnError
from pflsim.config.settings import Settings
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset, Loader, check_dataset
from pflsim.data.federate import PartitionRule, SplitRule, federate
from pflsim.data.federated import Partition
from pflsim.engine.plan import RunPlan
from pflsim.errors import SettingsError
from pflsim.run_folder.resume import fixed_settings
from pflsim.run_folder.summary import RunMeta
from pflsim.seeding import cohort, sample_faults
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import ClientInfo, Split, Tensors
from ray_actors.components import MakesClient, MakesNet, MakesRule, describe, part_name
from ray_actors.hosts.client_factory import ClientFactory
from ray_actors.hosts.threads import torch_threads
from ray_actors.model_checks import check_batches, check_phases, check_sizes, check_validation, check_variants
from ray_actors.placement.cpu_fallback import gpus_here, on_gpus
from ray_actors.placement.stacks import stacks


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run, ready to start.

    Args:
        settings: as given.
        dataset, partition: the data and who holds what.
        factory: for the client hosts.
        rule, federation: for the server.
        plan: for the round loop.
        meta: for whatever is written down.
        work: mini-batches a round of every client, for the placement.
        initial: a client's private state at the beginning, for its size.
    """

    settings: Settings
    dataset: Dataset
    partition: Partition
    factory: ClientFactory
    rule: ServerRule[Any]
    federation: Federation
    plan: RunPlan
    meta: RunMeta
    work: tuple[int, ...]
    initial: Tensors

    @property
    def on_error(self) -> OnError:
        """What becomes of clients that fail."""
        return OnError.of(self.settings.on_client_error)


def prepare(settings: Settings) -> PreparedRun:
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
    factory = _recipe(settings, make_client, models, dataset)
    if len(factory.models) > settings.clients:
        raise SettingsError(
            f"model.variants has {len(factory.models)} models for clients={settings.clients}: some would not be used"
        )
    check_sizes(factory, settings)
    with torch_threads(factory.threads):
        variants = [factory.build(v) for v in range(len(factory.models))]
    module = variants[0]
    check_variants(part_name(settings, "method"), variants)
    check_phases(part_name(settings, "method"), variants)
    check_batches(module, partition, settings.batch_size)
    check_validation(part_name(settings, "method"), module, partition)
    rule: ServerRule[Any] = make_rule()
    federation = _federation(settings, partition, module, _trained(settings))
    rule.init(federation)
    if 0 in settings.trace.rounds and not rule.initial_round:
        raise SettingsError("trace.rounds: round 0 is the opening, which this method has not; rounds count from 1")
    meta = _meta(settings, dataset, partition, module)
    sizes = [len(rows) for rows in partition.train]
    trained = sizes[: _trained(settings)]
    factory = replace(factory, stacks=stacks(settings, meta.method, module, factory.device, trained))
    training = factory.training
    work = tuple(training.local_steps or training.local_epochs * -(-n // training.batch_size) for n in sizes)
    return PreparedRun(
        settings,
        dataset,
        partition,
        factory,
        rule,
        federation,
        _plan(settings, partition, module, meta, rule),
        meta,
        work,
        max((v.state_dict() for v in variants), key=lambda s: sum(t.numel() for t in s.values())),
    )


def _recipe(
    settings: Settings,
    client: Callable[..., ClientModule],
    models: tuple[Callable[..., Net], ...],
    dataset: Dataset,
) -> ClientFactory:
    """How to build a client; its stacks are not known yet."""
    return ClientFactory(
        client=client,
        models=models,
        training=_training(settings),
        input_shape=dataset.input_shape,
        num_classes=dataset.num_classes,
        seed=settings.seed,
        init=cast(Any, settings.init),
        device=_device(settings),
        threads=settings.placement.threads,
        eval_batch_size=settings.eval.batch_size,
        on_nonfinite=cast(Any, settings.on_nonfinite),
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
    """The device of hosts that have a GPU: of those that Ray shows one, the first."""
    if not on_gpus(settings.placement):
        return "cpu"
    asked, seen = settings.placement.gpus if settings.executor == "ray" else 1, gpus_here()
    elsewhere = settings.ray_address is not None and settings.executor == "ray"  # each actor looks for itself there
    if asked > seen and not elsewhere:
        there = f"only {seen}" if seen else "no GPU"
        instead = "use no more" if seen else "train on the CPU"
        raise SettingsError(
            f"placement.gpus={settings.placement.gpus}, but torch sees {there} on this machine: set "
            f"placement.gpus={seen} to {instead}"
        )
    return "cuda:0"


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
        reported_model=module.reported_model,
        reported_phase=module.reported_phase,
        evaluated_on=cast(Any, settings.eval.on),
        newcomers=settings.eval.holdout_clients,
        finetune_epochs=settings.eval.finetune_epochs,
    )


def _plan(
    settings: Settings, partition: Partition, module: ClientModule, meta: RunMeta, rule: ServerRule[Any]
) -> RunPlan:
    splits: tuple[Split, ...] = ("test", "val") if any(len(rows) for rows in partition.val) else ("test",)
    cohorts = tuple(_cohort(settings, t, rule) for t in range(1, settings.rounds + 1))
    return RunPlan(
        method=meta.method,
        cohorts=cohorts,
        clients=_trained(settings),
        splits=splits,
        reported_phase=module.reported_phase,
        received=settings.eval.received,
        eval_every=settings.eval.every,
        eval_all=settings.eval.on == "all",
        trace_rounds=tuple(settings.trace.rounds),
        checkpoint_every=settings.checkpoint.every,
        checkpoint_seconds=60 * settings.checkpoint.minutes,
        checkpoint_keep=settings.checkpoint.keep,
        header={
            "data": meta.data,
            "model": meta.model,
            "partition_hash": meta.partition_hash,
            "seed": meta.seed,
            "settings": fixed_settings(settings),
        },
        initial_round=rule.initial_round,
        units=tuple(u.name for u in module.layout(rule.unit)),
        newcomers=tuple(range(_trained(settings), settings.clients)),
        finetune_epochs=settings.eval.finetune_epochs,
        reported_model=module.reported_model,
        absentees=_sample_faults(settings, "dropout", settings.faults.dropout, cohorts),
        stragglers=_sample_faults(settings, "straggler", settings.faults.straggler, cohorts),
        straggler_work=settings.faults.straggler_work,
        diagnostics_every=settings.tracking.diagnostics_every,
        classes=module.net.num_classes,
    )


def _sample_faults(
    settings: Settings, what: str, p: float, cohorts: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Whom something befalls in every round; nothing at all where it cannot."""
    rounds = enumerate(cohorts, start=1)
    return tuple(sample_faults(settings.seed, what, t, clients, p) for t, clients in rounds) if p > 0 else ()


def _cohort(settings: Settings, round_number: int, rule: ServerRule[Any]) -> tuple[int, ...]:
    if rule.full_participation(round_number, settings.rounds):
        return tuple(range(_trained(settings)))
    return cohort(settings.seed, round_number, _trained(settings), settings.fraction)
