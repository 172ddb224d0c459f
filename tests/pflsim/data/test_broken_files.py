"""Data files that are damaged or wrong are refused with one line, never with another error."""

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support import refusing

from pflsim.data.dataset import Dataset
from pflsim.data.sources import femnist, image_folder, npz
from pflsim.data.sources.torchvision_sets import cifar10, cifar100, emnist, mnist
from pflsim.errors import SettingsError


def npz_bytes(**changes: Any) -> bytes:
    arrays = {
        "x_train": np.arange(6 * 12, dtype=np.uint8).reshape(6, 3, 4),
        "y_train": np.arange(6) % 3,
        "x_test": np.zeros((4, 3, 4), np.uint8),
        "y_test": np.arange(4) % 3,
    }
    file = io.BytesIO()
    np.savez(file, **(arrays | changes))
    return file.getvalue()


def leaf(x: Any = None, y: Any = None) -> dict[str, Any]:
    data = {"x": [[0.0] * 784] if x is None else x, "y": [3] if y is None else y}
    return {"users": ["a"], "user_data": {"a": data}}


def image_bytes(suffix: str) -> bytes:
    file = io.BytesIO()
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    Image.fromarray(pixels).save(file, format={"jpg": "jpeg", "tif": "tiff", "ppm": "ppm"}.get(suffix, suffix))
    return file.getvalue()


def load_npz(root: Path, content: bytes) -> Dataset:
    (root / "bad.npz").write_bytes(content)
    return npz.load(path=str(root / "bad.npz"))


def load_femnist(root: Path, content: bytes) -> Dataset:
    for part, data in (("train", content), ("test", json.dumps(leaf()).encode())):
        (root / part).mkdir(exist_ok=True)
        (root / part / "all.json").write_bytes(data)
    return femnist.load(root=str(root))


def load_images(root: Path, content: bytes, suffix: str = "png") -> Dataset:
    for name in ("cat", "dog"):
        (root / suffix / name).mkdir(parents=True, exist_ok=True)
        (root / suffix / name / "good.png").write_bytes(image_bytes("png"))
    (root / suffix / "cat" / f"bad.{suffix}").write_bytes(content)
    return image_folder.load(root=str(root / suffix), size=4)


SUFFIXES = ("png", "jpg", "bmp", "gif", "webp", "ppm", "tif")
IMAGES = st.sampled_from([(partial(load_images, suffix=suffix), image_bytes(suffix)) for suffix in SUFFIXES])
ARRAYS, TEXT = (load_npz, npz_bytes()), (load_femnist, json.dumps(leaf()).encode())


@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.just(ARRAYS), st.just(TEXT), IMAGES),
    st.sampled_from(["cut", "over", "add"]),
    st.floats(0, 0.999),
    st.binary(min_size=1, max_size=8),
)
def test_damaged_files_are_loaded_or_refused(
    tmp_path: Path, kind: tuple[Callable[[Path, bytes], Dataset], bytes], how: str, share: float, other: bytes
) -> None:
    """Any byte changed, anything cut off or put in."""
    load, good = kind
    at = int(len(good) * share)
    bad = good[:at] if how == "cut" else good[:at] + other + good[at + len(other) * (how == "over") :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            data = load(tmp_path, bad)
        except SettingsError:
            return
    assert data.x.size and len(data.x) == len(data.y) and 0 <= data.y.min() <= data.y.max() < data.num_classes
    assert data.x.dtype == np.uint8 or np.isfinite(data.x).all()


def member(name: str, content: bytes) -> bytes:
    """A good archive with one array's bytes replaced."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz_bytes())) as good, zipfile.ZipFile(file, "w") as made:
        for info in good.infolist():
            made.writestr(info.filename, content if info.filename == name else good.read(info))
    return file.getvalue()


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("load", "content", "key"),
    [
        (load_npz, npz_bytes(x_train=np.full((6, 3, 4), 1e300), x_test=np.zeros((4, 3, 4))), "bad"),
        (load_npz, npz_bytes(x_train=np.zeros((6, 3, 4), complex)), "x_train"),
        (load_npz, npz_bytes(x_train=np.zeros((6, 3, 4), bool)), "x_train"),
        (load_npz, npz_bytes(y_train=np.full(6, 2**64 - 1, np.uint64)), "labels"),
        (load_npz, npz_bytes(y_train=np.full(6, 10**12)), "num_classes"),
        (load_npz, npz_bytes(y_train=np.array(["a"] * 6)), "labels"),
        (load_npz, npz_bytes(y_train=np.array([{}] * 6)), "bad.npz"),
        (load_npz, member("x_train.npy", b"hello"), "x_train"),
        (load_npz, member("x_train.npy", npy_header("(9999999999999, 9, 9)")), "x_train"),
        (load_npz, pickle.dumps([1]), "bad.npz"),
        (load_femnist, json.dumps({"users": ["a"], "user_data": {"a": 3}}).encode(), "all.json"),
        (load_femnist, b"{", "all.json"),
        (load_femnist, b'{"user_data": {}}', "users"),
        (load_femnist, b'{"users": [], "user_data": {}}', "train_size=0"),
        (load_femnist, json.dumps(leaf(x=[[0.0] * 9])).encode(), "784"),
        (load_femnist, json.dumps(leaf(y=[3, 4])).encode(), "labels"),
        (load_femnist, json.dumps(leaf(x=[[float("nan")] * 784])).encode(), "finite"),
        (load_femnist, json.dumps(leaf(y=[62])).encode(), "labels"),
        (load_femnist, json.dumps(leaf(y=["a"])).encode(), "labels"),
        (load_femnist, json.dumps(leaf(y=[2**70])).encode(), "labels"),
        (load_femnist, json.dumps(leaf(x=[["a"] * 784])).encode(), "all.json"),
        (load_femnist, json.dumps(leaf(x=[[1e300] * 784])).encode(), "femnist"),
        (load_femnist, b"[" * 100_000, "all.json"),
        (load_femnist, b"\xff\xfe\x00", "all.json"),
        (load_images, b"", "bad.png"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_files_are_named(
    tmp_path: Path, load: Callable[[Path, bytes], Dataset], content: bytes, key: str
) -> None:
    with refusing(key):
        load(tmp_path, content)


@pytest.mark.parametrize("load", [cifar10, cifar100, emnist, femnist.load, image_folder.load, mnist])
def test_a_file_in_place_of_the_folder(tmp_path: Path, load: Callable[..., Dataset]) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(SettingsError, match="file"):
        load(root=str(tmp_path / "file"))
