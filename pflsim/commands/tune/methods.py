"""The methods of a study: their first settings and their spaces, from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pflsim.commands.tune.space import (
    FIXED,
    FORM,
    SHARED,
    Dimension,
    Range,
    Space,
    block,
    dimension,
    ends,
    nearest_value,
)
from pflsim.config.checks import check
from pflsim.config.compose import composed, parse, plain
from pflsim.config.help import groups_in
from pflsim.config.names import as_value
from pflsim.config.plain import dotted
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError

SEARCH = "search."
OWN = ("run_dir", "resume", "into")
"""Settings that have no place on the command line of `tune`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a study.

    Args:
        name: on the command line.
        overrides: of all its runs.
        folders: config folders.
        space: to search.
    """

    name: str
    overrides: tuple[str, ...]
    folders: tuple[Path, ...]
    space: Space

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings of a run, inside `composing`.

        Args:
            values: of settings, by dotted key.

        Raises:
            SettingsError: a setting refuses its value.
        """
        return plain(
            composed([*self.overrides, *(f"{key}={as_value(value)}" for key, value in values.items())], self.folders)
        )

    def defaults(self) -> dict[str, Any]:
        """Return the values of the first trial: those without a search, or the nearest ones of the space."""
        settings = self.settings({})
        return {key: nearest_value(found, _value(settings, key)) for key, found in self.space.items()}


def methods_of(words: Sequence[str], folders: Sequence[Path]) -> list[Method]:
    """Return the methods that a command line names, checked, inside `composing`.

    Args:
        words: `method=a,b`, settings, and `search.KEY=SPACE` or `search.METHOD.KEY=SPACE`, where `null` is no search.
        folders: config folders.

    Raises:
        SettingsError: a setting or a space is wrong; nothing was started.
    """
    asked, names = parse(words), list[str]()
    given, others = dict[str, Any](), list[str]()
    for override in asked:
        key, line = str(override.key_or_group), str(override.input_line)
        if key == "method" and override.is_discrete_sweep():
            names = list(dict.fromkeys(override.sweep_string_iterator()))
        elif key == "method":
            names = [str(override.value())]
        elif key in OWN:
            raise SettingsError(f"{line}: tune does not take {key}; the folder of the study is --into DIR")
        elif override.is_sweep_override():
            several = "only method takes several values"
            advice = several if key.partition(".")[0] in FIXED else f"{several}; search them: search.{key}=[...]"
            raise SettingsError(f"{line}: {FORM if key.startswith(SEARCH) else advice}")
        elif key.startswith(SEARCH):
            if key.removeprefix(SEARCH) in given:
                raise SettingsError(f"{line}: {key} is given twice")
            given[key.removeprefix(SEARCH)] = override.value()
        else:
            others.append(line)
    if not names:
        raise SettingsError("method is not set; give the methods to compare, method=local,fedavg,ditto")
    for key in given:
        if (of := key.partition(".")[0]) in groups_in(folders)["method"] and of not in names:
            raise SettingsError(f"search.{key}: {of} is not among the methods to compare: {', '.join(names)}")
    return [_method(name, names, others, given, folders) for name in names]


def _method(
    name: str, names: Sequence[str], others: Sequence[str], given: Mapping[str, Any], folders: Sequence[Path]
) -> Method:
    overrides = (f"method={name}", "executor=inline", *others)
    config = composed(overrides, folders)
    files = [file for folder in folders if (file := folder / "method" / f"{name}.yaml").is_file()]
    file = str(files[0]) if files else name
    try:
        own = block(config.search, "method.")
    except SettingsError as error:
        raise SettingsError(f"{file}: {error}") from None
    space: dict[str, Dimension] = {**SHARED, **own}
    sources = dict.fromkeys(own, f"{file}: ")
    for key, node in given.items():
        of = max((other for other in names if key.startswith(f"{other}.")), key=len, default=None)
        if of not in (None, name):
            continue
        key = key if of is None else f"method.{key.removeprefix(f'{of}.')}"
        space.pop(key, None)
        sources.pop(key, None)
        if node is not None:
            space[key] = dimension(key, node)
    method = Method(name, overrides, tuple(folders), space)
    settings = method.settings({})
    check(settings)
    if not settings.split.get("validation", True):
        raise SettingsError("split.validation=0: tune chooses by validation accuracy; set split.validation above 0")
    return Method(name, overrides, tuple(folders), {key: _checked(method, key, sources.get(key, "")) for key in space})


def _checked(method: Method, key: str, source: str) -> Dimension:
    """Return a dimension after checking that the setting accepts it, with choices as the setting's type."""
    found, accepted = method.space[key], list[Any]()
    for value in ends(found):
        try:
            settings = method.settings({key: value})
            check(settings)
        except SettingsError as error:
            raise SettingsError(f"{source}search.{key} of {method.name}: {error}") from None
        accepted.append(_value(settings, key))
    return found if isinstance(found, Range) else tuple(accepted)


def _value(settings: Settings, key: str) -> Any:
    """Return a setting, or the chosen option of a group."""
    return settings.names[key] if key in settings.names else dotted(asdict(settings))[key]
