"""From nested mappings, as config files give them, to `Settings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, get_type_hints

from pflsim.config.components import COMPONENTS, check_component, keys_of
from pflsim.config.installation import program
from pflsim.config.names import unknown_key
from pflsim.config.settings import Settings
from pflsim.config.validate import checked
from pflsim.errors import SettingsError

Schema = TypeVar("Schema")


def settings_from(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a run, checked: names, types, bounds, choices, and the arguments of components.

    Args:
        config: values by key, nested as `Settings` is. A missing value has its default; a component is required.

    Raises:
        SettingsError: lists all problems, one per line.
    """
    problems: list[str] = []
    settings = _build(Settings, config, "", problems, config)
    for component in COMPONENTS:
        node = config.get(component, getattr(settings, component))
        if not isinstance(node, Mapping) or not node:
            problems.append(f"{component} is not set; give {component}=NAME ({program()} --help lists the names)")
            continue
        with _collected(problems):
            setattr(settings, component, check_component(node, component))
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def known_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of all settings, those of the components that a config selects included."""
    own = [key for key in dotted(asdict(Settings())) if key not in (*COMPONENTS, "names")]
    return own + [key for component in COMPONENTS for key in keys_of(config.get(component), component)]


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= dotted(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def swept(settings: Settings) -> dict[str, Any]:
    """Return the settings that vary in the sweep of a run, by the key on the command line; none outside a sweep."""
    values = {**dotted(asdict(settings)), **settings.names}
    return {key: values[key] for key in settings.names.get("sweep", "").split(",") if key in values}


def _build(
    schema: type[Schema], values: Mapping[str, Any], prefix: str, problems: list[str], config: Mapping[str, Any]
) -> Schema:
    """Return an instance of a dataclass from a mapping; what is wrong is added to the problems."""
    hints = get_type_hints(schema, include_extras=True)
    found: dict[str, Any] = {}
    for name, value in values.items():
        key, kind = f"{prefix}{name}", hints.get(name)
        if kind is None:
            names = [*known_keys(config), *get_type_hints(Settings)]
            problems += [unknown_key(one, names) for one in dotted({key: value})]
        elif key in COMPONENTS:
            found[name] = value
        elif not is_dataclass(kind):
            with _collected(problems):
                found[name] = checked(key, kind, value)
        elif isinstance(value, Mapping):
            found[name] = _build(kind, value, f"{key}.", problems, config)  # type: ignore[arg-type]
        else:
            problems.append(f"{key}={value!r}: expected {key}.KEY=VALUE")
    return schema(**found)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Add an error of the block to the problems, instead of raising it."""
    try:
        yield
    except SettingsError as error:
        problems.append(str(error))
