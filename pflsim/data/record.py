"""Writes partition.json and partition.png."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, class_counts
from pflsim.types import Split

SPLITS: tuple[Split, ...] = ("train", "val", "test")


def write_partition(
    folder: Path, dataset: Dataset, partition: Partition, *, partition_name: str = "", split_name: str = ""
) -> str:
    """Write partition.json (hash, names, sizes and class counts per client) and partition.png.

    Args:
        folder: the output folder; created if missing.
        dataset: the data set.
        partition: its partition.
        partition_name: the partition rule with its settings, e.g. "dirichlet(alpha=0.1)".
        split_name: the split rule with its settings.

    Returns:
        The partition's hash.
    """
    from pflsim.data.picture import draw_partition

    folder.mkdir(parents=True, exist_ok=True)
    digest = partition_hash(dataset, partition)
    counts: dict[Split, np.ndarray] = {name: class_counts(dataset, partition, name) for name in SPLITS}
    head = {
        "hash": digest,
        "data": dataset.name,
        "partition": partition_name,
        "split": split_name,
        "clients": partition.clients,
        "classes": dataset.num_classes,
        "examples": {name: int(c.sum()) for name, c in counts.items()},
        "per_client": {name: _size_summary(c.sum(axis=1)) for name, c in counts.items()},
    }
    (folder / "partition.json").write_text(_to_json(head, counts), encoding="utf-8")
    title = ", ".join(part for part in (dataset.name, partition_name, split_name) if part)
    draw_partition(folder / "partition.png", counts, title)
    return digest


def _size_summary(sizes: np.ndarray) -> dict[str, float]:
    return {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())}


def _to_json(head: dict[str, object], counts: dict[Split, np.ndarray]) -> str:
    """Return JSON with one line per key and per client; counts[c] is the number of examples of class c."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    clients = range(len(counts["train"]))
    rows = [json.dumps({"client": i} | {name: c[i].tolist() for name, c in counts.items()}) for i in clients]
    return "{\n" + "\n".join(lines) + '\n  "class_counts": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"
