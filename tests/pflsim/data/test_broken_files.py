"""Data files that are broken in many ways are refused with a message, never with another error."""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from pflsim.data.dataset import Dataset
from pflsim.data.sources import femnist, image_folder, npz
from pflsim.data.sources.torchvision_sets import cifar10, cifar100, emnist, mnist
from pflsim.errors import SettingsError

FEW = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def message_only(value: Any) -> str:
    """Test names without the file's bytes, which are long and can hold the time."""
    return value if isinstance(value, str) else ""


def refuses(says: str, load: Callable[..., Dataset], **options: Any) -> str:
    with pytest.raises(SettingsError, match=says) as caught:
        load(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Small good files of every format -------------------------------------------------------------------------------------


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


def leaf(user: str = "a", x: Any = None, y: Any = None) -> dict[str, Any]:
    return {
        "users": [user],
        "user_data": {user: {"x": [[0.0] * 784] if x is None else x, "y": [3] if y is None else y}},
    }


def femnist_root(root: Path, train: bytes) -> str:
    for part in ("train", "test"):
        (root / part).mkdir(parents=True, exist_ok=True)
        (root / part / "all.json").write_text(json.dumps(leaf()))
    (root / "train" / "all.json").write_bytes(train)
    return str(root)


def image_bytes(suffix: str) -> bytes:
    file = io.BytesIO()
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    Image.fromarray(pixels).save(file, format={"jpg": "jpeg", "tif": "tiff", "ppm": "ppm"}.get(suffix, suffix))
    return file.getvalue()


def folder_root(root: Path, name: str, content: bytes) -> str:
    for c in ("cat", "dog"):
        (root / c).mkdir(parents=True, exist_ok=True)
        (root / c / "good.png").write_bytes(image_bytes("png"))
    (root / "cat" / name).write_bytes(content)
    return str(root)


# Any byte changed, anything cut off -----------------------------------------------------------------------------------

damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 0.999), st.binary(max_size=0)),
    st.tuples(st.just("over"), st.floats(0, 0.999), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("add"), st.floats(0, 0.999), st.binary(min_size=1, max_size=8)),
)


def damaged(good: bytes, how: tuple[str, float, bytes]) -> bytes:
    kind, share, other = how
    at = int(len(good) * share)
    if kind == "cut":
        return good[:at]
    return good[:at] + other + good[at + (len(other) if kind == "over" else 0) :]


def loads_or_refuses(load: Callable[..., Dataset], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            data = load(**options)
        except SettingsError:
            return
    assert data.x.size and len(data.x) == len(data.y) and 0 <= data.y.min() <= data.y.max() < data.num_classes
    assert data.x.dtype == np.uint8 or np.isfinite(data.x).all()


@FEW
@given(how=damage)
def test_npz_damaged(tmp_path: Path, how: tuple[str, float, bytes]) -> None:
    (tmp_path / "a.npz").write_bytes(damaged(npz_bytes(), how))
    loads_or_refuses(npz.load, path=str(tmp_path / "a.npz"))


@FEW
@given(how=damage)
def test_femnist_damaged(tmp_path: Path, how: tuple[str, float, bytes]) -> None:
    loads_or_refuses(femnist.load, root=femnist_root(tmp_path, damaged(json.dumps(leaf()).encode(), how)))


@FEW
@given(how=damage, suffix=st.sampled_from(["png", "jpg", "bmp", "gif", "webp", "ppm", "tif"]))
def test_images_damaged(tmp_path: Path, how: tuple[str, float, bytes], suffix: str) -> None:
    root = folder_root(tmp_path / suffix, f"bad.{suffix}", damaged(image_bytes(suffix), how))
    loads_or_refuses(image_folder.load, root=root, size=4)


# What is well formed and wrong ----------------------------------------------------------------------------------------


def member(name: str, content: bytes, **options: Any) -> bytes:
    """A good archive with one array's bytes replaced."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz_bytes())) as good, zipfile.ZipFile(file, "w", **options) as made:
        for info in good.infolist():
            made.writestr(info.filename, content if info.filename == name else good.read(info))
    return file.getvalue()


def npy_header(descr: str, shape: str) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (npz_bytes(x_train=np.full((6, 3, 4), 1e300), x_test=np.zeros((4, 3, 4))), "beyond float32"),
        (npz_bytes(x_train=np.zeros((6, 3, 4), complex)), r"x_train is complex128 \[6, 3, 4\], expected uint8"),
        (npz_bytes(x_train=np.zeros((6, 3, 4), bool)), r"x_train is bool \[6, 3, 4\], expected uint8"),
        (npz_bytes(x_train=np.zeros(6, [("a", "u1")])), r"x_train is \[\('a', 'u1'\)\] \[6\], expected uint8"),
        (npz_bytes(x_train=np.float32(3)), r"x_train is float32 \[\], expected .*\[n, H, W\]"),
        (npz_bytes(y_train=np.full(6, 2**64 - 1, np.uint64)), r"labels are -1\.\."),
        (npz_bytes(y_train=np.full(6, 10**12)), r"num_classes=1000000000001, expected .*1\.\.100000"),
        (npz_bytes(y_train=np.full(6, True)), "labels of the training part are bool"),
        (npz_bytes(y_train=np.array(["a"] * 6)), "labels of the training part are <U1"),
        (npz_bytes(y_train=np.array(3)), r"labels of the training part are int64 \[\]"),
        (npz_bytes(y_train=np.array([{}] * 6)), "Object arrays"),
        (member("x_train.npy", b"hello"), "x_train is"),
        (member("x_train.npy", b""), "x_train is"),
        (member("x_train.npy", npy_header("'|u1'", "(9999999999999, 9, 9)")), "Unable to allocate"),
        (member("x_train.npy", npy_header("'|u1'", "(-1, 9, 9)")), "negative dimensions"),
        (member("x_train.npy", npy_header("'|O'", "(6,)") + pickle.dumps([1] * 6)), "Object arrays"),
        (member("x_train.npy", npy_header("'|u1'", "().__class__")), "expected an .npz archive"),
        (b"", "expected an .npz archive"),
        (pickle.dumps([1]), "expected an .npz archive"),
    ],
    ids=message_only,
)
def test_npz(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "mine.npz").write_bytes(content)
    assert "mine" in refuses(says, npz.load, path=str(tmp_path / "mine.npz"))


def test_an_npz_may_be_written_in_fortran_order_or_compressed(tmp_path: Path) -> None:
    x = np.arange(72, dtype=np.uint8).reshape(6, 3, 4)
    good = npz_bytes(x_train=np.asfortranarray(x))
    (tmp_path / "a.npz").write_bytes(good)
    (tmp_path / "b.npz").write_bytes(
        member("x_train.npy", zipfile.ZipFile(io.BytesIO(good)).read("x_train.npy"), compression=zipfile.ZIP_LZMA)
    )
    for name in ("a.npz", "b.npz"):
        assert np.array_equal(npz.load(path=str(tmp_path / name)).x[:6, 0], x)


@pytest.mark.parametrize("classes", [0, -1, 10**18])
def test_npz_number_of_classes(tmp_path: Path, classes: int) -> None:
    (tmp_path / "mine.npz").write_bytes(npz_bytes())
    refuses(
        f"num_classes={classes}, expected .*1..100000",
        npz.load,
        path=str(tmp_path / "mine.npz"),
        num_classes=classes,
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"users": 3, "user_data": {}}, "all.json .*expected .*users, a list of names"),
        ({"users": [["a"]], "user_data": {}}, "all.json"),
        ({"users": ["a"], "user_data": ["a"]}, "all.json"),
        ({"users": ["a"], "user_data": {"a": 3}}, "all.json"),
        (leaf(y=["a"]), "femnist: labels of the training part are <U"),
        (leaf(y=[2**70]), "femnist: labels of the training part are object"),
        (leaf(y=[]), "all.json .*user 'a' has 1 examples and 0 labels"),
        (leaf(x=[["a"] * 784]), "all.json"),
        (leaf(x=[[10**400] * 784]), "all.json"),
        (leaf(x=[[1e300] * 784]), "femnist: .* expected finite numbers"),
        ([], "all.json"),
    ],
    ids=message_only,
)
def test_femnist(tmp_path: Path, content: Any, says: str) -> None:
    refuses(says, femnist.load, root=femnist_root(tmp_path, json.dumps(content).encode()))


def test_femnist_that_is_deep_or_no_text(tmp_path: Path) -> None:
    for content in (b"[" * 100_000, b"\xff\xfe\x00"):
        refuses("all.json cannot be read", femnist.load, root=femnist_root(tmp_path, content))


def test_image_folders(tmp_path: Path) -> None:
    root = folder_root(tmp_path / "a", "empty.png", b"")
    refuses("empty.png cannot be read", image_folder.load, root=root)
    (tmp_path / "a" / "cat" / "empty.png").unlink()
    (tmp_path / "a" / "emu").mkdir()
    refuses("data.root=.*classes emu", image_folder.load, root=root)
    refuses("data.size=1000000000: expected a number >= 1 and <= 4096", image_folder.load, root=root, size=10**9)
    refuses("data.root=.*good.png", image_folder.load, root=str(tmp_path / "a" / "cat" / "good.png"))


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    root = folder_root(tmp_path / "a", "good2.png", image_bytes("png"))
    (tmp_path / "a" / "cat" / "gone.png").symlink_to(tmp_path / "nothing")
    refuses("gone.png cannot be read", image_folder.load, root=root)
    (tmp_path / "a" / "cat" / "gone.png").unlink()
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    refuses("loop.npz", npz.load, path=str(tmp_path / "loop.npz"))


LOADERS = (cifar10, cifar100, emnist, femnist.load, image_folder.load, mnist)


@pytest.mark.parametrize("load", LOADERS)
def test_a_file_in_place_of_the_folder(tmp_path: Path, load: Callable[..., Dataset]) -> None:
    (tmp_path / "file").write_text("hello")
    assert "file" in refuses("not found|data.root=.* cannot be read", load, root=str(tmp_path / "file"))


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    refuses("expected an .npz archive", npz.load, path=str(tmp_path))
    root = femnist_root(tmp_path / "femnist", b"{}")
    (tmp_path / "femnist" / "train" / "all.json").unlink()
    (tmp_path / "femnist" / "train" / "all.json").mkdir()
    refuses("all.json cannot be read .Is a directory", femnist.load, root=root)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be opened and no folder listed; said by the system's calls, since root may read everything."""

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "iterdir", denied)
    monkeypatch.setattr(Path, "read_text", denied)


def test_files_that_may_not_be_read(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    leaf_root, folder = femnist_root(tmp_path / "l", b"{}"), folder_root(tmp_path / "f", "x.png", b"")
    request.getfixturevalue("locked")
    with pytest.raises(PermissionError):
        femnist.load(root=leaf_root)
    refuses("Permission denied", image_folder.load, root=folder)
