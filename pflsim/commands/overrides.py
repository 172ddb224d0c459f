"""Settings from Python by dotted key, and names for their objects."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from pflsim.config.components import COMPONENTS, target_of
from pflsim.config.compose import Several
from pflsim.config.names import written
from pflsim.config.settings import dotted
from pflsim.data.dataset import Dataset
from pflsim.data.explicit import explicit
from pflsim.data.federated import Partition
from pflsim.data.sources.npz import ImageLayout
from pflsim.data.sources.own import as_dataset
from pflsim.data.sources.table import Table
from pflsim.errors import SettingsError


def values_of(settings: Mapping[str, Any], sweep: bool = False) -> dict[str, Any]:
    """Return settings by dotted key, as `pflsim.config.compose.parse` does for the command line.

    Args:
        settings: values by key; components may be objects (see `pflsim.run`), sections and components mappings.
        sweep: a list has one value per run.

    Raises:
        SettingsError: an object is of no kind that the component takes, or two objects of a sweep have the same name.
    """
    found = dict[str, Any]()
    for key, value in settings.items():
        several = value if sweep and isinstance(value, list | range) else [value]
        if not several:
            raise SettingsError(f"{key}=[]: expected at least one value to sweep")
        choices = [_component(key, choice) if key in COMPONENTS else _section(key, choice) for choice in several]
        if len(choices) != len({*map(written, choices)}):
            raise SettingsError(f"{key}: two values of the sweep are equal, or are objects of the same name")
        names = {name for choice in choices for name in choice}
        if len(choices) > 1 and len(names) > 1:
            raise SettingsError(f"{key}: a list of such values cannot be swept; call run for each of them")
        found |= choices[0] if len(choices) == 1 else {n: Several(choice[n] for choice in choices) for n in names}
    return found


def _section(key: str, value: Any) -> dict[str, Any]:
    """Return a setting, or each setting of a section."""
    return {name: _plain(item) for name, item in dotted({key: value}).items()}


def _plain(value: Any) -> Any:
    """Return a value as YAML has it; functions and objects become names."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.floating):
        return float(str(value))  # 0.1 of float32
    if hasattr(value, "tolist") and not isinstance(value, type):  # of NumPy or torch
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [*map(_plain, value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    return target_of(value) if callable(value) else str(value)


def _component(key: str, value: Any) -> dict[str, Any]:
    """Return the settings that choose a component."""
    if isinstance(value, str):
        return {key: value}
    if isinstance(value, Mapping) and "train" not in value:
        chosen = _component(key, value["name"]) if "name" in value else {}
        others = {name: item for name, item in value.items() if name != "name"}
        return chosen | (_section(key, others) if others else {})
    if key == "method" and isinstance(value, tuple) and len(value) == 2:
        return {"method": target_of(value[0]), "method.server": target_of(value[1])}
    parts = value if isinstance(value, tuple) else (value,)
    if key == "data" and len(parts) in (1, 2) and all(hasattr(part, "iloc") for part in parts):
        value = Table(*parts, label="label")
    if isinstance(value, Table):
        return {"data": "table"} | _section("data", value.settings())
    if key == "data" and not callable(value):
        value = _loader(value)
    if key == "model" and hasattr(value, "state_dict") and not hasattr(value, "__qualname__"):
        value = _copier(value)
    if key == "partition" and isinstance(value, Mapping):
        value = _explicit(value)
    if not hasattr(value, "__qualname__"):
        raise SettingsError(f"{key}={type(value).__name__}: expected a name, a class or a function")
    return {key: target_of(value)}


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
