"""Writes small files in the formats of the data sources."""

from __future__ import annotations

import bz2
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

PARTS = {"train": 6, "test": 4}
IDX = {
    "MNIST": ("train", "t10k"),
    "FashionMNIST": ("train", "t10k"),
    "EMNIST": ("emnist-letters-train", "emnist-letters-test"),
}


def write(root: Path) -> dict[str, list[str]]:
    """Write files for each data source that reads files; return the settings that load them, by its name."""
    rng = np.random.default_rng(0)

    def pixels(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, shape).astype(np.uint8)

    def put(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def idx(path: Path, array: np.ndarray) -> None:
        put(path, bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes())

    def batch(path: Path, n: int, **labels: Any) -> None:
        put(path, pickle.dumps({"data": pixels(n, 3072), **labels}, protocol=2))

    def archive(path: Path, *shape: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {f"x_{part}": pixels(n, *shape) for part, n in PARTS.items()}
        arrays |= {f"y_{part}": np.arange(n) % 3 for part, n in PARTS.items()}
        np.savez(path, **arrays)

    for part, n in {"usps.bz2": 6, "usps.t.bz2": 4}.items():
        lines = [" ".join([str(i + 1), *map("1:{}".format, np.linspace(-1, 1, 256))]) for i in range(n)]
        put(root / part, bz2.compress("\n".join(lines).encode()))
    for folder, stems in IDX.items():
        for stem, n in zip(stems, PARTS.values(), strict=True):
            idx(root / folder / "raw" / f"{stem}-images-idx3-ubyte", pixels(n, 4, 5))
            idx(root / folder / "raw" / f"{stem}-labels-idx1-ubyte", np.arange(1, n + 1, dtype=np.uint8))
    ten, hundred = root / "cifar-10-batches-py", root / "cifar-100-python"
    for i in range(1, 6):
        batch(ten / f"data_batch_{i}", 2, labels=[i, i + 1])
    batch(ten / "test_batch", 3, labels=[0, 8, 9])
    put(ten / "batches.meta", pickle.dumps({"label_names": [*"abcdefghij"]}))
    put(hundred / "meta", pickle.dumps({"fine_label_names": [*map(str, range(100))]}))
    archive(root / "packed" / "cifar10.npz", 32, 32, 3)
    archive(root / "images.npz", 5, 7)
    for part, n in PARTS.items():
        batch(hundred / part, 2, fine_labels=[99, 0], coarse_labels=[19, 1])
        users = {f"f{i}": {"x": (pixels(n, 784) / 255).tolist(), "y": [*range(i, i + n)]} for i in (2, 1)}
        leaf = {"users": [*users], "num_samples": [n, n], "user_data": users}
        put(root / "femnist" / part / "all_data_0.json", json.dumps(leaf).encode())
        for name in ("cat", "ant"):
            (root / "pictures" / part / name).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(pixels(6, 8, 3)).save(root / "pictures" / part / name / f"{i}.png")
    rows = [f"{['yes', 'no'][i % 2]},client {i % 6},{i or ''},{'xyz'[i % 3]}\n" for i in range(60)]
    put(root / "table.csv", "".join(["label,client,age,ward\n", *rows]).encode())
    put(
        root / "texts.csv",
        "".join(["text,label\n", *(f"note {i} {'xyz'[i % 3]},{i % 2}\n" for i in range(20))]).encode(),
    )
    for part, n in PARTS.items():
        savemat(root / f"{part}_32x32.mat", {"X": pixels(32, 32, 3, n), "y": np.arange(1, n + 1)[:, None]})
    at = f"data.root={root}"
    found = {name: [at] for name in ("mnist", "fashion_mnist", "cifar10", "cifar100", "femnist", "usps", "svhn")}
    found["table"] = [f"data.path={root}/table.csv", "data.label=label", "data.client=client"]
    found["text"] = [f"data.path={root}/texts.csv"]
    found["domains"] = [at, "data.sources=[mnist,usps,digits]"]
    return found | {
        "emnist": [at, "data.split=letters"],
        "cifar10 npz": [f"{at}/packed"],
        "cifar100 coarse": [at, "data.coarse=true"],
        "image_folder": [f"{at}/pictures", "data.size=4"],
        "npz": [f"data.path={root}/images.npz"],
    }
