"""Partitions data without a run: `pflsim partition data=... clients=... into=FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from pflsim.config.settings import Settings
from pflsim.data.dataset import dataset_warnings
from pflsim.data.federate import load_federation
from pflsim.data.record import record_names, sizes, write_partition
from pflsim.errors import RunError


def make_partition(settings: Settings, folder: Path) -> None:
    """Partition the data, write partition.json and partition.png, and print the sizes.

    Raises:
        SettingsError: the data cannot be loaded or partitioned.
        RunError: the folder cannot be written.
    """
    dataset, partition = load_federation(settings)
    for warning in dataset_warnings(dataset):
        print(f"warning: {warning}", file=sys.stderr)
    try:
        write_partition(folder, dataset, partition, **record_names(settings))
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}") from error
    print(f"{sizes(dataset, partition)}\nwritten: {folder / 'partition.json'}, {folder / 'partition.png'}")
