"""The embedded digits, and the loaders of torchvision's data sets on small files in their own formats."""

from __future__ import annotations

import gzip
import pickle
import struct

import numpy as np
import pytest

from pflsim.data.sources import cifar10, cifar100, digits, emnist, fashion_mnist, mnist
from pflsim.errors import SettingsError


def write_idx(path, array, packed=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_family(folder, stems, labels, packed=False):
    """Two parts of 6 and 4 images of 4×5 pixels; returns the images."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (n, 4, 5)) for n in (6, 4)]
    for stem, x, y in zip(stems, images, labels, strict=True):
        write_idx(folder / f"{stem}-images-idx3-ubyte", x, packed)
        write_idx(folder / f"{stem}-labels-idx1-ubyte", np.array(y), packed)
    return images


LABELS = ([0, 1, 2, 3, 4, 9], [9, 8, 7, 0])


def test_digits_are_the_1797_with_a_fixed_stratified_split():
    from sklearn.datasets import load_digits

    data = digits.load()
    assert data.x.shape == (1797, 1, 8, 8) and data.x.dtype == np.uint8 and data.x.max() == 16 == data.scale
    train = np.bincount(data.y[: data.train_size], minlength=10)
    images, labels = load_digits(return_X_y=True)
    every = np.bincount(labels)
    assert (np.bincount(data.y) == every).all()
    assert (np.abs(train - 0.8 * every) <= 0.5).all()
    again = digits.load()
    assert np.array_equal(again.x, data.x) and np.array_equal(again.y, data.y)

    def pairs(x, y):
        return sorted((int(label), image.tobytes()) for image, label in zip(x, y, strict=True))

    original = images.astype(np.uint8).reshape(-1, 8, 8)
    assert pairs(data.x[:, 0], data.y) == pairs(original, labels)


def test_standardize_makes_training_inputs_zero_mean_unit_deviation():
    data = digits.load(standardize=True)
    assert data.mean is not None and data.std is not None
    inputs = (data.x[: data.train_size] / 16.0 - data.mean[0]) / data.std[0]
    assert inputs.mean() == pytest.approx(0, abs=1e-9) and inputs.std() == pytest.approx(1, abs=1e-9)
    assert digits.load().mean is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("source", "folder"), [(mnist, "MNIST"), (fashion_mnist, "FashionMNIST")])
def test_mnist_and_fashion_mnist_from_disk(tmp_path, source, folder, packed):
    images = write_family(tmp_path / folder / "raw", ("train", "t10k"), LABELS, packed)
    data = source.load(root=str(tmp_path))
    assert data.name == source.__name__.rpartition(".")[2]
    assert data.train_size == 6 and data.num_classes == 10 and data.x.dtype == np.uint8
    assert np.array_equal(data.x, np.concatenate(images)[:, None])
    assert data.y.tolist() == LABELS[0] + LABELS[1] and data.y.dtype == np.int64


def test_emnist_letters_count_from_zero_and_stand_upright(tmp_path):
    stems = ("emnist-letters-train", "emnist-letters-test")
    images = write_family(tmp_path / "EMNIST" / "raw", stems, ([1, 2, 3, 4, 5, 26], [26, 1, 2, 3]))
    data = emnist.load(root=str(tmp_path), split="letters")
    assert data.name == "emnist_letters" and data.num_classes == 26
    assert data.y.tolist() == [0, 1, 2, 3, 4, 25, 25, 0, 1, 2]
    assert np.array_equal(data.x[0, 0], images[0][0].T)


@pytest.mark.parametrize(
    ("source", "folder", "file"),
    [
        (mnist, "MNIST/raw", "train-images-idx3-ubyte"),
        (fashion_mnist, "FashionMNIST/raw", "t10k-labels-idx1-ubyte"),
        (emnist, "EMNIST/raw", "emnist-balanced-train-images-idx3-ubyte"),
        (cifar10, "cifar-10-batches-py", "data_batch_1"),
        (cifar100, "cifar-100-python", "train"),
    ],
)
def test_what_is_not_there_is_named_with_the_ways_out(tmp_path, source, folder, file):
    with pytest.raises(SettingsError) as caught:
        source.load(root=str(tmp_path))
    for part in (str(tmp_path / folder), file, "data.download=true", "data.root=DIR"):
        assert part in str(caught.value)


def test_a_download_that_fails_says_so(tmp_path, monkeypatch):
    import torchvision.datasets

    def offline(root, **_):
        raise RuntimeError("no route to host")

    for name, source in (("MNIST", mnist), ("EMNIST", emnist), ("CIFAR10", cifar10), ("CIFAR100", cifar100)):
        monkeypatch.setattr(torchvision.datasets, name, offline)
        with pytest.raises(SettingsError, match="the download of .* failed .no route to host.*by hand"):
            source.load(root=str(tmp_path), download=True)


def test_download_is_asked_of_torchvision_and_then_read(tmp_path, monkeypatch):
    import torchvision.datasets

    def fetch(root, download):
        assert download and root == str(tmp_path)
        write_family(tmp_path / "MNIST" / "raw", ("train", "t10k"), LABELS)

    monkeypatch.setattr(torchvision.datasets, "MNIST", fetch)
    assert mnist.load(root=str(tmp_path), download=True).train_size == 6
    monkeypatch.setattr(torchvision.datasets, "MNIST", None)
    assert mnist.load(root=str(tmp_path), download=True).train_size == 6, "what is there is not downloaded again"


def test_broken_idx_files_are_named(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    write_family(raw, ("train", "t10k"), LABELS)
    images, labels = raw / "train-images-idx3-ubyte", raw / "train-labels-idx1-ubyte"
    good = images.read_bytes()
    for content, says in ((good[:-3], "train-images.* is cut short"), (b"<html>", "train-images.* is not an IDX file")):
        images.write_bytes(content)
        with pytest.raises(SettingsError, match=says):
            mnist.load(root=str(tmp_path))
    images.unlink()
    images.with_name(images.name + ".gz").write_bytes(gzip.compress(good)[:-20])
    with pytest.raises(SettingsError, match="train-images.*gz cannot be read"):
        mnist.load(root=str(tmp_path))
    images.write_bytes(good)
    write_idx(labels, np.array([0, 1]))
    with pytest.raises(SettingsError, match="train-labels.* has 2 labels for 6 examples"):
        mnist.load(root=str(tmp_path))
    write_idx(labels, np.array([0, 1, 2, 3, 4, 10]))
    with pytest.raises(SettingsError, match=r"train-labels.* holds labels 0\.\.10, expected 0\.\.9"):
        mnist.load(root=str(tmp_path))


def write_batch(path, x, old_numpy=False, **labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = pickle.dumps({"data": x, **labels}, protocol=2)
    path.write_bytes(raw.replace(b"numpy._core.", b"numpy.core.") if old_numpy else raw)


def cifar_rows(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3072)).astype(np.uint8)


@pytest.mark.parametrize("old_numpy", [False, True])
def test_cifar10_from_its_batches(tmp_path, old_numpy):
    folder = tmp_path / "cifar-10-batches-py"
    for i in range(1, 6):
        write_batch(folder / f"data_batch_{i}", cifar_rows(2, i), old_numpy, labels=[i, i + 1])
    write_batch(folder / "test_batch", cifar_rows(3), old_numpy, labels=[0, 8, 9])
    data = cifar10.load(root=str(tmp_path), standardize=True)
    assert data.x.shape == (13, 3, 32, 32) and data.train_size == 10 and data.name == "cifar10"
    assert data.y.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 0, 8, 9]
    assert np.array_equal(data.x[2, 1].ravel(), cifar_rows(2, 2)[0, 1024:2048])
    train = data.x[:10] / 255.0
    assert data.mean == pytest.approx(train.mean(axis=(0, 2, 3))) and data.std == pytest.approx(
        train.std(axis=(0, 2, 3))
    )


def test_cifar10_from_an_npz(tmp_path):
    x = cifar_rows(5).reshape(5, 3, 32, 32).transpose(0, 2, 3, 1)
    np.savez(tmp_path / "cifar10.npz", x_train=x[:3], y_train=np.array([[1], [2], [3]]), x_test=x[3:], y_test=[4, 5])
    data = cifar10.load(root=str(tmp_path))
    assert data.name == "cifar10" and data.num_classes == 10 and data.train_size == 3
    assert np.array_equal(data.x, x.transpose(0, 3, 1, 2))


def test_cifar100_fine_and_coarse(tmp_path):
    folder = tmp_path / "cifar-100-python"
    for part in ("train", "test"):
        write_batch(folder / part, cifar_rows(2), fine_labels=[99, 0], coarse_labels=[19, 1])
    assert cifar100.load(root=str(tmp_path)).y.tolist() == [99, 0, 99, 0]
    coarse = cifar100.load(root=str(tmp_path), coarse=True)
    assert coarse.y.tolist() == [19, 1, 19, 1] and coarse.num_classes == 20


class Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(Harmful()), "asks for builtins.print"),
        (b"junk", "train is not a CIFAR batch"),
        (pickle.dumps({"data": 1}), "train is not a CIFAR batch with 'data' and 'fine_labels'"),
        (
            pickle.dumps({"data": cifar_rows(2)[:, :99], "fine_labels": [1, 2]}, protocol=2),
            r"expected uint8 \[n, 3072\]",
        ),
        (pickle.dumps({"data": cifar_rows(2), "fine_labels": [1]}, protocol=2), "has 1 labels for 2 examples"),
        (pickle.dumps({"data": cifar_rows(2), "fine_labels": [1, 100]}, protocol=2), r"labels 1\.\.100"),
    ],
)
def test_broken_cifar_files_are_named_and_never_run(tmp_path, content, says, capsys):
    folder = tmp_path / "cifar-100-python"
    write_batch(folder / "test", cifar_rows(2), fine_labels=[1, 2])
    (folder / "train").write_bytes(content)
    with pytest.raises(SettingsError, match=says):
        cifar100.load(root=str(tmp_path))
    assert capsys.readouterr().out == ""
