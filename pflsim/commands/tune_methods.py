"""The methods that `pflsim tune` compares: their settings, and the spaces that are searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pflsim.config.compose import composed, parse, to_settings
from pflsim.config.names import as_value, written
from pflsim.config.settings import Settings, dotted
from pflsim.errors import SettingsError

SHARED = {"lr": {"low": 0.001, "high": 1.0, "log": True}}
"""What every method searches."""
FIXED = {
    *("method", "data", "shift", "partition", "split", "clients", "eval", "seed", "rounds", "faults"),
    *("run_dir", "executor", "placement", "sweep"),
}
"""Settings that must be the same for all trials, or the trials could not be compared."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a study.

    Args:
        name: on the command line.
        overrides: of all its runs.
        folders: config folders.
        space: to search. By the key of a setting, a list of choices or a range: `low`, `high`, and `log: true` for a
            log scale.
    """

    name: str
    overrides: tuple[str, ...]
    folders: Sequence[Path]
    space: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings of a run, inside `composing`.

        Args:
            values: of settings, by dotted key.

        Raises:
            SettingsError: a setting refuses its value.
        """
        texts = [f"{key}={as_value(value)}" for key, value in values.items()]
        return to_settings(composed([*self.overrides, *texts], self.folders))

    def first_point(self) -> dict[str, Any]:
        """Return the values of the first trial: those without a search, or the nearest ones of the space.

        No range contains null: a setting that is null keeps it, and is left out.
        """
        settings, point = self.settings({}), dict[str, Any]()
        for key, node in self.space.items():
            value = _value(settings, key)
            if isinstance(node, list):
                point[key] = value if value in node else node[0]
            elif value is not None:
                value = min(max(value, node["low"]), node["high"])
                point[key] = round(value) if is_discrete(node) else value
        return point


def methods_of(words: Sequence[str], folders: Sequence[Path]) -> list[Method]:
    """Return the methods that a command line names, checked, inside `composing`.

    Args:
        words: `method=a,b`, settings, and `search.KEY=SPACE` or `search.METHOD.KEY=SPACE`, where `null` is no search.
        folders: config folders.

    Raises:
        SettingsError: a setting or a space is wrong.
    """
    names, searched, others = list[str](), dict[str, Any](), list[str]()
    for override in parse(words):
        key, line = str(override.key_or_group), str(override.input_line)
        if key == "method":
            several = override.is_discrete_sweep()
            names = list(dict.fromkeys(override.sweep_string_iterator())) if several else [str(override.value())]
        elif key in ("run_dir", "resume", "into"):
            raise SettingsError(f"{line}: tune does not take {key}; the folder of the study is --into DIR")
        elif override.is_sweep_override():
            raise SettingsError(f"{line}: only method takes several values; search.KEY=[...] searches a setting")
        elif key.startswith("search."):
            searched[key.removeprefix("search.")] = override.value()
        else:
            others.append(line)
    if not names:
        raise SettingsError("method is not set; give the methods to compare, method=local,fedavg,ditto")
    return [
        _method(Method(name, (f"method={name}", "executor=inline", *others), folders), names, searched)
        for name in names
    ]


def _method(method: Method, names: Sequence[str], searched: Mapping[str, Any]) -> Method:
    """Return a method with its space."""
    settings = method.settings({})
    if not settings.split.get("validation", True):
        raise SettingsError("split.validation=0: tune chooses by validation accuracy; set split.validation above 0")
    if settings.ray_address and settings.executor == "inline":
        raise SettingsError(f"ray_address={settings.ray_address}: tune runs inline; add executor=ray")
    block = composed(method.overrides, method.folders).search or {}
    if not isinstance(block, Mapping):
        raise SettingsError(f"search={written(block)} of {method.name}: expected a mapping of settings")
    space = SHARED | {f"method.{key}": node for key, node in block.items()}
    for key, node in searched.items():
        owner = next((name for name in names if key.startswith(f"{name}.")), None)
        if owner in (None, method.name):
            space[key if owner is None else f"method.{key.removeprefix(f'{owner}.')}"] = node
    return replace(method, space={key: _checked(method, key, node) for key, node in space.items() if node is not None})


def _checked(method: Method, key: str, node: Any) -> Any:
    """Return the space of a setting after checking that the setting accepts it, with choices of the setting's type."""
    text = f"search.{key}={written(node)} of {method.name}"
    if key.partition(".")[0] in FIXED and not key.startswith("method."):
        raise SettingsError(f"{text}: all trials have the same {key}, or they could not be compared")
    is_range = isinstance(node, Mapping) and {"low", "high"} <= set(node) <= {"low", "high", "log"}
    if not is_range and not (isinstance(node, list) and node):
        raise SettingsError(f"{text}: expected a list of choices or {{low: L, high: H, log: true}}")
    try:
        values = [node["low"], node["high"]] if isinstance(node, Mapping) else node
        found = [method.settings({key: value}) for value in values]
        distribution(node)
    except ValueError as error:  # a `SettingsError`, or of Optuna
        raise SettingsError(f"{text}: {error}") from None
    return node if is_range else [_value(settings, key) for settings in found]


def settings_text(values: Mapping[str, Any]) -> str:
    """Return values or spaces by key as text: `lr=0.1 method.mu=1`."""
    return " ".join(f"{key}={written(value)}" for key, value in values.items()) or "nothing"


def is_discrete(node: Any) -> bool:
    """Return whether a space is a list of choices, or a range of whole numbers."""
    return isinstance(node, list) or type(node["low"]) is type(node["high"]) is int


def _value(settings: Settings, key: str) -> Any:
    """Return a setting, or the chosen option of a group."""
    return settings.names[key] if key in settings.names else dotted(asdict(settings))[key]


def distribution(node: Any) -> Any:
    """Return choices or a range as a distribution of Optuna.

    Raises:
        ValueError: the range is empty, or has no logarithm.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(node, list):
        return CategoricalDistribution(node)
    kind = IntDistribution if is_discrete(node) else FloatDistribution
    return kind(node["low"], node["high"], log=bool(node.get("log")))
