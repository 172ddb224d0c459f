"""What a paper has printed: `configs/experiment/NAME.toml`, beside the settings in NAME.yaml.

paper = "who, when, what"
where = "Table 1, MNIST"
unit = "percent"                # of all values: percent or fraction
round = "best_test_oracle"      # which round the paper reports, as in summary.json: best_test_oracle, best_val, last
average = "mean"                # over clients: mean, or weighted_mean (by test examples)
notes = ["what a reader must know"]

[[rows]]
label = "FedAvg"
settings = {method = "fedavg", "partition.n" = 3}   # what differs from NAME.yaml
experiment = "other"            # where the row has another experiment's settings
model = "judged"                # the one that the method is judged by, or personal, or global
value = 87.25
std = 0.5                       # where the paper has one
read_from_figure = false        # true: roughly, by eye
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.run_folder.summary import Choice

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
Whose = Literal["judged", "personal", "global"]
Average = Literal["mean", "weighted_mean"]
Unit = Literal["percent", "fraction"]
REQUIRED = {"paper", "where", "label", "value"}


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One figure of a paper; see the module."""

    label: str
    value: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    experiment: str | None = None
    model: Whose = "judged"
    std: float | None = None
    read_from_figure: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """A table or figure of a paper; see the module. Without rows there is nothing to compare with."""

    paper: str
    where: str
    rows: tuple[PublishedRow, ...] = ()
    unit: Unit = "percent"
    round: Choice = "best_test_oracle"
    average: Average = "mean"
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be in percent."""
        return 1.0 if self.unit == "percent" else 100.0


def read_published(name: str, configs: Path = CONFIGS) -> Published:
    """What the paper has for an experiment.

    Raises:
        SettingsError: there is no such experiment, or its file is not as the module says.
    """
    folder = configs / "experiment"
    path, known = folder / f"{name}.toml", sorted(file.stem for file in folder.glob("*.toml"))
    if name not in known or not path.is_file():
        raise SettingsError(f"--experiment {name}: there is no such experiment; {nearest(name, known)}")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    _check(Published, content, path)
    rows = content.pop("rows", [])
    for row in rows:
        _check(PublishedRow, row, path)
    notes = tuple(content.pop("notes", []))
    return Published(**content, rows=tuple(PublishedRow(**row) for row in rows), notes=notes)


def _check(kind: type, given: Mapping[str, Any], path: Path) -> None:
    """Refuse what the module does not say."""
    known = {f.name for f in fields(kind)}
    choices = {"unit": Unit, "round": Choice, "average": Average, "model": Whose}
    for name, value in given.items():
        if name not in known:
            raise SettingsError(f"{path}: {name}: no such entry; {nearest(name, known)}")
        if name in choices and value not in get_args(choices[name]):
            raise SettingsError(f"{path}: {name} = {value!r}: expected one of {', '.join(get_args(choices[name]))}")
    for name in sorted(REQUIRED & known - set(given)):
        raise SettingsError(f"{path}: {name} is missing")
