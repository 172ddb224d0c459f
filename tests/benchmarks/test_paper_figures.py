"""The papers' values beside the experiments: every row has a command that can be run."""

import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from support import settings_of

from benchmarks.studies.paper import read_published, settings_of_rows
from pflsim.analysis.runs import settings_by_key
from pflsim.config.compose import CONFIGS

pytestmark = pytest.mark.slow

EXPERIMENTS = {p.stem for p in (CONFIGS / "experiment").glob("*.yaml")}
FILES = [tomllib.loads(p.read_text(encoding="utf-8")) for p in sorted((CONFIGS / "experiment").glob("*.toml"))]
WITHOUT_VALUES = {"fedalp_figure4", "fedfcd_figure5", "fedfcd_figure6", "fedfcd_figure7"}
WITHOUT_VALUES |= {*(f"pfedla_figure{n}" for n in (1, 5, 6, 7)), "pfedpm_figure3_femnist"}
PUBLISHED = sorted(EXPERIMENTS - WITHOUT_VALUES)


def test_every_experiment_has_its_values() -> None:
    found = [key for file in FILES for key, value in file.items() if isinstance(value, dict)]
    assert sorted(found) == PUBLISHED
    assert all(file["round"] in ("best_test_oracle", "best_val", "last") for file in FILES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_differ_and_their_values_are_percentages(name: str) -> None:
    rows = read_published(name).rows
    labels = [row.label for row in rows]
    assert labels and len(set(labels)) == len(labels)
    assert len({(row.command, row.model) for row in rows}) == len(rows)
    for row in rows:
        assert 20 < row.value < 100
        assert row.std is None or 0 < row.std < 12.5
        assert row.model in (None, "personal", "global")


def test_settings_of_rows_are_those_that_hydra_composes() -> None:
    rows = (*read_published("pfedcfr_table2_mnist").rows[1:4], *read_published("fedalp_table3").rows[:2])
    each = [settings_of(*shlex.split(row.command)) for row in rows]
    assert settings_of_rows(rows) == [settings_by_key(asdict(settings), settings.names) for settings in each]
    alpha = settings_of_rows((replace(rows[-1], command=f"{rows[-1].command} partition.alpha=7"),))
    assert alpha[0]["partition.alpha"] == 7


SAID = {"n": "partition.n", "α": "partition.alpha"}
"""What a label says of the partition: `FedAvg, n=3` is beside `pFedPM, n=3`."""


def data_settings(settings: Mapping[str, Any], label: str) -> dict[str, Any]:
    """What decides the clients' examples, without what the label says."""
    kinds = ("data", "shift", "clients", "partition", "split")
    found = {key: value for key, value in settings.items() if key.partition(".")[0] in kinds}
    for name, value in re.findall(r"(\w+)=([\d.]+)", label):
        if name in SAID:
            assert found.pop(SAID[name]) == float(value), label
    if settings["method"] == "fedfomo":  # needs validation examples, which the notes say
        assert found["split.validation"] == 0.1
        found["split.validation"] = 0
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: min(key for key in file if isinstance(file[key], dict)))
def test_rows_of_a_table_can_be_run_on_one_partition_and_split(file: dict[str, Any]) -> None:
    """Each row of a table for one of its experiments, in turn: their rows are alike."""
    names = [name for name in PUBLISHED if name in file]
    for number, name in enumerate(names):
        rows = read_published(name).rows[number :: len(names)]
        tables: dict[bool, dict[str, Any]] = {}
        for row, settings in zip(rows, settings_of_rows(rows), strict=True):
            found = data_settings(settings, row.label)
            assert tables.setdefault(row.label.endswith(", IID"), found) == found, (name, row.label)
