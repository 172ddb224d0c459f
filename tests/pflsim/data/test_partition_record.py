"""partition.json and partition.png, and the YAML files of this part."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pflsim.data import partitions, splits
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federate import federate
from pflsim.data.record import partition_figure, write_partition


def made(n=600, classes=10):
    x = np.random.default_rng(0).integers(0, 256, (n, 1, 2, 2)).astype(np.uint8)
    return Dataset("made", x, np.arange(n) % classes, classes, n * 3 // 4)


def test_record_says_who_holds_what(tmp_path):
    data = made()
    partition = federate(data, partitions.classes_per_client, splits.official, 6, 0)
    names = {"partition": "classes_per_client", "split": "official", "shift": ""}
    digest = write_partition(tmp_path / "run", data, partition, names)
    text = (tmp_path / "run" / "partition.json").read_text()
    record = json.loads(text)
    assert record["hash"] == digest == partition_hash(data, partition)
    assert (record["data"], record["partition"], record["split"]) == ("made", "classes_per_client", "official")
    assert record["clients"] == 6 and record["classes"] == 10 and len(record["class_counts"]) == 6
    for client, row in enumerate(record["class_counts"]):
        assert row["client"] == client
        for split in ("train", "val", "test"):
            rows = getattr(partition, split)[client]
            assert row[split] == [int((data.y[rows] == c).sum()) for c in range(10)]
    assert record["examples"]["train"] == sum(map(len, partition.train))
    assert [record[split] for split in ("train", "val", "test")] == [
        [rows.tolist() for rows in getattr(partition, split)] for split in ("train", "val", "test")
    ]
    assert len(text.splitlines()) < 4 * 6 + 25


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (500, 100)])
def test_picture_is_small_and_not_blank(tmp_path, clients, classes):
    counts = np.random.default_rng(0).integers(0, 900, (clients, classes)) * (np.arange(classes) % 3 > 0)
    path = tmp_path / "p.png"
    partition_figure({"train": counts, "val": counts // 9, "test": counts // 4}, "made").savefig(path, dpi=100)
    assert 2_000 < path.stat().st_size < 200_000
    with Image.open(path) as image:
        assert 400 <= image.width <= 1600 and 300 <= image.height <= 1200


def test_sources_import_heavy_libraries_only_when_used():
    heavy = {"torchvision", "sklearn", "PIL", "matplotlib", "pandas"}
    for path in (Path(__file__).parents[3] / "pflsim" / "data").rglob("*.py"):
        at_once = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not heavy & {*at_once}, path
