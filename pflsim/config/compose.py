"""From config files and overrides to the settings of a run, or of all runs of a sweep. Only this module uses Hydra."""

import itertools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import Reader

from pflsim.config import checks
from pflsim.config.components import COMPONENTS, NOTEBOOK, TARGET, bind, check_component, short_name, with_defaults
from pflsim.config.help import GROUPS, groups_in
from pflsim.config.names import FOLDER, as_value, nearest, shortened, unknown_key, written
from pflsim.config.plugins import Plugin, provided
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError, reading
from pflsim.fusion import ServerOptimizer

CONFIGS = next(path for path in (FOLDER / "pflsim" / "configs", FOLDER / "configs") if path.is_dir())
"""The config folder of this project: inside pflsim in a wheel, beside it in a clone."""
OWN_DEFAULTS = ("pflsim.data.sources.table.load", "pflsim.data.sources.text.load")
"""Data sources that choose defaults of the run."""
LISTED = "pflsim.data.explicit.explicit"
"""The partition whose rows tell the number of clients, as objects of Python do."""
DEEPEST = 50
"""Brackets inside one another in a setting; the parsers are recursive."""
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
    if content["data"].get(TARGET) not in OWN_DEFAULTS:
        return {}
    with _omegaconf_errors():
        node = OmegaConf.to_container(OmegaConf.create(dict(content)).data, resolve=True)
    load = bind(check_component(typing.cast(dict[str, Any], node), "data"), "data")
    name, documents = (content.get("task") or {}).get("name"), getattr(load.func, "language_model", None)
    owner = documents if name == "language_model" and documents else load.func
    return import_module(owner.__module__).defaults(load)


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


def config_folders(config_dirs: Iterable[str | Path]) -> list[Path]:
    """Return this project's config folder, and those of `--config-dir`."""
    return [CONFIGS, *(Path(folder).absolute() for folder in config_dirs)]


def composed(given: Mapping[str, Any], folders: Sequence[Path]) -> Composition:
    """Return the config of one run.

    Args:
        given: settings and the chosen options of groups, by dotted key.
        folders: config folders.

    Raises:
        SettingsError: a setting or a file is wrong; the message names it and lists the choices.
    """
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"--config-dir {folder}: there is no such folder")
    values, groups = _with_full_keys(given), groups_in(folders)
    quick = values.pop(QUICK, False)
    if not isinstance(quick, bool):
        raise SettingsError(f"{QUICK}={written(quick)}: expected true or false, as in +experiment=NAME quick=true")
    if both := re.fullmatch(r"([\w.-]+)\+(\w+)", str(values.get("method"))):  # as it is named in records
        parts = {"method": both[1], "server_optimizer": both[2]}
        pairs = (pair for key, value in values.items() for pair in (parts if key == "method" else {key: value}).items())
        values = dict(pairs)  # of the method's server optimiser and another one, the last counts
    _check_values(values, groups)
    _check_plugins(values, folders)
    if quick:
        experiment = {key: value for key, value in values.items() if key == "experiment"}
        smaller = _compose(experiment, folders, groups)[0].get(QUICK)
        if not smaller:
            raise SettingsError("quick=true: only experiments have a quick form: +experiment=NAME quick=true")
        values = {**parse(smaller), **values}
    content, choices = _compose(values, folders, groups)
    if chosen := _chosen_by_data(content):
        standard = _compose({}, folders, groups)[1]
        more = {key: value for key, value in chosen.items() if key in groups and choices[key] == standard[key]}
        content, choices = _compose({**more, **values}, folders, groups)
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
    names |= {QUICK: "true"} if quick else {}
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
    values: Mapping[str, Any], multirun: bool, folders: Sequence[Path]
) -> tuple[Sequence[Mapping[str, Any]], list[Composition]]:
    """Return the given settings of every requested run, and its config.

    Raises:
        SettingsError: see `composed` and `sweep`.
    """
    jobs = sweep(values) if multirun else [values]
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


class Several(list[Any]):
    """The values of a setting in the runs of a sweep."""


def sweep(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of every run of a sweep: all combinations of the values, the last key changing fastest.

    Raises:
        SettingsError: a client or a server rule is given for several methods.
    """
    values = _with_full_keys(given)
    for key in values if isinstance(values.get("method"), Several) else ():
        if key.startswith(("method.client", "method.server")):
            line = f"{key}={written(values[key])}"
            raise SettingsError(f"{line} would hold for every method of the sweep; write YAML files for them")
    choices = (value if isinstance(value, Several) else [value] for value in values.values())
    return [dict(zip(values, job, strict=True)) for job in itertools.product(*choices)]


def _with_full_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with optimizer.name for an optimizer that is a class of torch or one's own."""
    named = re.match(r"\[?\w+\.", written(values.get("optimizer")))
    return {"optimizer.name" if named and key == "optimizer" else key: value for key, value in values.items()}


def parse(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings of the command line by key; the last one of a key counts.

    Raises:
        SettingsError: one is not of the form KEY=VALUE.
    """
    options = groups_in([CONFIGS])
    loader = SimpleNamespace(get_group_options=lambda group, results_filter: options.get(group, []))  # for glob(*)
    parser, found = OverridesParser.create(typing.cast(Any, loader)), dict[str, Any]()
    for text in overrides:
        if max(itertools.accumulate((each in "[{") - (each in "]}") for each in text), default=0) > DEEPEST:
            raise SettingsError(f"{shortened(text)}: expected at most {DEEPEST} brackets inside one another")
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
            groups = [group for group in COMPONENTS if text in options[group]]
            hint = f"; did you mean {groups[0]}={text}?" if groups else f" ({why})"
            raise SettingsError(f"{shortened(text)} is not of the form KEY=VALUE or GROUP=NAME{hint}") from error
        if override.is_hydra_override():
            raise SettingsError(f"{text}: settings of Hydra itself are not supported")
        key = override.get_key_element().lstrip("+~")
        found.pop(key, None)
        found[key] = override.value()
        if override.is_discrete_sweep():
            found[key] = Several(parse([f"{key}={one}"])[key] for one in override.sweep_string_iterator())
        elif override.is_sweep_override():
            raise SettingsError(f"{text}: expected a list of values, {key}=1,2,3")
    return found


def _compose(
    values: Mapping[str, Any], folders: Sequence[Path], groups: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the content of the config files with given settings, and the chosen option of each group."""
    targets = {key: value for key, value in values.items() if _is_target(key, value, groups)}
    chosen = {key: value for key, value in values.items() if key in groups and key not in targets}
    lines = tuple(f"{'+' * (key not in GROUPS)}{key}={as_value(value)}" for key, value in chosen.items())
    texts = list[tuple[Path, str]]()
    for file in (file for folder in folders for file in folder.glob("*/*.yaml")):
        with reading(file, "a text in UTF-8"):
            texts.append((file, file.read_text(encoding="utf-8")))
            Reader(texts[-1][1])  # refuses control characters, and would not name the file later
    try:
        found, choices = _composed_files(lines, tuple(folders), tuple(texts))
        config = deepcopy(found)
        for group, name in targets.items():  # instead of the file, whose settings are those of another target
            target = next((plugin.target for plugin in _plugins(group).get(name, ())), name)
            config[group] = {"client": {TARGET: target}} if group == "method" else {TARGET: target}
        for key, value in values.items():
            if key not in groups:
                if key in ("method.client", "method.server") and isinstance(value, str):
                    key = f"{key}.{TARGET}"
                # The files hold no defaults, so keys are added; `settings_from` refuses the unknown ones.
                OmegaConf.update(config, key, value, merge=True, force_add=True)
        content = typing.cast(dict[str, Any], OmegaConf.to_container(config))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise SettingsError(_message(error)) from error
    named = {group: name if name in _plugins(group) else short_name(name) for group, name in targets.items()}
    return content, {**choices, **named}


@lru_cache
def _composed_files(
    groups: tuple[str, ...], folders: tuple[Path, ...], _: tuple[tuple[Path, str], ...]
) -> tuple[DictConfig, Mapping[str, str]]:
    """Return what Hydra composes from the chosen files (0.3 s), and its choices, once while no file changes.

    The calling program may use Hydra too: its state is put aside.
    """
    extra = ",".join(f"'file://{str(folder).replace(chr(39), chr(92) + chr(39))}'" for folder in folders[1:])
    hydra, version = GlobalHydra.instance(), VersionBase.instance()
    GlobalHydra.set_instance(copy(hydra))
    GlobalHydra.instance().clear()
    VersionBase.set_instance(copy(version))
    try:
        with initialize_config_dir(str(folders[0]), job_name="launch", version_base="1.3"):
            config = compose("config", [f"hydra.searchpath=[{extra}]", *groups], return_hydra_config=True)
    finally:
        GlobalHydra.set_instance(hydra)
        VersionBase.set_instance(version)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), config.hydra.runtime.choices


def _check_values(values: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse several values, and a GROUP=NAME without a file."""
    for group, value in values.items():
        if isinstance(value, Several):
            line = f"{group}={','.join(map(written, value))}"
            raise SettingsError(f"{line}: several values need --multirun; one with a comma: \"KEY='a,b'\"")
        if group not in groups or _is_target(group, value, groups):
            continue
        if isinstance(value, list):
            several = f"{group}={','.join(map(str, value))}"
            raise SettingsError(f"{group}={written(value)}: expected one {group}; with -m {several}")
        if value not in groups[group]:
            near = nearest(str(value), groups[group]) + ", or optimizer=torch.optim.NAME" * (group == "optimizer")
            raise SettingsError(f"{group}={written(value)}: there is no {group} of that name; {near}")


def _plugins(group: str) -> Mapping[str, Sequence[Plugin]]:
    return provided().get(group, {})


def _check_plugins(values: Mapping[str, Any], folders: Sequence[Path]) -> None:
    """Refuse a name of an installed package that a config file or another package has too."""
    for group, value in values.items():
        found = _plugins(group).get(value, ()) if isinstance(value, str) else ()
        files = [str(file) for folder in folders if found and (file := folder / group / f"{value}.yaml").exists()]
        if found and len(every := [*(plugin.package for plugin in found), *files]) > 1:
            targets = " or ".join(f"{group}={plugin.target}" for plugin in found)
            what = f"{group}={value}: {' and '.join(every)} have a {group} of this name"
            raise SettingsError(f"{what}; choose that of a package by {targets}, or uninstall one")


def _is_target(group: str, value: Any, groups: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a setting names a class or function: GROUP=package.module.Name, or a name of a package."""
    if group not in COMPONENTS or not isinstance(value, str):
        return False
    return value in _plugins(group) or ("." in value and value not in groups[group])


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
