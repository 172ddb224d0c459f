"""The settings that a figure of a paper asks for, as a run would have them, and the command for such a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pflsim.analysis.results.settings import IGNORED, written
from pflsim.config.components import COMPONENTS, settings_of, targets_of
from pflsim.config.plain import dotted
from pflsim.config.settings import Settings

OVERRIDE = "override /"


@dataclass(frozen=True)
class Planned:
    """What an experiment's YAML file says, with what a row has instead.

    Args:
        experiment: its name.
        choices: the file chosen for each part.
        own: settings of the YAML file that the row leaves, by dotted key.
        given: settings of the row, its parts among them.
        clash: whether the YAML file has settings of a part that the row replaces, so that no command can name both.
        configs: the folder of all groups.
    """

    experiment: str
    choices: Mapping[str, str]
    own: Mapping[str, Any]
    given: Mapping[str, Any]
    clash: bool
    configs: Path

    def settings(self) -> dict[str, Any]:
        """All settings by dotted key, as `run_settings` has those of a run."""
        found = dotted({key: value for key, value in asdict(Settings()).items() if key not in COMPONENTS}) | {
            **self.choices
        }
        for part, name in self.choices.items():
            node = _yaml(self.configs / part / f"{name}.yaml")
            known = settings_of(targets_of(node, part), part)
            defaults = {key: parameter.default for key, parameter in known.items() if not parameter.required}
            found |= dotted({part: {**defaults, **node}})
        found |= {**self.own, **self.given}
        if found["local_epochs"] is None and found["local_steps"] is None:
            found["local_epochs"] = 1
        return {key: _listed(value) for key, value in found.items() if not _ignored(key)}

    def command(self) -> str:
        """What makes the run; DIR stands for the folder of data sets."""
        if self.clash:
            others = {key: value for key, value in self.given.items() if key not in COMPONENTS}
            words = _words({**self.choices, **self.own, **others})
        else:
            words = [f"+experiment={self.experiment}", *_words(self.given)]
        data = _yaml(self.configs / "data" / f"{self.choices['data']}.yaml")
        root = ["data.root=DIR"] if "root" in settings_of(targets_of(data, "data"), "data") else []
        return " ".join(["python launch.py", *words, *root])


def planned(experiment: str, given: Mapping[str, Any], configs: Path) -> Planned:
    """Read an experiment's YAML file and lay a row's settings over it."""
    content = dict(_yaml(configs / "experiment" / f"{experiment}.yaml"))
    default = [entry for entry in _yaml(configs / "config.yaml")["defaults"] if isinstance(entry, dict)]
    choices = {
        group.removeprefix(OVERRIDE): name
        for entry in (*default, *content.pop("defaults", []))
        for group, name in entry.items()
    }
    replaced = {part for part in COMPONENTS if given.get(part, choices[part]) != choices[part]}
    choices = {part: given.get(part, choices[part]) for part in COMPONENTS}
    own = dotted(content)
    left = {key: value for key, value in own.items() if key.partition(".")[0] not in replaced and key not in given}
    clash = any(key.partition(".")[0] in replaced for key in own)
    return Planned(experiment, choices, left, given, clash, configs)


def _listed(value: Any) -> Any:
    """Tuples as lists, as a file has them."""
    return [_listed(inner) for inner in value] if isinstance(value, list | tuple) else value


def _ignored(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in IGNORED)


def _words(settings: Mapping[str, Any]) -> list[str]:
    return [shlex.quote(f"{key}={written(value)}") for key, value in settings.items()]


@cache
def _yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))
