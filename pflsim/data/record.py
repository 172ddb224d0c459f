"""Writes partition.json and partition.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, class_counts
from pflsim.types import SPLITS, Split


def write_partition(
    folder: Path, dataset: Dataset, partition: Partition, *, partition_name: str = "", split_name: str = ""
) -> str:
    """Write partition.json (hash, names, sizes, class counts and rows per client) and partition.png.

    The rows count through the training part and then the test part, so partition.json is a file for
    `pflsim.data.explicit`.

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
    class_counts_by_client = [
        json.dumps({"client": i} | {name: c[i].tolist() for name, c in counts.items()})
        for i in range(partition.clients)
    ]
    lists = {"class_counts": class_counts_by_client} | {
        name: [json.dumps(rows.tolist(), separators=(",", ":")) for rows in getattr(partition, name)] for name in SPLITS
    }
    (folder / "partition.json").write_text(_to_json({**head, "numbering": "all"}, lists), encoding="utf-8")
    title = ", ".join(part for part in (dataset.name, partition_name, split_name) if part)
    draw_partition(folder / "partition.png", counts, title)
    return digest


def _size_summary(sizes: np.ndarray) -> dict[str, float]:
    return {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())}


def _to_json(head: Mapping[str, object], lists: Mapping[str, Sequence[str]]) -> str:
    """Return JSON with one line per key of `head`, and one per item of each list; the items are JSON."""
    items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    items += [f"{json.dumps(key)}: [\n    " + ",\n    ".join(lines) + "\n  ]" for key, lines in lists.items()]
    return "{\n  " + ",\n  ".join(items) + "\n}\n"
