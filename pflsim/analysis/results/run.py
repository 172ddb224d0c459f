"""A run as its folder tells it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pflsim.errors import SettingsError
from pflsim.run_folder.folder import CONFIG
from pflsim.run_folder.history import RoundMetrics, read_history
from pflsim.run_folder.metrics import AccuracyStats, Model, Phase, Scope
from pflsim.run_folder.summary import Choice, chosen_round

PER_CLIENT = "per_client.csv"
CHOICES: tuple[Choice, ...] = get_args(Choice)
"""The rounds that a figure may be taken from; the first is the headline's where the run has validation data."""


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """How one model did on one client's examples of a split; `loss` is the sum of their cross-entropy in nats."""

    correct: int
    total: int
    loss: float

    @property
    def rate(self) -> float:
        """The share of examples classified rightly."""
        return self.correct / self.total


@dataclass(frozen=True)
class Run:
    """What a run folder holds, complete or not.

    Args:
        folder: where it is.
        config: config.yaml, the settings as nested mappings.
        summary: summary.json; empty where the run was killed before it could write one.
        history: the lines of metrics.jsonl.
        partition: partition.json.
        environment: environment.json; empty where there is none.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    history: tuple[RoundMetrics, ...]
    partition: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        """What the method was called on the command line."""
        return self.summary["method"]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config["seed"]

    @property
    def complete(self) -> bool:
        """Whether all planned rounds are done."""
        return self.summary.get("complete") is True

    @property
    def done(self) -> int:
        """The last round that is done; summary.json is written at a stop, and has none of a run that was killed."""
        return self.history[-1].round if self.history else 0

    @property
    def partition_hash(self) -> str:
        """The hash of every client's examples."""
        return self.partition["hash"]

    @property
    def reported(self) -> Scope:
        """The model that the method is judged by, when it is judged, on test data."""
        return self.scope(cast(Model, self.summary["reported_model"]))

    def scope(self, model: Model, split: Literal["val", "test"] = "test") -> Scope:
        """Where a model's figures are."""
        phase = cast(Phase, self.summary["accuracy_of"]["phase"][model])
        return Scope(model, split, phase)

    def at(self, choice: Choice, model: Model | None = None) -> RoundMetrics | None:
        """The round that a figure is taken from, for the judged model or another; None where there is no such round."""
        scope = self.reported if model is None else self.scope(model)
        return chosen_round(self.history, scope.model, scope.phase, choice)

    def stats(self, choice: Choice, model: Model | None = None) -> AccuracyStats | None:
        """Test accuracy over clients in that round."""
        line = self.at(choice, model)
        return None if line is None else line.accuracy[self.reported if model is None else self.scope(model)]

    def counts(self, round_number: int, scope: Scope | None = None) -> dict[int, ClientCounts]:
        """How every client's model did in a round; without a scope, the judged one on test data.

        Clients without examples of the split are left out, as they are from every figure.
        """
        wanted, found = scope or self.reported, {}
        header, rows = self._rows
        try:
            for row in csv.DictReader([header, *rows.get(str(round_number), [])]):
                if (row["model"], row["split"], row["phase"]) == wanted and int(row["total"]) > 0:
                    found[int(row["client"])] = ClientCounts(int(row["correct"]), int(row["total"]), float(row["loss"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{self.folder / PER_CLIENT} cannot be read: {_first_line(error)}") from error
        return found

    @cached_property
    def _rows(self) -> tuple[str, dict[str, list[str]]]:
        """The header of per_client.csv and its lines by round, unread; a last one that was cut off is left out."""
        try:
            text = (self.folder / PER_CLIENT).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SettingsError(f"{self.folder / PER_CLIENT} cannot be read: {_first_line(error)}") from error
        header, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
        return header, {number: list(rows) for number, rows in groupby(lines, lambda line: line.partition(",")[0])}


def read_run(folder: Path) -> Run:
    """Read a run folder; the run may be going on, or have been stopped.

    Raises:
        SettingsError: it is no run folder, or a file in it cannot be read; says which.
    """
    import yaml

    if not folder.is_dir():
        raise SettingsError(f"{folder}: there is no such folder")
    if not (folder / CONFIG).is_file():
        raise SettingsError(f"{folder} is no run folder, for it has no {CONFIG}")
    config = _read(folder / CONFIG, yaml.safe_load)
    if not (folder / "metrics.jsonl").is_file():
        raise SettingsError(f"{folder}: no round of this run is done yet")
    summary = _read(folder / "summary.json", json.loads)
    environment = _read(folder / "environment.json", json.loads) if (folder / "environment.json").is_file() else {}
    partition = _read(folder / "partition.json", json.loads)
    try:
        history = tuple(read_history(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{folder / 'metrics.jsonl'} cannot be read: {_first_line(error)}") from error
    return Run(folder, config, summary, history, partition, environment)


def _read(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    import yaml

    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, Mapping):
        raise SettingsError(f"{path} is not what a run writes")
    return content


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
