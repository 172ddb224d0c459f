"""Builds everything that a run needs from its settings, and checks the settings before any actor starts."""

from dataclasses import replace
from typing import Any

import torch

from lightning_modules import model_checks
from lightning_modules.base import ClientModule
from lightning_modules.hosts.base_executor import PreparedRun
from lightning_modules.hosts.client_factory import ClientFactory, MakesClient, MakesNet, MakesRule
from lightning_modules.hosts.devices import client_device, precision_warnings, torch_threads
from lightning_modules.lockstep.stacks import groups, new_stack_size, stacks
from lightning_modules.message_parts import MessageParts
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.own import bind_common, bind_models
from lightning_modules.optimizers import optimizer_class
from lightning_modules.private_steps import private_steps
from lightning_modules.training import Training
from lightning_modules.trial import try_clients
from pflsim.attacks import Attackers
from pflsim.config.components import TARGET, bind_method, component_name
from pflsim.config.settings import Settings
from pflsim.data.content import hashes
from pflsim.data.dataset import Dataset, dataset_warnings
from pflsim.data.federate import load_federation
from pflsim.data.federated import FORWARD_BATCH, Partition, domains_of, shard
from pflsim.data.record import record_names, recorded_rows
from pflsim.data.sets import drawn
from pflsim.engine.clock import VirtualClock
from pflsim.engine.plan import RunPlan
from pflsim.errors import SettingsError, own_errors
from pflsim.records.evaluation import Measures
from pflsim.records.saved_settings import fixed_settings
from pflsim.records.summary import RunMeta
from pflsim.seeding import cohort, sampled
from pflsim.servers.base import MeanRule, ServerRule
from pflsim.tasks.metrics import check_primary, measures_of, metrics_of
from pflsim.tasks.task import LOSSES, task_of
from pflsim.types import Split

SCORES = 2**24
"""Scores of next tokens that are in memory at a time in evaluation, if those of one row are not more."""
MOST_SAVED = 200
"""Clients of a run that saves its best round by default: a checkpoint of many takes longer than a round."""


def prepare(
    settings: Settings, trial: bool = True, kept: dict[str, Dataset] | None = None, new: bool = False
) -> PreparedRun:
    """Load and partition the data, build the modules and the server rule, and draw the cohorts.

    Args:
        settings: of the run.
        trial: whether clients are tried first, see `lightning_modules.trial`.
        kept: see `load_federation`.
        new: whether the run begins here; `lockstep_clients` is then the size of its stacks.

    Raises:
        SettingsError: the settings cannot be run. Nothing was started or written.
    """
    make_client, make_rule = bind_method(settings.method, client_kind=MakesClient, server_kind=MakesRule)
    models = bind_models(settings, kind=MakesNet)
    parts = MessageParts.of(settings)
    optimizer_class(settings.optimizer.name)  # refuses it before the data are loaded
    dataset, partition = load_federation(settings, kept)
    partition = replace(partition, sets=drawn(settings, dataset, partition))
    models = model_checks.fitted(models, dataset, settings)
    task = task_of(settings, dataset, partition)
    metrics = metrics_of(settings.eval.metrics, task, settings.eval.primary)
    measures = replace(measures_of(task, metrics, settings.eval), domains=domains_of(dataset, partition))
    check_primary(measures, metrics, task, (shard(dataset, partition, c).test.y for c in range(settings.clients)))
    factory = ClientFactory(
        client=make_client,
        models=models,
        training=replace(Training.of(settings), task=task, method=component_name(settings, "method")),
        input_shape=dataset.input_shape,
        num_classes=task.outputs,
        seed=settings.seed,
        adjust=Adjustments.of(settings),
        init=settings.init,
        device=client_device(settings),
        threads=settings.placement.threads,
        eval_batch_size=settings.eval.batch_size,
        augment=settings.augment,
        metrics=metrics,
        on_nonfinite=settings.on_nonfinite,
        uplink=parts.uplink,
        attackers=parts.attackers(settings, dataset, partition),
        common=model_checks.fitted(bind_common(settings, make_client, MakesNet), dataset, settings),
    )
    with torch_threads(factory.threads):
        variants = model_checks.build_variants(factory, dataset, settings)
    module, method = variants[0], component_name(settings, "method")
    if dataset.language and not settings.eval.batch_size:
        scores = max(dataset.y.shape[1] * variant.net.num_classes for variant in variants)  # of a row
        factory = replace(factory, eval_batch_size=max(1, min(FORWARD_BATCH["cpu"], SCORES // scores)))
    given = settings.lockstep_clients
    if new:
        settings = replace(settings, lockstep_clients=new_stack_size(settings, variants, factory.device))
    model_checks.check_task(method, module, task)
    model_checks.check_variants(method, variants)
    model_checks.check_reported(method, module, settings.eval.models)
    model_checks.check_phases(method, variants)
    model_checks.check_batches(module, partition, settings.batch_size)
    model_checks.check_validation(method, module, partition)
    sizes = [len(rows) for rows in partition.train]
    with own_errors(f"the server rule of {method}"):
        rule: ServerRule[Any] = make_rule()
        _set_optimizer(rule, module, settings)
        settings = parts.give(rule, module, factory.attackers, settings)
        federation = module.federation(sizes[: settings.trained])
        rule.init(federation)
    cohorts = _cohorts(settings, rule)
    private, settings = private_steps(parts.privacy, variants, sizes[: settings.trained], cohorts, settings)
    factory = replace(factory, private_steps=private)
    constants = frozenset[str]()
    if trial and torch.get_default_dtype() == torch.float32:  # as in every run; the examples are float32
        constants = try_clients(factory, (dataset, partition), (rule, federation), settings)
    if constants.intersection(module.shared_buffers()):
        factory = replace(factory, constants=constants)
        for variant in variants:
            variant.constant_buffers = constants
        federation = module.federation(sizes[: settings.trained])
    attack = parts.attack if factory.attackers else None
    model_checks.check_messages(variants, rule, attack, parts.aggregator, parts.privacy, settings)
    if 0 in settings.trace.rounds and not rule.initial_round:
        raise SettingsError(f"trace.rounds contains 0, but method={method} has no initial round: rounds start at 1")
    digest, order = hashes(dataset, partition)
    meta = _meta(settings, dataset, partition, digest, module, measures, factory, rule)
    found = () if private else stacks(settings, method, module, factory.device, sizes[: len(federation.clients)])
    factory, warnings = model_checks.in_lockstep(replace(factory, stacks=found), variants, dataset, settings)
    if not factory.stacks:
        settings = replace(settings, lockstep_clients=given)
    local, plan = factory.training, _plan(settings, partition, module, meta, rule, cohorts, factory.attackers)
    factory = replace(factory, groups=groups(settings, factory.stacks, len(models)))
    recorded = recorded_rows(settings.tracking.predictions, dataset, partition)
    header, best = {**plan.header, "order_of_examples": order}, settings.checkpoint.best
    best = dataset.encoder is not None and settings.clients <= MOST_SAVED if best == "auto" else best
    plan = replace(plan, metrics=metrics, recorded_rows=recorded, header=header, save_best=best)
    batches = tuple(local.local_steps or local.local_epochs * -(-size // local.step_size) for size in sizes)
    doubts = *model_checks.sharing_warnings(method, variants), *model_checks.objective_warnings(method, module)
    if settings.model.get("common") and not factory.common:
        doubts = *doubts, f"model.common has no effect: {method} trains no common net"
    adapts = type(module).before_evaluation is not ClientModule.before_evaluation
    if private and adapts and getattr(module, "finetune_epochs", 1):
        what = f"privacy=example: method={method} trains without noise before an evaluation"
        doubts = *doubts, f"{what}, so ε does not cover the models that it reports"
    slow = precision_warnings(settings.precision, factory.device)
    warnings = (*dataset_warnings(dataset), *module.net.notes, *warnings, *doubts, *slow)
    return PreparedRun(settings, dataset, partition, factory, rule, federation, plan, meta, batches, warnings)


def _set_optimizer(rule: ServerRule[Any], module: ClientModule, settings: Settings) -> None:
    """Give a rule the server optimiser of the run, or refuse it."""
    if isinstance(rule, MeanRule):
        rule.optimizer = settings.server_optimizer
        rule.parameters = [name for name in module.shared_parameters() if module.get_parameter(name).requires_grad]
    elif (name := settings.server_optimizer.name) != "none":
        method = component_name(settings, "method").removesuffix(f"+{name}")
        raise SettingsError(f"server_optimizer={name}: the server of method={method} takes no optimiser; leave it out")


def _meta(
    settings: Settings, dataset: Dataset, partition: Partition, digest: str, module: ClientModule, measures: Measures,
    factory: ClientFactory, rule: ServerRule[Any],
) -> RunMeta:  # fmt: skip
    attackers, release = factory.attackers, rule.privacy if isinstance(rule, MeanRule) else None
    private = factory.private_steps or release
    names, data = record_names(settings), component_name(settings, "data")
    formats = "npz", "image_folder", "table", "text", "domains"  # which hold any data
    trained = settings.trained
    own = data in formats[:-1] or settings.data[TARGET].partition(".")[0] != "pflsim"
    standardised, clipped = bool(module.criterion.task.mean), bool(settings.clip_grad_norm)
    other = "task.standardize_target=true, " * (dataset.task == "regression" and not standardised)
    return RunMeta(
        method=component_name(settings, "method"),
        data=dataset.name if data in formats else data,
        partition=", ".join(filter(None, (names["partition"], names["shift"]))),
        partition_hash=digest,
        model=component_name(settings, "model"),
        clients=settings.clients,
        rounds=settings.rounds,
        seed=settings.seed,
        reported_model=module.reported_model,
        reported_phase=module.reported_phase,
        evaluated_on="all" if settings.eval.clients == trained else str(settings.eval.clients),
        measures=measures,
        client_names=partition.names,
        newcomers=settings.eval.newcomers,
        finetune_epochs=settings.eval.finetune_epochs,
        classes=dataset.num_classes,
        task=dataset.task,
        patience=settings.stop.patience,
        precision=module.training_settings.precision,
        loss=f"{settings.task.loss or LOSSES[dataset.task]}{' of standardised targets' * standardised}"
        if settings.task.name == "auto" and own
        else "",
        privacy=private.about if private else None,
        attack=attackers
        and {
            "name": component_name(settings, "attack"),
            "fraction": attackers.attack.fraction,
            "clients": sorted(attackers.clients),
        },
        remedy=f"{other}a smaller lr than {settings.lr:g}, or a {'smaller ' * clipped}clip_grad_norm",
        fraction=settings.fraction,
        participation=settings.participation,
    )


def _cohorts(settings: Settings, rule: ServerRule[Any]) -> tuple[tuple[int, ...], ...]:
    """Draw the clients of each round."""
    clients, rounds, how = settings.trained, settings.rounds, settings.participation
    return tuple(
        tuple(range(clients))
        if rule.full_participation(t, rounds) or (t == rounds and how.last == "all")
        else cohort(settings.seed, t, clients, settings.fraction, how)
        for t in range(1, rounds + 1)
    )


def _plan(
    settings: Settings,
    partition: Partition,
    module: ClientModule,
    meta: RunMeta,
    rule: ServerRule[Any],
    cohorts: tuple[tuple[int, ...], ...],
    attackers: Attackers | None,
) -> RunPlan:
    clients, rounds = settings.trained, settings.rounds
    splits: tuple[Split, ...] = ("test", "val") if any(map(len, partition.val)) else ("test",)
    patience, best, chosen = settings.stop.patience, settings.checkpoint.best, settings.eval.sensitivity
    needs = f"stop.patience={patience}" if patience else "checkpoint.best=true" if best is True else ""
    needs = f"eval.threshold={settings.eval.threshold}" if chosen else needs
    if needs and not any(map(len, partition.val[:clients])):
        raise SettingsError(f"{needs} needs validation examples, and no client has any: set split.validation above 0")

    def faults(kind: str, p: float) -> tuple[tuple[int, ...], ...]:  # of each round; empty if faults are off
        numbered = enumerate(cohorts, start=1)
        return tuple(sampled(settings.seed, kind, t, some, p) for t, some in numbered) if p > 0 else ()

    newcomers, rows = tuple(range(clients, settings.clients)), sorted(settings.eval.newcomer_rows)
    return RunPlan(
        meta=meta,
        cohorts=cohorts,
        clients=clients,
        settings=settings,
        splits=splits,
        sets=(*settings.eval.sets, *(attackers.attack.sets if attackers else ())),
        header={
            "data": component_name(settings, "data"),  # a moved file may have another name
            "model": meta.model,
            "partition_hash": meta.partition_hash,
            "seed": meta.seed,
            "settings": fixed_settings(settings),
        },
        initial_round=rule.initial_round,
        surveys=frozenset(t for t in range(1, rounds + 1) if rule.surveys(t, rounds)),
        units=tuple(u.name for u in module.layout(rule.unit)),
        newcomers=newcomers,
        few={n: tuple(client for client in newcomers if len(partition.train[client]) >= n) for n in rows},
        absentees=faults("dropout", settings.faults.dropout),
        stragglers=faults("straggler", settings.faults.straggler),
        adapts=module.adapts(module.reported_model),
        clock=VirtualClock.of(settings, clients),
        malicious=attackers.clients if attackers else frozenset(),
    )
