"""Writes partition.json and partition.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.config.components import component_name
from pflsim.config.settings import Settings
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, class_counts
from pflsim.data.shifts import Shift
from pflsim.types import SPLITS, Split


def write_partition(
    folder: Path,
    dataset: Dataset,
    partition: Partition,
    *,
    partition_name: str = "",
    split_name: str = "",
    shift_name: str = "",
) -> str:
    """Write partition.json (hash, names, sizes, inputs, class counts and rows per client, its shift) and partition.png.

    The rows count through the training part and then the test part, so partition.json is a file for
    `pflsim.data.explicit`.

    Args:
        folder: the output folder; created if missing.
        dataset: the data set.
        partition: its partition.
        partition_name: the partition rule with its settings, e.g. "dirichlet(alpha=0.1)".
        split_name: the split rule with its settings.
        shift_name: the shift rule with its settings; "" if there is none.

    Returns:
        The partition's hash.
    """
    from pflsim.data.picture import draw_partition

    folder.mkdir(parents=True, exist_ok=True)
    digest = partition_hash(dataset, partition)
    counts: dict[Split, np.ndarray] = {name: class_counts(dataset, partition, name) for name in SPLITS}
    clients = range(partition.clients)
    head = {
        "hash": digest,
        "data": dataset.name,
        "partition": partition_name,
        "split": split_name,
        "clients": len(clients),
        "classes": dataset.num_classes,
        "examples": {name: int(c.sum()) for name, c in counts.items()},
        "per_client": {name: _size_summary(c.sum(axis=1)) for name, c in counts.items()},
        "numbering": "all",
        "inputs": {
            "shape": dataset.input_shape,
            "dtype": dataset.x.dtype.name,
            **{name: getattr(dataset, name) for name in ("scale", "mean", "std", "tokens")},
        },
    }
    if partition.shift.groups:
        head["shift"] = {"name": shift_name, **partition.shift.record()}
        head["unshifted_hash"] = partition_hash(dataset, replace(partition, shift=Shift()))
    lists = {"class_counts": [{"client": i} | {name: c[i].tolist() for name, c in counts.items()} for i in clients]}
    lists |= {name: [rows.tolist() for rows in getattr(partition, name)] for name in SPLITS}
    (folder / "partition.json").write_text(_to_json(head, lists), encoding="utf-8")
    title = ", ".join(part for part in (dataset.name, partition_name, split_name, shift_name) if part)
    draw_partition(folder / "partition.png", counts, title, partition.shift.groups)
    return digest


def sizes(dataset: Dataset, partition: Partition) -> str:
    """Return a table of the examples and classes per client, in a few lines."""
    counts = {name: class_counts(dataset, partition, name) for name in SPLITS}
    columns = {f"{name} examples": c.sum(axis=1) for name, c in counts.items()}
    columns["classes"] = ((counts["train"] + counts["val"]) > 0).sum(axis=1)
    lines = [f"{f'{partition.clients} clients':<16}{'min':>8}{'median':>8}{'max':>8}{'sum':>9}"]
    for name, each in columns.items():
        total = "" if name == "classes" else each.sum()
        lines.append(f"{name:<16}{each.min():>8}{np.median(each):>8g}{each.max():>8}{total:>9}")
    return "\n".join([*lines, f"hash {partition_hash(dataset, partition)}"])


def _size_summary(sizes: np.ndarray) -> dict[str, float]:
    return {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())}


def _to_json(head: Mapping[str, object], lists: Mapping[str, Sequence[object]]) -> str:
    """Return JSON with one line per key of `head` and per item of each list."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, items in lists.items():
        lines = ",\n    ".join(json.dumps(item, separators=(",", ":")) for item in items)
        parts.append(f"{json.dumps(key)}: [\n    {lines}\n  ]")
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def describe(settings: Settings, group: str) -> str:
    """Return a component with its settings: `dirichlet(alpha=0.1)`."""
    node: Mapping[str, Any] = getattr(settings, group)
    chosen = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
    name = component_name(settings, group)
    return f"{name}({chosen})" if chosen else name


def record_names(settings: Settings) -> dict[str, str]:
    """Return the names of partition, split and shift for partition.json; given rows need no split."""
    split = "" if component_name(settings, "partition") == "explicit" else describe(settings, "split")
    shift = "" if component_name(settings, "shift") == "none" else describe(settings, "shift")
    return {"partition_name": describe(settings, "partition"), "split_name": split, "shift_name": shift}
