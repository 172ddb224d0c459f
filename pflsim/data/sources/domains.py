"""Several image data sets as the domains of one: a client has examples of one domain."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pflsim.config.components import TARGET, bind, check_component, settings_of
from pflsim.config.names import some
from pflsim.config.settings import Count
from pflsim.data.dataset import Card, Dataset
from pflsim.data.sources.common import finished
from pflsim.data.sources.image_folder import Side
from pflsim.data.targets import as_task
from pflsim.errors import SettingsError

FOLDER = "pflsim.data.sources"
TORCHVISION = ("mnist", "fashion_mnist", "emnist", "usps", "svhn", "cifar10", "cifar100")
SOURCES = {name: f"{FOLDER}.torchvision_sets.{name}" for name in TORCHVISION} | {
    "digits": f"{FOLDER}.scikit_learn.digits",
    **{name: f"{FOLDER}.{name}.load" for name in ("femnist", "image_folder", "npz")},
}


def load(
    *,
    sources: list[str | dict[str, Any]] | None = None,
    clients: Count | list[Count] = 20,
    root: str = "data",
    download: bool = False,
    size: Side = 32,
    grayscale: bool = False,
    standardize: bool = False,
) -> Dataset:
    """Load image data sets as domains. Partition, split and their settings apply within each domain.

    Args:
        sources: the data sets, such as [mnist, usps, svhn], files FILE.npz, dotted names, or names with settings:
            [{emnist: {split: digits}}, {image_folder: {root: photos}}]. Classes of equal names are one class; those
            without names go by number, which a name of digits is beside them.
        clients: number of clients, spread evenly over the domains; or a list with the number of each domain.
        root: folder of data sets, for sources that do not set it.
        download: download missing files with torchvision.
        size: side length in pixels to which images are resized (bilinear).
        grayscale: one channel instead of three.
        standardize: standardise each channel with statistics of all training parts.

    Returns:
        x [n, 3 or 1, size, size], uint8, or float32 if a source is. The name is those of the sources; clients are
        called DOMAIN-0, DOMAIN-1, ...

    Raises:
        SettingsError: a source has no images or no classes, two have one name, or only some have names of classes,
            and their numbers of classes differ.
    """
    if not sources:
        raise SettingsError("data=domains needs data.sources=[NAME,NAME], for example [mnist,usps,svhn]")
    given = {"root": root, "download": download}
    parts = [_source(source, given) for source in sources]
    names = [part.name for part in parts]
    if len({*names}) < len(names):
        raise SettingsError(f"data.sources: the domains are called {', '.join(names)}; expected different names")
    counts = clients if isinstance(clients, list) else [len(own) for own in np.array_split(range(clients), len(parts))]
    if len(counts) != len(parts) or not all(counts):
        raise SettingsError(f"data.clients: {counts} clients in {len(parts)} domains; expected one or more in each")
    floats = any(part.x.dtype == np.float32 for part in parts)
    xs = [_images(part, size, 1 if grayscale else 3, floats) for part in parts]
    classes, ys, said = _joined_classes(parts)
    ids = [np.full(len(part.y), i) for i, part in enumerate(parts)]
    tested = np.concatenate([np.arange(len(part.y)) >= part.train_size for part in parts])
    x, y, ids = (np.concatenate(each)[np.argsort(tested, kind="stable")] for each in (xs, ys, ids))
    training = sum(part.train_size for part in parts)
    own: dict[str, Any] = {"clients": ids, "client_names": tuple(names), "domains": tuple(counts)}
    own["values"] = tuple(classes) if any(part.values for part in parts) else None
    alpha = [f"{part.name}: the fourth channel of its images is left out" for part in parts if part.x.shape[1] > 3]
    own["notes"] = (*(note for part in parts for note in part.notes), *alpha, *said)
    own["card"] = Card(tuple((f"{what} of {part.name}", text) for part in parts for what, text in part.card.lines))
    return finished(Dataset("+".join(names), x, y, len(classes), training, **own), standardize)


def _joined_classes(parts: list[Dataset]) -> tuple[list[Any], list[np.ndarray], list[str]]:
    """Return the classes of all sources in sorted order, the numbers of each source's targets, and a warning.

    Classes are equal if their names are. Beside a source with numbers, names that are all whole numbers are numbers;
    otherwise its classes get the names of the others, in sorted order.
    """
    own: list[Sequence[Any]] = [part.values or range(part.num_classes) for part in parts]
    named = [values for values in own if all(isinstance(value, str) for value in values)]
    mixed = named and len(named) < len(own)
    if mixed and all(re.fullmatch(r"0|[1-9]\d*", name) for values in named for name in values):
        own = [[*map(int, values)] for values in own]
    elif mixed and (len({*map(len, own)}) > 1 or len({*map(tuple, named)}) > 1):
        said = ", ".join(f"{part.name} has {len(values)}" for part, values in zip(parts, own, strict=True))
        raise SettingsError(f"data.sources: classes with and without names need equal numbers of classes: {said}")
    elif mixed:
        own = [values if values in named else named[0] for values in own]
    classes = sorted({value for values in own for value in values})
    place = {value: number for number, value in enumerate(classes)}
    ys = [np.array([place[v] for v in values])[part.y] for part, values in zip(parts, own, strict=True)]
    lacking = [some((c for c in classes if c not in values), 10) for values in own]
    said = ", ".join(f"{part.name} lacks {names}" for part, names in zip(parts, lacking, strict=True) if names)
    return classes, ys, [f"the sources have different classes: {said}"] if said else []


def _source(source: str | dict[str, Any], given: dict[str, Any]) -> Dataset:
    """Return the data set of a name, of a file, or of a name with settings."""
    if isinstance(source, str):
        source = {"npz": {"path": source}} if source.endswith(".npz") else {source: {}}
    ((name, own),) = source.items()
    node = {TARGET: SOURCES.get(name, name)}
    known = settings_of({"": node[TARGET]}, "data")
    node |= {key: value for key, value in given.items() if key in known} | (own or {})
    dataset = as_task(bind(check_component(node, "data"), "data")(), "auto")
    if dataset.kind != "images" or dataset.task != "classification":
        raise SettingsError(f"data.sources: {name} has {dataset.kind} for {dataset.task}; expected classes of images")
    return dataset


def _images(dataset: Dataset, size: int, channels: int, floats: bool) -> np.ndarray:
    """Return images [n, channels, size, size] in one range: uint8 from 0 to 255, or float32 from 0 to 1."""
    from torchvision.transforms.v2.functional import resize, rgb_to_grayscale

    x = torch.from_numpy(dataset.x)[:, :3]
    if dataset.x.dtype == np.uint8 and (dataset.scale != 255 or floats):
        x = x / dataset.scale if floats else (x * (255 / dataset.scale)).round().to(torch.uint8)
    x = torch.cat([resize(part, [size, size], antialias=True) for part in x.split(4096)])
    if channels == 1:
        return rgb_to_grayscale(x).numpy() if x.shape[1] == 3 else x.numpy()
    return x.expand(-1, 3, -1, -1).contiguous().numpy()
