"""Writes partition.json, and partition.png, its picture."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tabulate import tabulate

from pflsim.config.components import component_name, foreign
from pflsim.config.settings import Settings
from pflsim.data.content import partition_hash
from pflsim.data.dataset import BINS, Dataset, dataset_warnings
from pflsim.data.federated import Partition, class_counts
from pflsim.data.shifts import Shift
from pflsim.display.pictures import drawing, partition_figure
from pflsim.errors import SettingsError, reading
from pflsim.records.files import FORM, valid
from pflsim.types import SPLITS, Split

DATA_CARD = "data_card.json"
ENCODER, TOKENIZER, PICKLED = "encoder.json", "tokenizer", "encoder.joblib"
"""What maps the rows of a table or texts to inputs, and the folder of its tokenizer of transformers; runs of earlier
versions have a pickle."""
MAX_ROWS = 100_000
"""Test rows of a table up to which scores are recorded unless `tracking.predictions` is given."""


def write_partition(
    folder: Path, dataset: Dataset, partition: Partition, names: Mapping[str, str], task: dict[str, Any] | None = None
) -> str:
    """Write partition.json (hash, names, sizes, inputs, class counts and rows per client, its shift) and partition.png.

    The rows count through the file of the training part and then that of the test part, so partition.json is a file for
    `pflsim.data.explicit`. data_card.json says what was read, if the data set has a card.

    Args:
        folder: the output folder; created if missing.
        dataset: the data set.
        partition: its partition.
        names: `partition`, `split` and `shift` with their settings, see `record_names`.
        task: `Task.record` of the run.

    Returns:
        The partition's hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest, whole = partition_hash(dataset, partition), dataset
    dataset, partition = partition.documents or (dataset, partition)
    counts: dict[Split, np.ndarray] = {name: class_counts(dataset, partition, name) for name in SPLITS}
    clients = range(partition.clients)
    inputs = {name: getattr(whole, name) for name in ("scale", "mean", "std", "tokens", "fields")}
    head = {
        "hash": digest,
        "data": dataset.name,
        "partition": names["partition"],
        "split": names["split"],
        "clients": len(clients),
        "classes": dataset.by_class().num_classes,
        "examples": {name: int(c.sum()) for name, c in counts.items()},
        "numbering": "file",
        "inputs": {"shape": whole.input_shape, "dtype": whole.x.dtype.name, **inputs},
    }
    if task:
        head["task"] = task
    if partition.names:
        head["names"] = list(partition.names)
    if whole.language:
        text = json.dumps([digest, sorted(whole.encoder.known.items())])
        head["vocabulary"] = blake2b(text.encode(), digest_size=16).hexdigest()
    if dataset.values:
        head["values"] = [str(value) for value in dataset.values]
    if partition.shift.groups:
        head["shift"] = {"name": names["shift"], **partition.shift.record()}
        head["unshifted_hash"] = partition_hash(dataset, replace(partition, shift=Shift()))
    head["class_counts"] = [{"client": i} | {name: c[i].tolist() for name, c in counts.items()} for i in clients]
    numbers = np.arange(len(dataset.y)) if dataset.rows is None else dataset.rows
    head |= {name: [numbers[rows].tolist() for rows in getattr(partition, name)] for name in SPLITS}
    lines = ",\n  ".join(f"{json.dumps(key)}: {_line_by_line(value)}" for key, value in head.items())
    (folder / "partition.json").write_text(f"{{\n  {lines}\n}}\n", encoding="utf-8")
    title = ", ".join(filter(None, (dataset.name, names["partition"], names["split"], names["shift"])))
    if whole.card.lines:
        text = json.dumps(whole.card.record(), indent=1, ensure_ascii=False)
        (folder / DATA_CARD).write_text(f"{text}\n", encoding="utf-8")
    encoder = whole.encoder
    if (tokenizer := getattr(encoder, "tokenizer", None)) is not None:
        tokenizer.save_pretrained(folder / TOKENIZER)
        encoder = replace(encoder, tokenizer=None)
    if encoder is not None:
        text = json.dumps(asdict(encoder), ensure_ascii=False)
        (folder / ENCODER).write_text(text, encoding="utf-8")
    with drawing():
        figure = partition_figure(counts, title, partition.shift.groups, partition.names)
        figure.savefig(folder / "partition.png", dpi=100)
    return digest


def recorded_rows(asked: bool | Literal["auto"], dataset: Dataset, partition: Partition) -> tuple[np.ndarray, ...]:
    """Return the numbers of each client's test rows in the user's files; () if their scores are not recorded."""
    if not (dataset.kind == "tables" and sum(map(len, partition.test)) <= MAX_ROWS if asked == "auto" else asked):
        return ()
    return partition.test if dataset.rows is None else tuple(dataset.rows[own] for own in partition.test)


def read_encoder(folder: Path) -> Any:
    """Return the encoder of a run of a table or of texts; None: the data are neither.

    Raises:
        SettingsError: it cannot be read, or it is a pickle, as in the folders of earlier versions, and not trusted.
    """
    from pflsim.data.sources.table import Encoder, Fitted
    from pflsim.data.sources.text_encoder import TextEncoder, tokenizer_of

    if (file := folder / ENCODER).exists():
        with reading(file, FORM):
            found: Any = valid(Encoder | TextEncoder, json.loads(file.read_text(encoding="utf-8")))
        if (tokenizer := folder / TOKENIZER).is_dir():
            found = replace(found, tokenizer=tokenizer_of(str(tokenizer)))
        return found
    if not (file := folder / PICKLED).exists():
        return None
    foreign(f"{PICKLED}, a pickle")
    import joblib

    with reading(file, FORM):
        found = joblib.load(file)
    if isinstance(found, Encoder):  # of an earlier version, with transformers of scikit-learn
        found = replace(found, fitted=[each if isinstance(each, Fitted) else Fitted.of(each) for each in found.fitted])
    return found


def write_federation(settings: Settings, folder: Path) -> tuple[Dataset, Partition]:
    """Load and partition the data of a run, write the partition to a folder, and print warnings about the data.

    Raises:
        SettingsError: see `load_federation`, or the folder has a partition.
    """
    from pflsim.data.federate import load_federation

    if (folder / "partition.json").exists():
        raise SettingsError(f"{folder} has a partition.json, and files are not overwritten; give another into=FOLDER")
    dataset, partition = load_federation(settings)
    if dataset.card.lines:
        print(dataset.card)
    for warning in dataset_warnings(dataset):
        print(f"warning: {warning}", file=sys.stderr)
    write_partition(folder, dataset, partition, record_names(settings))
    return dataset, partition


def sizes(dataset: Dataset, partition: Partition) -> str:
    """Return a table of the examples and classes per client, in a few lines."""
    counts = {name: class_counts(dataset, partition, name) for name in SPLITS}
    columns = {f"{name} examples": c.sum(axis=1) for name, c in counts.items()}
    columns["classes"] = ((counts["train"] + counts["val"]) > 0).sum(axis=1)
    lines = [[name, each.min(), np.median(each), each.max(), each.sum()] for name, each in columns.items()]
    table = tabulate(lines, (f"{partition.clients} clients", "min", "median", "max", "sum"), "plain")
    return f"{table}\nhash {partition_hash(dataset, partition)}"


def record_names(settings: Settings) -> dict[str, str]:
    """Return partition, split and shift with their settings: `dirichlet(alpha=0.1)`.

    Given rows need no split, so its name is "", as that of no shift.
    """
    names = {group: component_name(settings, group) for group in ("partition", "split", "shift")}
    if names["partition"] == "explicit":
        names["split"] = ""
    if names["shift"] == "none":
        names["shift"] = ""
    for group, name in names.items():
        asked = getattr(settings, group).items()
        given = {key: value for key, value in asked if not key.startswith("_") and value is not None}
        if given.get("bins") == BINS:  # of regression only
            del given["bins"]
        chosen = ", ".join(f"{key}={value}" for key, value in given.items())
        names[group] = f"{name}({chosen})" if name and chosen else name
    return names


def _line_by_line(value: object) -> str:
    """Return JSON: a list of lists or mappings with one line per item."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n  ]"
