"""Values printed in papers: the files `configs/experiment/TABLE.toml`.

paper = "authors, year, title"
unit = "percent"                # of all values: percent or fraction
round = "best_test_oracle"      # the round that the paper reports: best_test_oracle, best_val or last
notes = ["..."]                 # shown below the table

[EXPERIMENT]
where = "Table 1, MNIST"
notes = ["..."]                 # of this experiment alone
rows = [
  {label = "FedAvg", value = 87.25, std = 0.5, model = "global", command = "+experiment=EXPERIMENT method=fedavg"},
]

`model` is `personal` or `global`; a row without it has the method's reported model. `command` holds the overrides that
make the run, without `data.root`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.run_folder.metrics import Model
from pflsim.run_folder.summary import Choice

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One value of a paper; `value` and `std` are in percent. See the module."""

    label: str
    value: float
    command: str
    std: float | None = None
    model: Model | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """The values that a paper prints for one experiment. See the module."""

    title: str
    round: Choice
    rows: tuple[PublishedRow, ...]
    notes: tuple[str, ...]


def read_published(name: str, configs: Path = CONFIGS) -> Published:
    """Read the values that a paper prints for an experiment.

    Raises:
        SettingsError: there are none; names the experiments that have some.
    """
    known: list[str] = []
    for path in sorted((configs / "experiment").glob("*.toml")):
        file = tomllib.loads(path.read_text(encoding="utf-8"))
        if name in file and isinstance(file[name], dict):
            return _published(file, file[name])
        known += [key for key, value in file.items() if isinstance(value, dict)]
    raise SettingsError(f"--experiment {name}: no paper prints values for such an experiment; {nearest(name, known)}")


def _published(file: dict, section: dict) -> Published:
    scale = {"percent": 1, "fraction": 100}[file["unit"]]
    rows = [{**row, "value": row["value"] * scale} for row in section["rows"]]
    rows = [{**row, "std": row["std"] * scale} if "std" in row else row for row in rows]
    notes = (*file.get("notes", []), *section.get("notes", []))
    title = f"{file['paper']}; {section['where']}"
    return Published(title, file["round"], tuple(PublishedRow(**row) for row in rows), notes)
