"""The sources that torchvision and scikit-learn read: digits, and small files in the formats of torchvision's sets."""

import bz2
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets
from support import refusing

from pflsim.data.federated import Examples
from pflsim.data.sources import scikit_learn
from pflsim.data.sources.torchvision_sets import cifar10, cifar100, emnist, fashion_mnist, mnist, svhn, usps
from pflsim.errors import SettingsError

LABELS = ([0, 1, 2, 3, 4, 9], [9, 8, 7, 0])


def write_family(folder, stems, labels=LABELS):
    """Write two parts of 6 and 4 images of 4×5 pixels in MNIST's format; return the images."""
    folder.mkdir(parents=True)
    images = [np.random.default_rng(n).integers(0, 256, (n, 4, 5), dtype=np.uint8) for n in (6, 4)]
    for stem, x, y in zip(stems, images, labels, strict=True):
        for name, array in (("images-idx3", x), ("labels-idx1", np.array(y, np.uint8))):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{stem}-{name}-ubyte").write_bytes(header + array.tobytes())
    return images


def test_digits_are_the_1797_with_a_fixed_stratified_split():
    from sklearn.datasets import load_digits

    data = scikit_learn.digits()
    assert data.x.shape == (1797, 1, 8, 8) and data.x.dtype == np.uint8 and data.x.max() == 16 == data.scale
    train = np.bincount(data.y[: data.train_size], minlength=10)
    images, labels = load_digits(return_X_y=True)
    every = np.bincount(labels)
    assert (np.bincount(data.y) == every).all()
    assert (np.abs(train - 0.8 * every) <= 0.5).all()

    def pairs(x, y):
        return sorted((int(label), image.tobytes()) for image, label in zip(x, y, strict=True))

    original = images.astype(np.uint8).reshape(-1, 8, 8)
    assert pairs(data.x[:, 0], data.y) == pairs(original, labels)


@pytest.mark.parametrize(("load", "folder"), [(mnist, "MNIST"), (fashion_mnist, "FashionMNIST")])
def test_mnist_and_fashion_mnist_from_disk(tmp_path, load, folder):
    images = write_family(tmp_path / folder / "raw", ("train", "t10k"))
    data = load(root=str(tmp_path))
    assert data.name == load.__name__ and data.train_size == 6 and data.num_classes == 10
    assert data.x.dtype == np.uint8 and np.array_equal(data.x, np.concatenate(images)[:, None])
    assert data.y.tolist() == LABELS[0] + LABELS[1] and data.y.dtype == np.int64


def test_usps_from_disk(tmp_path):
    """Lines of LIBSVM with grey values from -1 to 1, and labels from 1."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (10, 16, 16)), [*LABELS[0], *LABELS[1]]
    pixels = [" ".join(f"{i + 1}:{v / 127.5 - 1!r}" for i, v in enumerate(x.ravel().tolist())) for x in images]
    lines = [f"{y + 1} {x}" for y, x in zip(labels, pixels, strict=True)]
    for name, part in (("usps.bz2", lines[:6]), ("usps.t.bz2", lines[6:])):
        (tmp_path / name).write_bytes(bz2.compress("\n".join(part).encode()))
    data = usps(root=str(tmp_path))
    assert data.x.shape == (10, 1, 16, 16) and (data.train_size, data.num_classes) == (6, 10)
    assert data.y.tolist() == labels
    assert np.abs(data.x[:, 0].astype(int) - images).max() <= 1, "torchvision cuts fractions off"


def test_svhn_from_disk(tmp_path, monkeypatch):
    """Images are stored as [32, 32, 3, n], and the digit 0 as 10. Torchvision knows the checksums of the files."""
    monkeypatch.setattr(torchvision.datasets.SVHN, "_check_integrity", lambda self: True)
    images = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    labels = np.array([*LABELS[0], *LABELS[1]])
    for part, rows in (("train", slice(6)), ("test", slice(6, None))):
        stored = {"X": images[rows].transpose(1, 2, 3, 0), "y": np.where(labels[rows] == 0, 10, labels[rows])[:, None]}
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", stored)
    data = svhn(root=str(tmp_path))
    assert data.train_size == 6 and data.y.tolist() == labels.tolist()
    assert np.array_equal(data.x, images.transpose(0, 3, 1, 2))


def test_emnist_letters_count_from_zero_and_stand_upright(tmp_path):
    stems = ("emnist-letters-train", "emnist-letters-test")
    images = write_family(tmp_path / "EMNIST/raw", stems, ([1, 2, 3, 4, 5, 26], [26, 1, 2, 3]))
    data = emnist(root=str(tmp_path), split="letters")
    assert data.name == "emnist_letters" and data.num_classes == 26
    assert data.y.tolist() == [0, 1, 2, 3, 4, 25, 25, 0, 1, 2]
    assert np.array_equal(data.x[0, 0], images[0][0].T)

    write_family(tmp_path / "other/EMNIST/raw", ("emnist-digits-train", "emnist-digits-test"))
    data = emnist(root=str(tmp_path / "other"), split="digits")
    assert data.y.tolist() == LABELS[0] + LABELS[1] and data.num_classes == 10


@pytest.mark.parametrize(
    ("load", "folder", "file"),
    [
        (mnist, "MNIST/raw", "train-images-idx3-ubyte"),
        (fashion_mnist, "FashionMNIST/raw", "t10k-labels-idx1-ubyte"),
        (emnist, "EMNIST/raw", "emnist-balanced-train-images-idx3-ubyte"),
        (cifar10, "cifar-10-batches-py", "data_batch_1"),
        (cifar100, "cifar-100-python", "train"),
    ],
)
def test_missing_files_are_named_with_the_remedies(tmp_path, load, folder, file):
    with refusing(str(tmp_path / folder), file, "data.download=true", "data.root=DIR"):
        load(root=str(tmp_path))


def test_packed_files_must_be_unpacked(tmp_path):
    write_family(tmp_path / "MNIST/raw", ("train", "t10k"))
    for file in list((tmp_path / "MNIST/raw").iterdir()):
        file.rename(file.with_name(file.name + ".gz"))
    with pytest.raises(SettingsError, match=f"unpack .*{tmp_path / 'MNIST/raw'}|{tmp_path / 'MNIST/raw'}.* unpack"):
        mnist(root=str(tmp_path))


def test_downloads_are_torchvisions(tmp_path, monkeypatch):
    """A download that fails is an error of one line. One that succeeds is read, and not repeated."""

    def offline(*_, **__):
        raise RuntimeError("no route to host\nat all")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", offline)
    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", offline)
    for load in (mnist, emnist, cifar10, cifar100):
        with refusing(" in ", " cannot be read"):
            load(root=str(tmp_path / "none"), download=True)

    calls = []

    def fetch(_url, download_root, filename, **_):
        if not calls:
            write_family(Path(download_root) / "made", ("train", "t10k"))
        calls.append(filename)
        name = filename.removesuffix(".gz")
        (Path(download_root) / "made" / name).rename(Path(download_root) / name)

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", fetch)
    for _ in range(2):
        assert mnist(root=str(tmp_path), download=True).train_size == 6
        assert len(calls) == 4


def test_a_damaged_idx_file_ends_with_one_line(tmp_path):
    raw = tmp_path / "MNIST/raw"
    write_family(raw, ("train", "t10k"))
    (raw / "train-images-idx3-ubyte").write_bytes((raw / "train-images-idx3-ubyte").read_bytes()[:-3])
    with refusing("mnist in ", str(raw)):
        mnist(root=str(tmp_path))


def rows(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)


def write_batches(folder, **batches):
    folder.mkdir(parents=True)
    for name, content in batches.items():
        (folder / name.replace("__", ".")).write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture
def any_md5(monkeypatch):
    """Let torchvision accept files with other MD5 sums than those of the original data."""
    for kind in (torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100):
        for part in ("train_list", "test_list"):
            monkeypatch.setattr(kind, part, [[name, None] for name, _ in getattr(kind, part)])
        monkeypatch.setattr(kind, "meta", kind.meta | {"md5": None})


@pytest.mark.usefixtures("any_md5")
def test_cifar10_from_its_batches(tmp_path):
    train = {f"data_batch_{i}": {"data": rows(2, i), "labels": [i, i + 1]} for i in range(1, 6)}
    train["test_batch"] = {"data": rows(3), "labels": [0, 8, 9]}
    write_batches(tmp_path / "cifar-10-batches-py", **train, batches__meta={"label_names": list("abcdefghij")})
    data = cifar10(root=str(tmp_path), standardize=True)
    assert data.x.shape == (13, 3, 32, 32) and data.train_size == 10 and data.name == "cifar10"
    assert data.x.dtype == np.uint8 and data.y.dtype == np.int64
    assert data.y.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 0, 8, 9]
    assert np.array_equal(data.x[2, 1].ravel(), rows(2, 2)[0, 1024:2048])
    train = data.x[:10] / 255.0
    assert data.mean == pytest.approx(train.mean((0, 2, 3))) and data.std == pytest.approx(train.std((0, 2, 3)))
    pixels = cifar10(root=str(tmp_path), standardize="per_pixel")
    mean, std = train.mean(axis=0), train.std(axis=0)
    found, _ = Examples(torch.from_numpy(data.x), torch.zeros(13), 255.0, pixels.mean, pixels.std).batch(slice(None))
    expected = (data.x / 255.0 - mean) / np.where(std > 0, std, 1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_cifar10_from_an_npz(tmp_path):
    x = rows(5).reshape(5, 3, 32, 32).transpose(0, 2, 3, 1)
    np.savez(tmp_path / "cifar10.npz", x_train=x[:3], y_train=np.array([[1], [2], [3]]), x_test=x[3:], y_test=[4, 5])
    data = cifar10(root=str(tmp_path))
    assert data.name == "cifar10" and data.num_classes == 10 and data.train_size == 3
    assert np.array_equal(data.x, x.transpose(0, 3, 1, 2))


@pytest.mark.usefixtures("any_md5")
def test_cifar100_fine_and_coarse(tmp_path):
    train = {"data": rows(2), "fine_labels": [99, 0], "coarse_labels": [19, 1]}
    test = {"data": rows(2), "fine_labels": [5, 6], "coarse_labels": [0, 2]}
    meta = {"fine_label_names": list(map(str, range(100)))}
    write_batches(tmp_path / "cifar-100-python", train=train, test=test, meta=meta)
    assert cifar100(root=str(tmp_path)).y.tolist() == [99, 0, 5, 6]
    coarse = cifar100(root=str(tmp_path), coarse=True)
    assert coarse.y.tolist() == [19, 1, 0, 2] and coarse.y.dtype == np.int64 and coarse.num_classes == 20
