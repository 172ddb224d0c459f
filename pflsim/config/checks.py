"""Checks the settings of a run: each alone, then against each other, before data are loaded or actors started."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from importlib.util import find_spec
from typing import Any, get_type_hints

from pflsim.config.components import COMPONENTS, check_component, keys_of
from pflsim.config.names import nearest, program, shortened, unknown_key, written
from pflsim.config.settings import TEST_SETS, Eval, OnError, Settings, dotted
from pflsim.config.validate import check_no_password, checked
from pflsim.display.metrics import UNDIRECTED
from pflsim.errors import SettingsError
from pflsim.fusion import ServerOptimizer

UNUSED = {
    "none": ("lr", "beta1", "beta2", "tau", "v0", "bias_correction", "nesterov"),
    "fedavgm": ("beta2", "tau", "v0", "bias_correction"),
    "fedadagrad": ("beta2", "bias_correction", "nesterov"),
    **dict.fromkeys(("fedadam", "fedyogi"), ("nesterov",)),
}
"""Settings without effect, by server optimiser."""
WITHOUT_PARTS = ("explicit", "pfllib", "by_client")
"""Partitions of given rows or clients, which cannot be drawn apart for those that are held out."""


def settings_from(config: Mapping[str, Any], used: Sequence[str] = COMPONENTS) -> Settings:
    """Return the settings of a run, checked: names, types, bounds, choices, contradictions, and components.

    Args:
        config: values by key, nested as `Settings` is. A missing value has its default; a component is required.
        used: components that have to exist in this process.

    Raises:
        SettingsError: a setting is wrong.
    """
    settings = run_settings(config)
    for name in COMPONENTS:
        if not getattr(settings, name):
            raise SettingsError(f"{name} is not set; give {name}=NAME ({program()} --help lists the names)")
    if "partition" in used and (changed := settings.eval.holdout_partition):
        try:
            check_component({**settings.partition, **changed}, "partition")
        except SettingsError as error:
            raise SettingsError(f"eval.holdout_partition={written(changed)}: {error}") from error
    return replace(settings, **{name: check_component(getattr(settings, name), name) for name in used})


def run_settings(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a run, of which the components are not checked; nothing is imported for them.

    Raises:
        SettingsError: a setting is wrong.
    """
    settings = _section(Settings, config, "", config)
    check(settings)
    return settings


def _section(schema: Any, values: Mapping[str, Any], prefix: str, config: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass from a mapping."""
    hints, found = get_type_hints(schema, include_extras=True), dict[str, Any]()
    for name, value in values.items():
        key, kind = f"{prefix}{name}", hints.get(name)
        if kind is None:
            raise SettingsError(unknown_key(next(iter(dotted({key: value}))), _known_keys(config)))
        if is_dataclass(kind) and isinstance(value, Mapping):
            found[name] = _section(kind, value, f"{key}.", config)
        elif is_dataclass(kind):
            raise SettingsError(f"{key}={shortened(value)}: write {key}.KEY=VALUE")
        else:
            found[name] = checked(key, kind, value)
    return schema(**found)


def _known_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of groups, and the keys of all settings, those of the chosen components included."""
    yield from get_type_hints(Settings)
    yield from (key for key in dotted(asdict(Settings())) if key.partition(".")[0] not in (*COMPONENTS, "names"))
    for component in COMPONENTS:
        yield from keys_of(config.get(component), component)


def check(settings: Settings) -> None:
    """Check the settings of a run against each other.

    Raises:
        SettingsError: two settings contradict each other; the message is about the first contradiction.
    """
    for problem in _contradictions(settings):
        raise SettingsError(problem)


def varying_keys(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of the given settings that vary between the runs of a sweep."""
    return [key for key in jobs[0] if len({written(job[key]) for job in jobs}) > 1]


def check_sweep(runs: Sequence[Settings], jobs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a sweep in which two runs have the same run folder.

    Args:
        runs: the settings of the runs.
        jobs: those of them that are given.

    Raises:
        SettingsError: two runs have the same run_dir.
    """
    folders = [run.run_dir for run in runs if run.run_dir is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            given = jobs[0].get("run_dir", folder)
            pattern = "-".join(key for key in (f"${{{key}}}" for key in varying_keys(jobs)) if key not in given)
            raise SettingsError(
                f"run_dir={folder} is the folder of {folders.count(folder)} runs of this sweep; include what differs: "
                f"run_dir='{given}/{pattern}'"
            )


def _contradictions(settings: Settings) -> Iterator[str]:
    held, clients, placement = settings.eval.newcomers, settings.clients, settings.placement
    how = settings.participation
    named = settings.eval.holdout_clients
    if held >= clients:
        yield (
            f"eval.holdout_clients={written(named)} leaves no client to train; with clients={clients} use at most "
            f"{clients - 1}"
        )
    elif isinstance(named, list) and len({*map(str, named)}) < held:
        yield f"eval.holdout_clients={written(named)}: expected each client once"
    rule = settings.partition.get("_target_", "").rpartition(".")[2]
    if changed := settings.eval.holdout_partition:
        if not held or isinstance(named, list):
            yield f"eval.holdout_partition={written(changed)} needs a number of clients: set eval.holdout_clients=N"
        elif rule in WITHOUT_PARTS:
            yield f"eval.holdout_partition={written(changed)}: partition={rule} does not draw the clients' rows"
    if (few := settings.eval.newcomer_rows) and (not held or len({*few}) < len(few)):
        yield f"eval.newcomer_rows={few}: expected each number once, and new clients (eval.holdout_clients)"
    elif how.cycle > clients - held:
        yield f"participation.cycle={how.cycle} is more than the {clients - held} clients that train"
    elif settings.fraction < 1 and how.sampling == "fixed":
        from pflsim.seeding import cohort_size  # imports torch, which most runs do not need here

        cohort_size((clients - held) // how.cycle, settings.fraction)
    if settings.fraction == 1:
        for key, value in (("spread", 0), ("last", "sampled")):
            if (given := getattr(how, key)) != value:
                yield f"participation.{key}={given} has no effect with fraction=1; leave it out"
    clock = settings.clock
    if clock.spread and clock.step_s is None and clock.down_mbps is None and clock.up_mbps is None:
        yield f"clock.spread={clock.spread:g} needs clock.step_s, clock.down_mbps or clock.up_mbps"
    if how.cycle == 1 and how.cycle_rounds > 1:
        yield f"participation.cycle_rounds={how.cycle_rounds} needs participation.cycle above 1"
    if isinstance(few := settings.eval.clients, int) and few > clients - held > 0:
        yield f"eval.clients={few}: only {clients - held} clients train"
    models = settings.eval.models
    if not 0 < len({*models}) == len(models):
        yield f"eval.models={written(models)}: expected personal, global or both, each once"
    yield from _of_sets(settings)
    if settings.eval.primary in UNDIRECTED:
        yield f"eval.primary={settings.eval.primary}: neither higher nor lower is better; list it in eval.metrics"
    if settings.eval.sensitivity is not None and settings.split.get("validation") == 0:
        yield f"eval.threshold={settings.eval.threshold} is chosen on validation rows: set split.validation above 0"
    if settings.eval.received and "personal" not in models:
        yield f"eval.received=true has no effect with eval.models={written(models)}; leave one of them out"
    if settings.lockstep is False and settings.lockstep_clients is not None:
        yield f"lockstep_clients={settings.lockstep_clients} has no effect with lockstep=false; leave one of them out"
    optimizer, unused = settings.server_optimizer, UNUSED[settings.server_optimizer.name]
    for key in unused:
        if (value := getattr(optimizer, key)) != getattr(ServerOptimizer, key):
            yield f"server_optimizer.{key}={value} has no effect with server_optimizer={optimizer.name}; leave it out"
    if settings.optimizer.no_decay and not settings.weight_decay:
        yield "optimizer.no_decay=true has no effect with weight_decay=0; leave it out"
    for number in settings.trace.rounds:
        if number > settings.rounds:
            yield f"trace.rounds={settings.trace.rounds}: round {number} does not exist; the last is {settings.rounds}"
    if settings.local_epochs is not None and settings.local_steps is not None:
        yield f"local_epochs={settings.local_epochs} and local_steps={settings.local_steps}: leave one of them out"
    if placement.clients_per_actor != "auto" and placement.actors is not None:
        yield f"placement.actors and placement.clients_per_actor={placement.clients_per_actor}: leave one of them out"
    if placement.actors is not None and placement.actors > clients:
        yield f"placement.actors={placement.actors} is more than clients={clients}; use at most one actor per client"
    if settings.precision == "tf32" and placement.gpus == 0:
        yield "precision=tf32 is a mode of GPUs, and placement.gpus=0; use precision=ieee or bf16"
    if placement.device == "cuda" and placement.gpus == 0:
        yield "placement.device=cuda with placement.gpus=0: no actor would have a GPU; set placement.gpus"
    OnError.of(settings.on_client_error)
    if settings.executor == "ray" and (parallel := settings.sweep.parallel) not in ("auto", 1):
        yield f"sweep.parallel={parallel}: a run on Ray uses all CPUs; set executor=inline, or leave it out"
    check_no_password(settings.run_dir or "", "run_dir")
    for name in settings.tracking.loggers:
        found = find_spec(name)
        if name != "csv" and (found is None or found.origin is None):  # no origin: a folder of this name
            yield f"tracking.loggers: the package {name} is not installed: pip install 'pflsim[{name}]'"
    for package, needed in (("peft", settings.lora), ("transformers", settings.names.get("model") == "hf")):
        if needed and find_spec(package) is None:
            yield f"lora and model=hf need the package {package}: pip install 'pflsim[hf]'"
    names, test_by = settings.names, settings.split.get("test_by")
    mixed = names.get("partition") != "by_client" or (names.get("split") == "official" and test_by != "clients")
    if names.get("data") == "synthetic" and mixed:
        yield "data=synthetic has a model for each client: set partition=by_client split.test_by=clients"


def _of_sets(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with the test sets."""
    chosen, default = settings.eval, Eval()
    for name in chosen.sets:
        if name not in TEST_SETS:
            yield f"eval.sets: there is no test set {name}; {nearest(name, TEST_SETS)}"
        if chosen.sets.count(name) > 1:
            yield f"eval.sets={written(chosen.sets)}: expected each test set once"
        if name in ("others", "mixture") and settings.trained == 1:
            yield f"eval.sets={written(chosen.sets)}: {name} needs at least two clients that train"
    for key, needed in (("all_examples", ("all",)), ("severity", TEST_SETS[2:])):
        if (value := getattr(chosen, key)) != getattr(default, key) and not {*needed} & {*chosen.sets}:
            yield f"eval.{key}={value} has no effect with eval.sets={written(chosen.sets)}; leave it out"
