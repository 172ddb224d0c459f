"""From config files and overrides to the settings of a run, or of all runs of a sweep. Only this module uses Hydra."""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import Reader

from pflsim.config import checks
from pflsim.config.components import COMPONENTS, NOTEBOOK, TARGET, bind, check_component, short_name, with_defaults
from pflsim.config.help import groups_in
from pflsim.config.names import FOLDER, nearest, shortened, unknown_key, written
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError, reading
from pflsim.fusion import ServerOptimizer

CONFIGS = next(path for path in (FOLDER / "pflsim" / "configs", FOLDER / "configs") if path.is_dir())
"""The config folder of this project: inside pflsim in a wheel, beside it in a clone."""
OWN_DEFAULTS = ("pflsim.data.sources.table.load", "pflsim.data.sources.text.load")
"""Data sources that choose defaults of the run."""
LISTED = "pflsim.data.explicit.explicit"
"""The partition whose rows tell the number of clients, as objects of Python do."""
QUICK = "quick"
"""Asks for the quick form of an experiment, whose YAML file lists the overrides that make it small under this key."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The config of one run.

    Args:
        config: of the files and the command line, without defaults of Python; `${...}` is not resolved.
        search: the space that `pflsim tune` searches, by dotted key, of the files of method and server optimiser.
    """

    config: dict[str, Any]
    search: Mapping[str, Any] = field(default_factory=dict)


def _chosen_by_data(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices and settings that the data make unless they are given, by key: those of a table or texts."""
    if (target := content["data"].get(TARGET)) not in OWN_DEFAULTS:
        return {}
    with _omegaconf_errors():
        node = OmegaConf.to_container(OmegaConf.create(dict(content)).data, resolve=True)
    load = bind(check_component(typing.cast(dict[str, Any], node), "data"), "data")
    return import_module(target.rpartition(".")[0]).defaults(load)


def _choose_clients(content: dict[str, Any], choices: Mapping[str, str], chosen: Mapping[str, Any]) -> None:
    """Fill in the number of clients of the data, and that their test rows are their own, if each is a client."""
    if "clients" not in chosen or choices["partition"] != "by_client" or content["partition"].get("ids_per_client"):
        return
    if content.setdefault("clients", chosen["clients"]) != chosen["clients"]:
        raise SettingsError(
            f"clients={content['clients']}: data.client has {chosen['clients']} values; leave clients out, or set "
            "partition.ids_per_client=N for the first clients of N values each"
        )
    if "split.test_by" in chosen and choices["split"] == "official":
        content["split"].setdefault("test_by", chosen["split.test_by"])


def config_folders(config_dirs: Sequence[str]) -> list[Path]:
    """Return this project's config folder, and those of `--config-dir`."""
    return [CONFIGS, *(Path(folder).absolute() for folder in config_dirs)]


@contextmanager
def composing(folders: Sequence[Path]) -> Iterator[None]:
    """Initialize Hydra with the first folder, inside the block; `composed` adds the others.

    The calling program may use Hydra too: its state is put aside.
    """
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"--config-dir {folder}: there is no such folder")
    hydra, version = GlobalHydra.instance(), VersionBase.instance()
    GlobalHydra.set_instance(copy(hydra))
    GlobalHydra.instance().clear()
    VersionBase.set_instance(copy(version))
    try:
        with initialize_config_dir(str(folders[0]), job_name="launch", version_base="1.3"):
            yield
    finally:
        GlobalHydra.set_instance(hydra)
        VersionBase.set_instance(version)


def composed(overrides: Sequence[str], folders: Sequence[Path]) -> Composition:
    """Return the config of one run.

    Raises:
        SettingsError: an override or a file is wrong; the message names it and lists the choices.
    """
    asked, groups = parse(overrides), groups_in(folders)
    quick = [override for override in asked if override.key_or_group == QUICK]
    if not all(isinstance(override.value(), bool) for override in quick):
        raise SettingsError(f"{quick[0].input_line}: expected true or false, as in +experiment=NAME quick=true")
    asked = [override for override in asked if override not in quick]
    _check_groups(asked, groups)
    for line in (override.input_line for override in asked if override.is_sweep_override()):
        raise SettingsError(f"{line}: several values need --multirun; one with a comma: \"KEY='a,b'\"")
    if is_quick := bool(quick and quick[-1].value()):
        experiment = [override for override in asked if override.key_or_group == "experiment"]
        smaller = _compose(experiment, folders, groups)[0].get(QUICK)
        if not smaller:
            raise SettingsError("quick=true: only experiments have a quick form: +experiment=NAME quick=true")
        given = {override.key_or_group for override in asked}
        asked = [*parse([text for text in smaller if text.partition("=")[0] not in given]), *asked]
    content, choices = _compose(asked, folders, groups)
    if chosen := _chosen_by_data(content):
        standard, given = _compose([], folders, groups)[1], {override.key_or_group for override in asked}
        more = [f"{key}={value}" for key, value in chosen.items() if key in groups and choices[key] == standard[key]]
        asked = [*parse([text for text in more if text.partition("=")[0] not in given]), *asked]
        content, choices = _compose(asked, folders, groups)
        _choose_clients(content, choices, chosen)
    if "clients" not in content and str(content["partition"].get(TARGET)).startswith((LISTED, NOTEBOOK)):
        content |= import_module("pflsim.data.explicit").clients_of(content["partition"])
    content.pop(QUICK, None)
    search = dict[str, Any]()
    for group in ("method", "server_optimizer"):
        space = content[group].pop("search", None) if isinstance(content[group], dict) else None
        if not isinstance(space, dict | None):
            raise SettingsError(f"search={written(space)} of {choices[group]}: expected a mapping of settings")
        search |= {f"{group}.{key}": node for key, node in (space or {}).items()}
    if "names" in content:
        raise SettingsError(unknown_key("names", []))
    names = {group: choices[group] for group in sorted(choices) if not group.startswith("hydra/") and choices[group]}
    names["method"] = _with_optimizer(names["method"], content["server_optimizer"]["name"])
    names |= {QUICK: "true"} if is_quick else {}
    if isinstance(folder := content.get("run_dir"), str):  # ${method} is its name there, not its settings
        content["run_dir"] = re.sub(rf"(?<=\${{)(?=({'|'.join(choices)})}})", "names.", folder)
    return Composition({**content, "names": names}, search)


def _with_optimizer(method: str, optimizer: str) -> str:
    """Return the name of a method with a server optimiser: ditto+fedadam; of FedAvg that of the optimiser."""
    known = typing.get_args(typing.get_type_hints(ServerOptimizer)["name"])
    method = "fedavg" if method in known else method
    if optimizer == "none":
        return method
    return optimizer if method == "fedavg" else f"{method}+{optimizer}"


def configs(
    overrides: Sequence[str], multirun: bool, folders: Sequence[Path]
) -> tuple[Sequence[Sequence[str]], list[Composition]]:
    """Return the overrides of every requested run, and its config.

    Raises:
        SettingsError: see `composed` and `sweep`.
    """
    with composing(folders):
        jobs = sweep(overrides, folders) if multirun else [overrides]
        return jobs, [composed(job, folders) for job in jobs]


def as_yaml(composition: Composition, resolve: bool = False) -> str:
    """Return a config with all defaults as `--cfg job` prints it, on request with every `${...}` resolved.

    Raises:
        SettingsError: a setting is wrong; not checked while a required one is missing.
    """
    with _omegaconf_errors():
        config = _with_defaults(composition.config)
        if not OmegaConf.missing_keys(config):
            to_settings(composition)
        return OmegaConf.to_yaml(config, resolve=resolve)


def to_settings(composition: Composition) -> Settings:
    """Return the settings of a run, checked, with every `${...}` resolved; imports the components.

    Raises:
        SettingsError: see `settings_from`.
    """
    with _omegaconf_errors():
        values = OmegaConf.to_container(_with_defaults(composition.config), resolve=True)
        return checks.settings_from(typing.cast(dict[str, Any], values))


def run_settings(composition: Composition) -> Settings | None:
    """Return the settings of a run, of which the components are not checked, and not imported.

    Returns:
        None if the run settings use a default of a component: `lr=${method.mu}`.

    Raises:
        SettingsError: see `to_settings`.
    """
    components = {key: composition.config.get(key) or {} for key in COMPONENTS}
    others = {**composition.config, **dict.fromkeys(COMPONENTS)}
    try:
        values = OmegaConf.to_container(_with_defaults(others), resolve=True)
    except OmegaConfBaseException:
        return None
    return checks.run_settings({**typing.cast(dict[str, Any], values), **components})


def sweep(overrides: Sequence[str], folders: Sequence[Path]) -> list[list[str]]:
    """Return the overrides of every run of a sweep: all combinations of the values, the last key changing fastest.

    Raises:
        SettingsError: an override is wrong.
    """
    asked = parse(overrides)
    _check_groups(asked, groups_in(folders))
    choices = []
    several = any(override.key_or_group == "method" and override.is_sweep_override() for override in asked)
    for override in asked:
        line = str(override.input_line)
        if several and str(override.key_or_group).startswith(("method.client", "method.server")):
            raise SettingsError(f"{line} would hold for every method of the sweep; write YAML files for them")
        if not override.is_sweep_override():
            choices.append([line])
        elif override.is_discrete_sweep():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            raise SettingsError(f"{line}: expected a list of values, {override.key_or_group}=1,2,3")
    return [list(job) for job in itertools.product(*choices)]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides of the command line.

    Raises:
        SettingsError: one is not of the form KEY=VALUE.
    """
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    found, texts = [], list[str]()
    for text in overrides:  # a method with a server optimiser, named as in records
        both = re.fullmatch(r"method=([\w.]+)\+(\w+)", text)
        texts += [f"method={both[1]}", f"server_optimizer={both[2]}"] if both else [text]
    for text in texts:
        form = f"{shortened(text)} is not of the form KEY=VALUE or GROUP=NAME"
        text = re.sub(r"^optimizer=(?=\w+\.)", "optimizer.name=", text)  # a class of torch or one's own
        key, equals, value = text.partition("=")
        quoted = value.replace("'", "\\'")
        try:
            try:
                (override,) = parser.parse_overrides([text])
            except OverrideParseException:
                if not equals or value[:1] in ("[", "{", "'", '"', "$"):
                    raise
                # a path such as "run (1)/lr=0.1", or "retry(2)", which Hydra reads as a call of one of its functions
                (override,) = parser.parse_overrides([f"{key}='{quoted}'"])
        except (OverrideParseException, ValueError) as error:  # also too many digits
            why = str(getattr(error, "message", error)).partition("\n")[0]
            groups = [group for group in COMPONENTS if text in loader.get_group_options(group)]
            hint = f"; did you mean {groups[0]}={text}?" if groups else f" ({why})"
            raise SettingsError(f"{form}{hint}") from error
        if override.is_hydra_override():
            raise SettingsError(f"{text}: settings of Hydra itself are not supported")
        found.append(override)
    return found


def _compose(
    overrides: Sequence[Override], folders: Sequence[Path], groups: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the content of the config files with overrides, and the chosen option of each group."""
    targets = {str(o.key_or_group): str(o.value()) for o in overrides if _is_target(o, groups)}
    of_groups = [o.key_or_group in groups or o.package is not None for o in overrides]
    named = zip(overrides, of_groups, strict=True)
    chosen = tuple(str(o.input_line) for o, of_group in named if of_group and o.key_or_group not in targets)
    texts = list[tuple[Path, str]]()
    for file in (file for folder in folders for file in folder.glob("*/*.yaml")):
        with reading(file, "a text in UTF-8"):
            texts.append((file, file.read_text(encoding="utf-8")))
            Reader(texts[-1][1])  # refuses control characters, and would not name the file later
    try:
        found, choices = _composed_files(chosen, tuple(folders), tuple(texts))
        config = deepcopy(found)
        for group, target in targets.items():  # instead of the file, whose settings are those of another target
            config[group] = {"client": {TARGET: target}} if group == "method" else {TARGET: target}
        for override, of_group in zip(overrides, of_groups, strict=True):
            if not of_group:
                key, value = str(override.key_or_group), override.value()
                if key in ("method.client", "method.server") and isinstance(value, str):
                    key = f"{key}.{TARGET}"
                # The files hold no defaults, so keys are added; `settings_from` refuses the unknown ones.
                OmegaConf.update(config, key, value, merge=True, force_add=True)
        content = typing.cast(dict[str, Any], OmegaConf.to_container(config))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise SettingsError(_message(error)) from error
    return content, {**choices, **{group: short_name(name) for group, name in targets.items()}}


@lru_cache
def _composed_files(
    groups: tuple[str, ...], folders: tuple[Path, ...], _: tuple[tuple[Path, str], ...]
) -> tuple[DictConfig, Mapping[str, str]]:
    """Return what Hydra composes from the chosen files (0.3 s), and its choices, once while no file changes."""
    extra = ",".join(f"'file://{str(folder).replace(chr(39), chr(92) + chr(39))}'" for folder in folders[1:])
    config = compose("config", [f"hydra.searchpath=[{extra}]", *groups], return_hydra_config=True)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), config.hydra.runtime.choices


def _check_groups(overrides: Sequence[Override], groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse a GROUP=NAME without a file."""
    for override in overrides:
        group, sweep = override.key_or_group, override.is_sweep_override()
        if group not in groups or sweep or _is_target(override, groups) or override.value() in groups[group]:
            continue
        value = override.value()
        if isinstance(value, list):
            several = f"{group}={','.join(map(str, value))}"
            raise SettingsError(f"{override.input_line}: expected one {group}; with -m {several}")
        near = nearest(str(value), groups[group]) + ", or optimizer=torch.optim.NAME" * (group == "optimizer")
        raise SettingsError(f"{override.input_line}: there is no {group} of that name; {near}")


def _is_target(override: Override, groups: Mapping[str, Sequence[str]]) -> bool:
    """Return whether an override is GROUP=package.module.Name, the dotted name of a class or function."""
    group, name = str(override.key_or_group), "" if override.is_sweep_override() else override.value()
    return group in COMPONENTS and isinstance(name, str) and "." in name and name not in groups[group]


def _with_defaults(given: Mapping[str, Any]) -> DictConfig:
    """Return a config with every default, in the order of `Settings` and of the signatures."""
    defaults = asdict(Settings())
    values = {**defaults, **given}
    for key, default in defaults.items():
        node = values[key]
        if not isinstance(node, Mapping):
            continue
        if key in COMPONENTS and node:
            values[key] = with_defaults(node, key)
        elif isinstance(default, dict):
            values[key] = {**default, **node}
    return OmegaConf.create(values)


@contextmanager
def _omegaconf_errors() -> Iterator[None]:
    """Raise an error of OmegaConf inside the block as a `SettingsError`."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise SettingsError(f"{error.full_key}: {_message(error)}") from error


def _message(error: Exception) -> str:
    """Return an error in one line; of a YAML error the file, the line and the problem."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}: line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split()) if isinstance(error, HydraException) else str(error).partition("\n")[0]
