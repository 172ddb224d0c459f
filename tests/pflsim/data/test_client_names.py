"""Clients that have names in the data: every output shows them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import events

import pflsim
from pflsim.config.names import nearest, unknown_key
from pflsim.data.dataset import Dataset
from pflsim.errors import RunError, SettingsError
from pflsim.records.per_client import complete_rounds
from pflsim.records.trace import read_matrices

HOSPITALS = ("Bern", "Oslo", "St. Mary, London")
SMALL: dict[str, Any] = {
    "clients": 3, "partition": "by_client", "split": "merged", "model": "tabular_mlp", "rounds": 1,
    "executor": "inline", "progress": "none", "tracking": {"per_client": True},
}  # fmt: skip


def visits() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 2, 60)
    return Dataset("visits", x, y, 2, 60, clients=np.array(HOSPITALS)[rng.permutation(60) % 3])


def test_every_output_names_the_clients(here: Path) -> None:
    run = pflsim.run(method="fedamp", data=visits(), run_dir="run", **SMALL)
    with Path("run/per_client.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["client"], row["name"]) for row in rows} == {*zip("012", HOSPITALS, strict=True)}
    assert {*run.per_client()["name"]} == {*HOSPITALS} and len(complete_rounds(Path("run"))) == 1
    assert any(tag.startswith("client/St. Mary, London/") for tag in events(Path("run")).Tags()["scalars"])
    matrices = read_matrices(Path("run"))
    assert matrices and {m.rows.names for m in matrices.matrices if m.rows.label == "receiver"} == {HOSPITALS}
    page = pflsim.report(run).read_text()
    assert page.count("St. Mary, London") >= 2, "in the bars of clients and in the partition"
    assert pflsim.load_model(run, client="Oslo").about["client"] == 1
    with pytest.raises(SettingsError, match="Osla.*Oslo"):
        pflsim.load_model(run, client="Osla")


def test_errors_name_the_client(here: Path) -> None:
    with pytest.raises(RunError, match=r"client \d \((Bern|St\. Mary, London|Oslo)\) failed"):
        pflsim.run(method="fedavg", data=visits(), lr=1e30, local_epochs=5, lockstep=False, **SMALL)


def test_old_names_are_refused_with_the_new_ones() -> None:
    assert "did you mean by_client?" in nearest("by_writer", ["iid", "by_client"])
    assert "partition.ids_per_client?" in unknown_key("partition.writers_per_client", ["partition.ids_per_client"])
    with pytest.raises(SettingsError, match=r"clients="):
        Dataset("d", np.zeros((2, 2), np.float32), np.zeros(2, np.int64), 1, 2, writers=np.zeros(2))
