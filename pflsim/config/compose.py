"""From config files and overrides to the settings of a run, or of all runs of a sweep."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from pflsim.config.components import COMPONENTS
from pflsim.config.help import groups_in
from pflsim.config.names import shortened
from pflsim.config.override_errors import ConfigError, check_groups, explain, first_line
from pflsim.config.plain import settings_from
from pflsim.config.schemas import PartsSearchPath, PartsSource, unconverted
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@contextmanager
def composing(folders: Sequence[Path]) -> Iterator[None]:
    """Make Hydra look into the folders, the first one first, inside the block."""
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"--config-dir {folder}: there is no such folder")
    PartsSearchPath.folders = tuple(folders)
    Plugins.instance().register(PartsSource)
    Plugins.instance().register(PartsSearchPath)
    root = make_dataclass("Settings", [(part, Any, MISSING) for part in COMPONENTS], bases=(unconverted(Settings),))
    ConfigStore.instance().store(name="schema", node=root)
    with initialize_config_dir(str(folders[0]), job_name="launch", version_base="1.3"):
        yield


def composed(overrides: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """The config of one run.

    Raises:
        SettingsError: an override or a file that does not fit; says which, and what would.
    """
    asked = parse(overrides)
    check_groups(asked, groups_in(folders), CONFIGS)
    try:
        config = compose("config", list(overrides), return_hydra_config=True)
        choices = config.hydra.runtime.choices
        names = {
            group: choices[group] for group in sorted(choices) if not group.startswith("hydra/") and choices[group]
        }
        with open_dict(config):
            del config["hydra"]
            config.names = names
        return config
    except ConfigError as error:
        raise SettingsError(explain(asked, error, groups_in(folders))) from error


def configs(
    overrides: Sequence[str], multirun: bool, folders: Sequence[Path]
) -> tuple[Sequence[Sequence[str]], list[DictConfig]]:
    """The overrides of every run that is asked for, and its config.

    Raises:
        SettingsError: as of `composed` and `sweep`.
    """
    with composing(folders):
        jobs = sweep(overrides, folders) if multirun else [overrides]
        return jobs, [composed(job, folders) for job in jobs]


def as_yaml(config: DictConfig, resolve: bool = False) -> str:
    """A config as `--cfg job` prints it, with every `${...}` filled in if that is asked for."""
    return OmegaConf.to_yaml(config, resolve=resolve)


def plain(config: DictConfig) -> Settings:
    """The settings of a run, with every `${...}` filled in."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise SettingsError(f"{key} has no default; give it a value: {key}=...") from error
    except OmegaConfBaseException as error:
        raise SettingsError(f"{error.full_key}: {first_line(error)}") from error
    return settings_from(typing.cast(Mapping[str, Any], values))


def sweep(overrides: Sequence[str], folders: Sequence[Path]) -> list[list[str]]:
    """The overrides of every run of a sweep: all combinations of the values given, the last one changing fastest."""
    asked = parse(overrides)
    check_groups(asked, groups_in(folders), CONFIGS)
    choices = []
    for override in asked:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise SettingsError(f"{override.input_line}: a sweep takes a list of values: {override.key_or_group}=1,2,3")
        values = override.sweep_string_iterator() if override.is_sweep_override() else None
        choices.append(
            [str(override.input_line)] if values is None else [f"{override.get_key_element()}={v}" for v in values]
        )
    return [list(job) for job in itertools.product(*choices)]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Read the overrides of the command line.

    Raises:
        SettingsError: one is not written as key=value.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found = []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except (
            OverrideParseException,
            ValueError,
            RecursionError,
        ) as error:  # more digits, or brackets, than can be read
            why = str(getattr(error, "message", error)).partition("\n")[0]
            raise SettingsError(f"{shortened(text)} is not of the form KEY=VALUE or GROUP=NAME ({why})") from error
        if not override.key_or_group:
            raise SettingsError(f"{text!r} is not of the form KEY=VALUE or GROUP=NAME (there is no KEY)")
        if override.is_hydra_override():
            raise SettingsError(f"{text}: Hydra only composes the settings here; it has none of its own")
        found.append(override)
    return found
