"""Content digests of examples, an order of rows that depends only on content, and the hash of a partition."""

import hashlib
import json
from dataclasses import replace

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition

Digests = np.ndarray
"""[n, 2] uint64: 128 bits of BLAKE2b for each example."""


def row_digests(dataset: Dataset, rows: np.ndarray | slice = slice(None)) -> Digests:
    """Digest the stored values, targets, client and group of rows. The result is the same on every machine.

    Args:
        dataset: the data set.
        rows: row numbers or a slice.

    Returns:
        [n, 2] uint64.
    """
    x = np.ascontiguousarray((dataset.x if dataset.content is None else dataset.content)[rows])
    x = x.astype(x.dtype.newbyteorder("<"), copy=False)
    clients = dataset.clients if dataset.clients is not None else np.full(len(dataset.y), -1)
    y = dataset.y if dataset.y.ndim == 1 else np.zeros(len(dataset.y), np.int64)
    own = [y, clients] if dataset.groups is None else [y, clients, dataset.groups]
    tags, pairs = np.stack(own, axis=1)[rows].astype("<i8"), zip(x, dataset.y[rows], strict=True)
    parts = (a.data if dataset.y.ndim == 1 else a.tobytes() + b.tobytes() for a, b in pairs)
    tagged = zip(parts, tags, strict=True)
    digests = [hashlib.blake2b(part, digest_size=16, key=tag.tobytes()).digest() for part, tag in tagged]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def content_order(dataset: Dataset, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Return the row numbers start..stop-1 in the order of their content digests.

    Positions in this order select the same examples regardless of the stored order. Rows with equal content are
    interchangeable.

    Returns:
        [stop - start] int64, a permutation of the row numbers.
    """
    stop = len(dataset.y) if stop is None else stop
    digests = row_digests(dataset, slice(start, stop))
    return np.lexsort((digests[:, 1], digests[:, 0])).astype(np.int64) + start


def copied_rows(dataset: Dataset, partition: Partition) -> int:
    """Return how many test rows equal a training or validation row of any client, with the target."""
    digests = row_digests(replace(dataset, clients=None))[:, 0]
    used = np.concatenate((*partition.train, *partition.val))
    return int(np.isin(digests[np.concatenate(partition.test)], digests[used]).sum())


def partition_hash(dataset: Dataset, partition: Partition) -> str:
    """Return the first of `hashes`."""
    return hashes(dataset, partition)[0]


def hashes(dataset: Dataset, partition: Partition) -> tuple[str, str]:
    """Hash the examples of each client and split, and their shift; and the order of these examples.

    Examples are identified by content, so the stored order does not matter for the first hash; batches depend on it.
    Moving one example to another client or split, or changing one pixel, changes it.

    Returns:
        64 and 16 hexadecimal digits (SHA-256).
    """
    dataset, partition = partition.documents or (dataset, partition)
    digests, x = row_digests(dataset), dataset.x if dataset.content is None else dataset.content
    as_it_is = "|1.0" * (x.dtype == np.uint8 and dataset.scale == 1)  # bytes were divided by 255 in all other data
    total = hashlib.sha256(f"{x.dtype}|{x.shape[1:]}|{dataset.num_classes}{as_it_is}".encode())
    used = np.concatenate((*partition.train, *partition.val, *partition.test))
    order = hashlib.sha256(digests[np.sort(used)].tobytes() + digests[used].tobytes())
    for name in ("train", "val", "test"):
        for client, rows in enumerate(getattr(partition, name)):
            held = digests[rows]
            held = held[np.lexsort((held[:, 1], held[:, 0]))]
            total.update(f"|{name}|{client}|{len(rows)}|".encode())
            total.update(held.tobytes())
    if partition.shift.groups:
        total.update(json.dumps(partition.shift.record()).encode())
    return total.hexdigest(), order.hexdigest()[:16]
