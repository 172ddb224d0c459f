"""A run read from its folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

from pflsim.errors import SettingsError
from pflsim.run_folder.folder import CONFIG
from pflsim.run_folder.history import RoundMetrics, read_history
from pflsim.run_folder.metrics import AccuracyStats, Model, Phase, Scope
from pflsim.run_folder.summary import Choice, chosen_round

PER_CLIENT = "per_client.csv"


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """Result of one model on one client's examples of a split; `loss` is the sum of their cross-entropy in nats."""

    correct: int
    total: int
    loss: float

    @property
    def rate(self) -> float:
        """Accuracy: correct / total."""
        return self.correct / self.total


@dataclass(frozen=True)
class Run:
    """The content of a run folder; the run may be incomplete.

    Args:
        folder: path of the run folder.
        config: config.yaml, the settings as nested mappings.
        summary: summary.json.
        history: the lines of metrics.jsonl.
        partition: partition.json.
        environment: environment.json; empty if the file is missing.
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
        """The method's name on the command line."""
        return self.summary["method"]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config["seed"]

    @property
    def complete(self) -> bool:
        """Whether all planned rounds are finished."""
        return self.summary.get("complete") is True

    @property
    def done(self) -> int:
        """The last finished round, from metrics.jsonl: a killed run does not update summary.json."""
        return self.history[-1].round if self.history else 0

    @property
    def partition_hash(self) -> str:
        """The hash of every client's examples."""
        return self.partition["hash"]

    @property
    def reported(self) -> Scope:
        """The scope that the method reports: the reported model at its phase, on test data."""
        return self.scope(cast(Model, self.summary["reported_model"]))

    def scope(self, model: Model, split: Literal["val", "test"] = "test") -> Scope:
        """Return the scope of a model at the phase at which it is evaluated."""
        phase = cast(Phase, self.summary["accuracy_of"]["phase"][model])
        return Scope(model, split, phase)

    def at(self, choice: Choice, model: Model | None = None) -> RoundMetrics | None:
        """Return the round of a choice for a model (default: the reported model); None if there is no such round."""
        scope = self.reported if model is None else self.scope(model)
        return chosen_round(self.history, scope.model, scope.phase, choice)

    def stats(self, choice: Choice, model: Model | None = None) -> AccuracyStats | None:
        """Return test accuracy over clients in the round of a choice; None if there is no such round."""
        line = self.at(choice, model)
        return None if line is None else line.accuracy[self.reported if model is None else self.scope(model)]

    def counts(self, round_number: int, scope: Scope | None = None) -> dict[int, ClientCounts]:
        """Return every client's result in a round; the default scope is the reported model on test data.

        Clients without examples of the split are left out.
        """
        wanted, found = scope or self.reported, {}
        header, rows = self._rows
        with _reading(self.folder / PER_CLIENT):
            for row in csv.DictReader([header, *rows.get(str(round_number), [])]):
                if (row["model"], row["split"], row["phase"]) == wanted and int(row["total"]) > 0:
                    found[int(row["client"])] = ClientCounts(int(row["correct"]), int(row["total"]), float(row["loss"]))
        return found

    @cached_property
    def _rows(self) -> tuple[str, dict[str, list[str]]]:
        """The header of per_client.csv and its unparsed lines by round, without an incomplete last line."""
        with _reading(self.folder / PER_CLIENT):
            text = (self.folder / PER_CLIENT).read_text(encoding="utf-8")
        header, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
        return header, {number: list(rows) for number, rows in groupby(lines, lambda line: line.partition(",")[0])}


def read_run(folder: Path) -> Run:
    """Read a run folder; the run may still be running or may have been stopped.

    Raises:
        SettingsError: the folder is no run folder, has no finished round, or a file in it cannot be read.
    """
    import yaml

    if not folder.is_dir():
        raise SettingsError(f"{folder}: no such folder")
    if not (folder / CONFIG).is_file():
        raise SettingsError(f"{folder} is not a run folder: it has no {CONFIG}")
    config = _read(folder / CONFIG, yaml.safe_load)
    if not (folder / "metrics.jsonl").is_file():
        raise SettingsError(f"{folder}: this run has not finished a round yet")
    summary = _read(folder / "summary.json", json.loads)
    environment = _read(folder / "environment.json", json.loads) if (folder / "environment.json").is_file() else {}
    partition = _read(folder / "partition.json", json.loads)
    with _reading(folder / "metrics.jsonl"):
        history = tuple(read_history(folder))
    return Run(folder, config, summary, history, partition, environment)


def _read(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    with _reading(path):
        content = parse(path.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise TypeError("expected a mapping")
    return content


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise errors in the content of a file as a `SettingsError` that names the file."""
    import yaml

    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
