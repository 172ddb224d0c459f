"""Users' own files: npz archives, image folders, LEAF's FEMNIST."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import refusing

from pflsim.data.federated import Examples
from pflsim.data.sources import domains, femnist, image_folder, npz
from pflsim.data.sources.own import as_dataset
from pflsim.data.sources.pictures import shown
from pflsim.errors import SettingsError

PARTS = (("train", 6), ("test", 4))


def pixels(*shape):
    return np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)


def save(path, **changes):
    """An archive of 6 + 4 grey images of 5×7; changes replace keys, None leaves one out."""
    arrays = {f"x_{part}": pixels(n, 5, 7) for part, n in PARTS} | {f"y_{part}": np.arange(n) % 3 for part, n in PARTS}
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return str(path)


@pytest.mark.parametrize(
    ("shape", "layout", "stored"),
    [
        ((5, 7), "auto", (1, 5, 7)),
        ((5, 7, 3), "auto", (3, 5, 7)),
        ((3, 5, 7), "auto", (3, 5, 7)),
        ((5, 7, 1), "auto", (1, 5, 7)),
        ((3, 5, 4), "hwc", (4, 3, 5)),
        ((3, 5, 4), "chw", (3, 5, 4)),
        ((2, 5, 7), "chw", (2, 5, 7)),
        ((9,), "auto", (9,)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_npz_layouts(tmp_path, shape, layout, stored, dtype):
    x = pixels(10, *shape).astype(dtype)
    path = save(tmp_path / "mine.npz", x_train=x[:6], x_test=x[6:])
    data = npz.load(path=path, layout=layout)
    assert data.name == "mine" and data.num_classes == 3 and data.train_size == 6
    assert data.input_shape == stored
    assert data.x.dtype == (np.uint8 if dtype is np.uint8 else np.float32)
    expected = np.moveaxis(x, -1, 1) if len(shape) == 3 and stored != shape else x.reshape(10, *stored)
    assert np.array_equal(data.x, expected)


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"y_test": None}, {}, "y_test .*x_train, y_train, x_test, y_test"),
        ({"x_train": pixels(6)}, {}, "x_train"),
        ({"x_train": pixels(0, 5, 7), "y_train": np.arange(0)}, {}, "train_size=0"),
        ({"x_train": pixels(6, 5, 7, 9)}, {}, "data.layout=hwc"),
        ({"x_train": pixels(6, 3, 7, 3)}, {}, "data.layout=hwc"),
        ({f"x_{part}": np.full((n, 5, 7), np.nan) for part, n in PARTS}, {}, "NaN"),
        ({f"x_{part}": np.full((n, 5, 7), np.inf) for part, n in PARTS}, {"standardize": True}, "NaN"),
        ({"x_test": pixels(4, 5, 8)}, {}, "test part"),
        ({"x_test": np.zeros((4, 5, 7))}, {}, "test part"),
        ({"y_train": np.arange(5)}, {}, "labels"),
        ({"y_test": np.arange(4) - 1}, {}, "labels"),
        ({}, {"num_classes": 2}, "labels"),
    ],
)
def test_npz_errors_name_file_and_key(tmp_path, changes, options, says):
    with refusing("mine", match=says):
        npz.load(path=save(tmp_path / "mine.npz", **changes), **options)
    for path in (None, "gone.npz"):
        with refusing(f"data.path={path or 'FILE.npz'}"):
            npz.load(path=path)


@pytest.mark.parametrize("form", [("x_{}", "y_{}"), ("{}_images", "{}_labels")])
@pytest.mark.parametrize("validation", [3, 0])
def test_npz_of_medmnist_and_validation_arrays(tmp_path, form, validation):
    rng, sizes = np.random.default_rng(1), {"train": 6, "val": validation, "test": 4}
    arrays = {}
    for part, n in sizes.items():
        if n:
            arrays[form[0].format(part)] = rng.integers(0, 256, (n, 5, 5, 3), dtype=np.uint8)
            arrays[form[1].format(part)] = rng.integers(0, 2, (n, 1), dtype=np.uint8)
    np.savez(tmp_path / "bloodmnist.npz", **arrays)
    data = npz.load(path=str(tmp_path / "bloodmnist.npz"))
    assert (data.train_size, len(data.y), data.input_shape) == (6 + validation, 10 + validation, (3, 5, 5))
    stored = [arrays[form[0].format(part)] for part, n in sizes.items() if n]
    assert np.array_equal(data.x, np.concatenate(stored).transpose(0, 3, 1, 2))
    assert data.y.tolist() == np.concatenate([arrays[form[1].format(p)] for p, n in sizes.items() if n])[:, 0].tolist()
    if validation:
        arrays[form[0].format("val")] = np.zeros((3, 7, 7, 3), np.uint8)
        np.savez(tmp_path / "other.npz", **arrays)
        with pytest.raises(SettingsError, match="validation part"):
            npz.load(path=str(tmp_path / "other.npz"))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(5, 7, 3), (9,)])
def test_standardized_inputs_through_a_batch(tmp_path, dtype, shape):
    x = pixels(10, *shape).astype(dtype)
    data = npz.load(path=save(tmp_path / "mine.npz", x_train=x[:6], x_test=x[6:]), standardize=True)
    part = Examples(torch.from_numpy(data.x[:6]), torch.from_numpy(data.y[:6]), data.scale, data.mean, data.std)
    inputs, _ = part.batch(slice(None))
    axes = [0, *range(2, inputs.dim())]
    assert inputs.mean(axes).abs().max() < 1e-4
    assert (inputs.std(axes, correction=0) - 1).abs().max() < 1e-4


def test_a_constant_channel_is_not_divided_by_zero(tmp_path):
    data = npz.load(path=save(tmp_path / "mine.npz", x_train=np.full((6, 5, 7), 9, np.uint8)), standardize=True)
    assert data.std == (1.0,) and data.mean == pytest.approx((9 / 255,))


def paint(path, colour, size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_image_folder_with_two_parts(tmp_path):
    paint(tmp_path / "train" / "cat" / "1.png", (255, 0, 0))
    paint(tmp_path / "train" / "ant" / "1.png", (0, 0, 255))
    paint(tmp_path / "train" / "ant" / "2.bmp", (0, 255, 0), size=(4, 4))
    paint(tmp_path / "test" / "cat" / "3.png", (10, 20, 30))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    data = image_folder.load(root=str(tmp_path), size=4)
    assert data.x.shape == (4, 3, 4, 4) and data.y.tolist() == [0, 0, 1, 1] and data.train_size == 3
    assert data.x[:, :, 0, 0].tolist() == [[0, 0, 255], [0, 255, 0], [255, 0, 0], [10, 20, 30]]
    grey = image_folder.load(root=str(tmp_path), size=4, grayscale=True, standardize=True)
    assert grey.x.shape == (4, 1, 4, 4) and grey.mean is not None and len(grey.mean) == 1
    assert grey.x[2, 0, 0, 0] == round(255 * 0.299)


def test_image_folder_of_one_level_gets_a_fixed_split_that_file_names_do_not_change(tmp_path):
    for i in range(10):
        for c, name in enumerate(("a", "b")):
            paint(tmp_path / "one" / name / f"{i}.png", (i, c, 0))
            paint(tmp_path / "two" / name / f"{9 - i}.png", (i, c, 0))
    one, two = (image_folder.load(root=str(tmp_path / n), size=4) for n in ("one", "two"))
    assert one.train_size == 16 and np.bincount(one.y[:16]).tolist() == [8, 8]

    def train_set(data):
        return sorted(map(tuple, data.x[: data.train_size, :, 0, 0].tolist()))

    assert train_set(one) == train_set(two) and one.name == "one"


@pytest.mark.parametrize(
    ("image", "red"),
    [
        (Image.new("1", (4, 4), 1), 255),
        (Image.new("L", (4, 4), 51), 51),
        (Image.new("LA", (4, 4), (51, 255)), 51),
        (Image.new("LA", (4, 4), (51, 0)), 255),
        (Image.new("RGBA", (4, 4), (51, 0, 0, 255)), 51),
        (Image.new("RGBA", (4, 4), (51, 0, 0, 0)), 255),
        (Image.new("RGB", (4, 4), (51, 0, 0)).convert("P", palette=Image.Palette.ADAPTIVE), 51),
        (Image.new("CMYK", (4, 4), (204, 0, 0, 0)), 51),
        (Image.fromarray(np.full((4, 4), 13107, np.uint16)), 0.2),
        (Image.fromarray(np.full((4, 4), 13107, ">u2")), 0.2),
        (Image.fromarray(np.full((4, 4), 13107, np.int32)), 0.2),
        (Image.fromarray(np.full((4, 4), 2**16, np.int32)), None),
        (Image.fromarray(np.full((4, 4), -1, np.int32)), None),
        (Image.fromarray(np.full((4, 4), 0.2, np.float32)), None),
    ],
    ids=lambda value: getattr(value, "mode", value),
)
def test_image_folder_with_images_of_every_mode(tmp_path, image, red):
    paint(tmp_path / "train" / "cat" / "1.png", (255, 0, 51))
    (tmp_path / "test" / "cat").mkdir(parents=True)
    image.save(tmp_path / "test" / "cat" / "1.tif")
    paint(tmp_path / "test" / "cat" / "2.png", (255, 0, 51))
    if red is None:
        with pytest.raises(SettingsError, match=r"1\.tif.*65535"):
            image_folder.load(root=str(tmp_path), size=4)
        return
    data = image_folder.load(root=str(tmp_path), size=4)
    assert not data.notes
    assert data.x.dtype == (np.uint8 if red in (51, 255) else np.float32) and len(data.x) == 3
    white = 255 if data.x.dtype == np.uint8 else 1
    for row in (0, 2):
        assert data.x[row, :, 0, 0] == pytest.approx([white, 0, white * 0.2])
    assert data.x[1, 0] == pytest.approx(red)
    if image.mode[0] == "I":
        grey = image_folder.load(root=str(tmp_path), size=4, grayscale=True)
        assert grey.x[:2, 0, 0, 0] == pytest.approx([round(255 * 0.299 + 51 * 0.114) / 255, 0.2])


def test_twelve_bits_and_several_pages(tmp_path):
    (tmp_path / "cat").mkdir()
    pages = [Image.fromarray(np.full((4, 4), value, np.uint16)) for value in (4095, 60000)]
    pages[0].save(tmp_path / "cat" / "1.tif", save_all=True, append_images=pages[1:])
    pages[0].save(tmp_path / "cat" / "2.tif")
    Image.new("L", (4, 4), 200).save(tmp_path / "cat" / "3.png")
    data = image_folder.load(root=str(tmp_path), size=4)
    assert "6.2%" in data.notes[0] and "1 with several pages" in dict(data.card.lines)["pictures"]


def test_image_folder_errors(tmp_path):
    def refuses(says, **options):
        with pytest.raises(SettingsError, match=says):
            image_folder.load(**options)

    root = str(tmp_path / "d")
    refuses("needs data.root=DIR")
    refuses("data.root=.*CLASS", root=root)
    (tmp_path / "d").mkdir()
    refuses("data.root=.*CLASS", root=root)
    (tmp_path / "d" / "cat").mkdir()
    (tmp_path / "d" / "cat" / ".hidden.png").write_bytes(b"not a picture")
    refuses("data.root=.*cat.*.png", root=root)
    (tmp_path / "d" / "cat" / "x.png").write_bytes(b"not a picture")
    refuses("x.png cannot be read", root=root)
    paint(tmp_path / "e" / "train" / "cat" / "1.png", (1, 2, 3))
    paint(tmp_path / "e" / "test" / "dog" / "1.png", (1, 2, 3))
    refuses("dog.*data.root=.*train", root=str(tmp_path / "e"))
    paint(tmp_path / "f" / "a" / "1.png", (1, 2, 3))
    refuses("data.background=bluish", root=str(tmp_path / "f"), background="bluish")


@pytest.mark.parametrize(
    ("folders", "classes", "sizes", "named"),
    [
        ("train/a train/b val/a val/b", "ab", (2, 4), "val"),
        ("Training/a Training/b Testing/b", "ab", (2, 3), "Testing"),
        ("TRAIN/a TRAIN/b Valid/a test/b", "ab", (3, 4), "Valid"),
        ("train/a train/b validation/a test/c test/a", "abc", (3, 5), "validation"),
        ("train/a/images train/b/images test/a/images/x", "ab", (2, 3), ""),
        ("train/a train/b test/a drafts/a", "ab", (2, 3), "drafts"),
        ("train/a train/a/x train/b", "ab", (2, 3), ""),
        ("train/a train/b val/a test", "ab", (2, 3), "val"),
        ("train bus car", ["bus", "car", "train"], (3, 3), "train"),
        (".git/a a __MACOSX/a b", "ab", (2, 2), ""),
    ],
)
def test_layouts_of_image_folders(tmp_path, folders, classes, sizes, named):
    """A folder of one level has the pictures of each class once in training, if it has one only."""
    for number, folder in enumerate(folders.split()):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        if folder != "test":
            paint(tmp_path / folder / "1.png", (number, 0, 0))
    data = image_folder.load(root=str(tmp_path), size=4)
    assert data.values == (*classes,) and (data.train_size, len(data.y)) == sizes
    assert named in " ".join(data.notes) and bool(data.notes) == bool(named)


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        ("train/a train/b val/images", "val has no folder of a class"),
        ("train/a train/b test", "test has no folder of a class"),
        ("train/a Train/b test/a", "Train"),
        ("train/a val/a validation/a", "validation"),
        ("test/a val/a", "test, val|val, test"),
        ("photos/a photos/b", "data.root=.*photos$"),
        ("photos/train/a photos/test/a", "data.root=.*photos$"),
        (".", "no folder of a class"),
    ],
)
def test_layouts_that_cannot_be_labelled_are_refused(tmp_path, folders, says):
    for folder in folders.split():
        paint(tmp_path / folder / "1.png", (1, 2, 3))
    with pytest.raises(SettingsError, match=says):
        image_folder.load(root=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "examples"),
    [
        ("a/.ipynb_checkpoints/1-checkpoint.png", "picture", 4),
        ("a/@eaDir/1.png/THUMB.jpg", "picture", 4),
        ("a/._1.png", "text", 4),
        ("a/Thumbs.db", "text", 4),
        ("a/README.md", "text", 4),
        ("a/more/labels.xml", "text", 4),
        ("a/paper.pdf", "text", 4),
        ("a/2.jfif", "picture", 5),
        ("a/2.PNG", "picture", 5),
        ("a/2.Tga", "picture", 5),
        ("a/scan", "picture", 5),
        ("a/2.gif.bak", "picture", 5),
        ("a/2.jpg", "text", None),
        ("a/2.PPM", "text", None),
        ("a/IMG_1.HEIC", "text", None),
    ],
)
def test_files_that_are_pictures(tmp_path, name, content, examples):
    for c in "ab":
        for i in range(2):
            paint(tmp_path / c / f"{i}.png", (i, 0, 0))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    if content == "picture":
        form = {".jfif": "jpeg", ".Tga": "tga"}.get((tmp_path / name).suffix, "png")
        Image.new("RGB", (8, 6), (9, 9, 9)).save(tmp_path / name, format=form)
    else:
        (tmp_path / name).write_text("none")
    if examples is None:
        with refusing(name):
            image_folder.load(root=str(tmp_path))
        return
    data = image_folder.load(root=str(tmp_path), size=4)
    card = dict(data.card.lines)
    assert len(data.y) == examples and not data.notes
    assert card["pictures"].startswith(f"{examples} of 8x6") and ("skipped" in card) == (examples == 4)
    assert examples == 5 or any(part in card["skipped"] for part in Path(name).parts)


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "webp"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (5, 7)), (6, (0, 5)), (8, (7, 0)), (2, (0, 7))])
def test_pictures_are_turned_by_their_tag(tmp_path, ending, orientation, corner):
    """The bright corner is at the upper left of what is stored, in 6 rows and 8 columns."""
    image = Image.new("L", (8, 6))
    image.putpixel((0, 0), 255)
    image = image.convert("RGB")
    paint(tmp_path / "a" / "1.png", (0, 0, 0))
    options = {"quality": 100, "subsampling": 0} if ending == "jpg" else {"lossless": True} if ending == "webp" else {}
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a" / f"2.{ending}", exif=exif, **options)
    picture = shown(Image.open(tmp_path / "a" / f"2.{ending}"))
    found = np.asarray(picture.convert("L"))
    assert found.shape == ((8, 6) if orientation > 4 else (6, 8))
    assert np.unravel_index(found.argmax(), found.shape) == corner
    x = as_dataset([(Image.open(tmp_path / "a" / f"2.{ending}"), 0)]).x
    assert np.array_equal(x[0].transpose(1, 2, 0), np.asarray(picture))


@pytest.mark.parametrize(
    ("image", "transparent", "colours"),
    [
        (Image.new("RGBA", (4, 4), (0, 0, 0, 0)), None, [(255, 255, 255), (0, 0, 255)]),
        (Image.new("RGBA", (4, 4), (255, 0, 0, 255)), None, [(255, 0, 0), (255, 0, 0)]),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 51)), None, [(204, 204, 204), (0, 0, 204)]),
        (Image.new("LA", (4, 4), (7, 0)), None, [(255, 255, 255), (0, 0, 255)]),
        (Image.new("P", (4, 4), 0), None, [(0, 0, 0), (0, 0, 0)]),
        (Image.new("P", (4, 4), 0), 0, [(255, 255, 255), (0, 0, 255)]),
        (Image.new("L", (4, 4), 9), 9, [(255, 255, 255), (0, 0, 255)]),
    ],
)
@pytest.mark.parametrize("grayscale", [False, True])
def test_transparent_pixels_show_the_background(tmp_path, image, transparent, colours, grayscale):
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "1.png", transparency=transparent)
    for background, colour in zip(("white", "#0000ff"), colours, strict=True):
        data = image_folder.load(root=str(tmp_path), size=4, grayscale=grayscale, background=background)
        expected = [round(np.dot(colour, (0.299, 0.587, 0.114)))] if grayscale else [*colour]
        assert data.x[0, :, 1, 1].tolist() == expected
    own = as_dataset([(Image.open(tmp_path / "a" / "1.png"), 0)])
    assert {*own.x[0, :, 1, 1].tolist()} == {*colours[0]}


def inputs_of(data, rows=slice(None)):
    """What a model gets."""
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    return Examples(x, y, data.scale, data.mean, data.std).batch(rows)[0].numpy()


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (9,)])
@pytest.mark.parametrize(("largest", "top"), [(1, 1), (0, 0), (2, 2 / 255), (255, 1)])
@pytest.mark.parametrize("source", ["npz", "objects", "domains"])
def test_bytes_are_divided_only_if_some_exceed_1(tmp_path, shape, largest, top, source):
    """Those of any part count."""
    x = np.zeros((10, *shape), np.uint8)
    x[::2] = min(largest, 1)
    x[-1] = largest
    path = save(tmp_path / "mine.npz", x_train=x[:6], x_test=x[6:])
    if source == "npz":
        data = npz.load(path=path)
    elif source == "objects":
        data = as_dataset((x[:6], np.arange(6) % 3), (x[6:], np.arange(4) % 3))
    elif len(shape) == 1:
        return
    else:
        data = domains.load(sources=[path], clients=1, size=5)
    assert inputs_of(data).max() == pytest.approx(top, abs=1e-6)
    assert npz.load(path=path, standardize=True).x.dtype == np.uint8


def test_pictures_of_own_objects(tmp_path):
    """Sixteen bits are from 0 to 1; they are refused beside bytes, which are from 0 to 255."""
    deep, flat = (Image.fromarray(np.full((4, 4), value, kind)) for value, kind in ((13107, np.uint16), (51, np.uint8)))
    assert as_dataset([(deep, 0)]).x == pytest.approx(0.2)
    with refusing("float32", "uint8"):
        as_dataset([(deep, 0), (flat, 1)])
    assert as_dataset([(Image.new("CMYK", (4, 4), (204, 0, 0, 0)), 0)]).x[0, :, 0, 0].tolist() == [51, 255, 255]
    red = Image.new("RGB", (4, 4), (255, 0, 0)).convert("P")
    assert as_dataset([(red, 0), (red.convert("PA"), 0)]).x[:, :, 0, 0].tolist() == [[255, 0, 0]] * 2
    assert as_dataset([(Image.fromarray(np.full((4, 4), 0.7, np.float32)), 0)]).x == pytest.approx(0.7)


def leaf(users):
    """LEAF's format: {user: (x rows, labels)}."""
    data = {u: {"x": [list(map(float, row)) for row in x], "y": y} for u, (x, y) in users.items()}
    return {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}


def write_leaf(root, train, test):
    for part, content in (("train", train), ("test", test)):
        (root / part).mkdir(parents=True, exist_ok=True)
        (root / part / "all_data_0.json").write_text(json.dumps(content))


@pytest.mark.parametrize("place", ["femnist", "femnist/data", "."])
def test_femnist_knows_its_clients_in_both_parts(tmp_path, place):
    bytes_ = pixels(4, 784)
    train = leaf({"f2": (bytes_[:2] / 255, [61, 0]), "f1": (bytes_[2:3] / 255, [5])})
    write_leaf(tmp_path / place, train, leaf({"f2": (bytes_[3:] / 255, [7])}))
    data = femnist.load(root=str(tmp_path))
    assert data.x.dtype == np.uint8 and np.array_equal(data.x.reshape(4, 784), bytes_)
    assert data.x.shape == (4, 1, 28, 28) and data.num_classes == 62 and data.train_size == 3
    assert data.y.tolist() == [61, 0, 5, 7]
    assert data.clients is not None and data.clients.tolist() == [1, 1, 0, 1]
    assert data.client_names == ("f1", "f2")


def test_femnist_values_that_are_no_bytes_stay_floats(tmp_path):
    x = np.linspace(-1, 1, 784)[None]
    write_leaf(tmp_path, leaf({"a": (x, [1])}), leaf({"a": (x, [1])}))
    data = femnist.load(root=str(tmp_path))
    assert data.x.dtype == np.float32 and data.x[0].ravel() == pytest.approx(x[0])
