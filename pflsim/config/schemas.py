"""YAML files of a run's parts, each laid over a schema read from the signature of the target that it names.

So unknown keys and wrong types are refused while the config is composed, before anything is imported.
"""

from __future__ import annotations

import typing
from dataclasses import field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pflsim.config.annotations import type_mismatch
from pflsim.config.components import COMPONENTS, SIDES, TARGET, settings_of, targets_of
from pflsim.config.override_errors import first_line
from pflsim.errors import SettingsError


class PartsSource(FileConfigSource):
    """A config folder whose method, data, partition, split and model files get the settings of their targets."""

    @staticmethod
    def scheme() -> str:
        """What the search path calls it."""
        return "parts"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; for a part, lay it over the schema of its target."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        part, _, name = config_path.removesuffix(".yaml").partition("/")
        try:
            result = super().load_config(config_path)
            if part in COMPONENTS and isinstance(result.config, DictConfig):
                result.config = typed(result.config, part, name)
        except (SettingsError, YAMLError, OmegaConfBaseException) as error:
            why = first_line(error) if isinstance(error, OmegaConfBaseException) else error
            raise SettingsError(f"{file}: {why}") from error
        return result


class PartsSearchPath(SearchPathPlugin):
    """Puts the config folders on the search path as `PartsSource`s."""

    folders: ClassVar[tuple[Path, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Replace the main folder and add the others."""
        for element in search_path.get_path():
            if element.provider == "main" and element.path == str(self.folders[0]):
                element.path = f"parts://{element.path}"
                for folder in self.folders[1:]:
                    search_path.append("config-dir", f"parts://{folder}")
                return


def typed(config: DictConfig, part: str, name: str) -> DictConfig:
    """Lay the config of a part over the schema of its targets' signatures, with their defaults."""
    given = typing.cast(dict[str, Any], OmegaConf.to_container(config))
    if "defaults" in given and not any(key in given for key in (TARGET, *SIDES)):
        return config  # it builds on another file, which has the schema
    targets = targets_of(given, part)
    rows: list[Any] = []
    for side, target in targets.items():
        if side:
            rows.append((side, make_dataclass(side, [(TARGET, str, target)]), MISSING))
        else:
            rows.append((TARGET, str, target))
    for key, parameter in settings_of(targets, part).items():
        default = MISSING if parameter.required else parameter.default
        if isinstance(default, list | tuple | dict):
            default = field(default_factory=lambda d=default: dict(d) if isinstance(d, dict) else list(d))
        seen, value = _schema_type(parameter.annotation), given.get(key, MISSING)
        if seen is Any and not str(value).startswith("${") and value != MISSING:  # what OmegaConf would not look at
            expected = type_mismatch(parameter.annotation, value)
            if expected is not None:
                raise SettingsError(f"{key}={value!r}: expected {expected}")
        rows.append((key, seen, default))
    schema = OmegaConf.structured(make_dataclass(name.rpartition("/")[2], rows))
    return typing.cast(DictConfig, OmegaConf.merge(schema, config))


def unconverted(schema: type) -> type:
    """A dataclass with the types that OmegaConf is to see, as `_schema_type` has them."""
    hints, rows = typing.get_type_hints(schema), []
    for f in fields(schema):
        kind = hints[f.name]
        if is_dataclass(kind):
            inner = unconverted(typing.cast(type, kind))
            rows.append((f.name, inner, field(default_factory=inner)))
        elif kind is bool:
            rows.append((f.name, Any, field(default=f.default)))
    return make_dataclass(schema.__name__, rows, bases=(schema,))


def _schema_type(annotation: Any) -> Any:
    """The annotation with every Literal replaced by the types of its values, for OmegaConf.

    A bool is anything here, since OmegaConf would make true of 2; `pflsim.config.plain` and `check_part` look at it.
    """
    arguments = typing.get_args(annotation)
    if annotation is bool or set(arguments) == {bool, type(None)}:
        return Any
    if typing.get_origin(annotation) is Literal:
        return typing.Union[tuple(type(value) for value in arguments)]  # noqa: UP007
    if typing.get_origin(annotation) is typing.Union:
        return typing.Union[tuple(_schema_type(a) for a in arguments)]  # noqa: UP007
    return annotation
