"""Settings from Python as overrides of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from pflsim.config.components import COMPONENTS, target_of
from pflsim.config.names import as_value
from pflsim.config.settings import dotted
from pflsim.data.dataset import Dataset
from pflsim.data.explicit import explicit
from pflsim.data.federated import Partition
from pflsim.data.sources.npz import ImageLayout
from pflsim.data.sources.own import as_dataset
from pflsim.data.sources.table import Table
from pflsim.errors import SettingsError


def overrides_of(settings: Mapping[str, Any], sweep: bool = False) -> list[str]:
    """Return settings as overrides of the command line.

    Args:
        settings: values by key; components may be objects (see `pflsim.run`), sections and components mappings.
        sweep: a list has one value per run.

    Raises:
        SettingsError: an object is of no kind that the component takes, or two objects of a sweep have the same name.
    """
    found = []
    for key, value in settings.items():
        choices = value if sweep and isinstance(value, list) else [value]
        if not choices:
            raise SettingsError(f"{key}=[]: expected at least one value to sweep")
        texts = [_component(key, choice) if key in COMPONENTS else _section(key, choice) for choice in choices]
        if len(texts) != len({tuple(text) for text in texts}):
            raise SettingsError(f"{key}: two values of the sweep are equal, or are objects of the same name")
        if len(choices) > 1 and any(len(text) > 1 for text in texts):
            raise SettingsError(f"{key}: a list of such values cannot be swept; call run for each of them")
        found += [",".join([texts[0][0], *(text[0].partition("=")[2] for text in texts[1:])]), *texts[0][1:]]
    return found


def _section(key: str, value: Any) -> list[str]:
    """Return the overrides of a setting, or of each setting of a section; functions and objects become names."""
    return [f"{name}={as_value(_named(item))}" for name, item in dotted({key: value}).items()]


def _named(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_named, value)]
    return target_of(value) if callable(value) else value


def _component(key: str, value: Any) -> list[str]:
    """Return the overrides that choose a component."""
    if isinstance(value, str):
        return [f"{key}={value}"]
    if isinstance(value, Mapping) and "train" not in value:
        chosen = _component(key, value["name"]) if "name" in value else []
        return [*chosen, *_section(key, {name: item for name, item in value.items() if name != "name"})]
    if key == "method" and isinstance(value, tuple) and len(value) == 2:
        return [f"method={target_of(value[0])}", f"method.server={target_of(value[1])}"]
    parts = value if isinstance(value, tuple) else (value,)
    if key == "data" and len(parts) in (1, 2) and all(hasattr(part, "iloc") for part in parts):
        value = Table(*parts, label="label")
    if isinstance(value, Table):
        return ["data=table", *_section("data", value.settings())]
    if key == "data" and not callable(value):
        value = _loader(value)
    if key == "model" and hasattr(value, "state_dict") and not hasattr(value, "__qualname__"):
        value = _copier(value)
    if key == "partition" and isinstance(value, Mapping):
        value = _explicit(value)
    if not hasattr(value, "__qualname__"):
        raise SettingsError(f"{key}={type(value).__name__}: expected a name, a class or a function")
    return [f"{key}={target_of(value)}"]


def _loader(data: Any) -> Callable[[], Dataset]:
    """Return a function that returns a data set, or makes it from objects; its name is that of the data set."""

    def load() -> Dataset:
        return data

    def convert(*, layout: ImageLayout = "auto", standardize: bool = False) -> Dataset:
        parts = data if isinstance(data, tuple) else (data,)
        if len(parts) > 2:
            raise SettingsError(f"data: found {len(parts)} parts, expected two: ((x, y), (x_test, y_test))")
        return as_dataset(*parts, layout=layout, standardize=standardize)

    load.__qualname__, convert.__qualname__ = getattr(data, "name", ""), "data"
    return load if isinstance(data, Dataset) else convert


def _copier(module: Any) -> Callable[[], Any]:
    """Return a function that returns copies of a torch module; its name is that of the module's class."""

    def make() -> Any:
        return deepcopy(module)

    make.__qualname__ = type(module).__name__
    return make


def _explicit(rows: Mapping[str, Any]) -> Callable[[Dataset, int], Partition]:
    """Return a function that gives every client its rows."""

    def listed(dataset: Dataset, clients: int) -> Partition:
        return explicit(dataset, clients, rows)

    listed.__qualname__ = "explicit"
    listed.__dict__["rows"] = rows  # for the number of clients
    return listed
