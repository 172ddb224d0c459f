"""Data sets from Python objects: torch data sets, arrays and Hugging Face data sets; frames are `pflsim.Table`s."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pflsim.data.dataset import MASKED, Dataset
from pflsim.data.sources.common import finished, joined
from pflsim.data.sources.npz import ImageLayout, inputs
from pflsim.data.sources.pictures import shown
from pflsim.data.targets import array_card, found_targets
from pflsim.errors import SettingsError, reading

LABEL = "label"
"""Column of the labels in tables."""
IMAGES = ("image", "img")
"""Columns of the inputs in Hugging Face data sets; otherwise the only other column."""


def as_dataset(
    train: Any, test: Any = None, name: str = "data", *, layout: ImageLayout = "auto", standardize: bool = False
) -> Dataset:
    """Return the data of Python objects as a data set. Rows keep their order.

    Args:
        train: the training part, one of

            - a pair (x, y) of arrays or tensors: x as in `pflsim.data.sources.npz.load`, y [n] or [n, T];
            - a map-style torch `Dataset`, or a list, of items (x, y), where x is a tensor [C, H, W] or [F], an array
              or a PIL image, used as a viewer shows it, on white; each item is read once, so random transforms are
              applied once;
            - a Hugging Face data set with the column `label` and a column `image`, or one other column.

            A mapping with the keys "train" and "test", such as a `DatasetDict`, holds both parts.
        test: the test part, of any of these kinds. None: there is none, which needs split=merged, split=counts or
            partition=explicit.
        name: the name in records.
        layout: layout of images in arrays: "hwc", "chw" or "auto"; see `pflsim.data.sources.npz.load`.
        standardize: standardise each channel (or feature) with statistics of the training part.

    Returns:
        The data set, see `pflsim.data.targets.found_targets`. Classes that are text, or that do not begin at 0, are
        numbered in sorted order.

    Raises:
        SettingsError: an object is of no such kind, or holds invalid values.
    """
    if test is None and isinstance(train, Mapping) and {"train", "test"} <= set(train):
        train, test = train["train"], train["test"]
    if isinstance(train, Mapping):
        keys = ", ".join(map(str, train))
        raise SettingsError(f"{name}: the mapping has {keys}; expected train and test, or no mapping")
    given = {"training": train} if test is None else {"training": train, "test": test}
    with reading(name, "dense arrays or tensors of numbers, or a map-style data set"):
        xs, ys = zip(*(_arrays(f"{name}: {which} part", part, layout) for which, part in given.items()), strict=True)
    y, classes, values = found_targets(name, np.concatenate(ys))
    dataset = joined(name, list(zip(xs, np.split(y, [len(ys[0])]), strict=False)), classes)
    dataset = finished(dataclasses.replace(dataset, values=values), standardize)
    return dataclasses.replace(dataset, card=array_card(dataset))


def _arrays(where: str, part: Any, layout: ImageLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [n, ...] uint8, float32 or int64 and labels [n] as given."""
    given: Any = part
    if any(hasattr(each, "iloc") for each in (given, *(given[:1] if isinstance(given, tuple) else ()))):
        raise SettingsError(f"{where} is a frame; expected pflsim.Table(frame, label=COLUMN)")
    if hasattr(part, "features") and hasattr(part, "column_names"):
        image = _image_column(where, part.column_names)
        x, y, layout = _stacked(where, ((row[image], row[LABEL]) for row in part), layout)
    elif isinstance(part, tuple) and len(part) == 2:
        x, y = (_array(where, each) for each in part)
    elif hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        x, y, layout = _stacked(where, (part[row] for row in range(len(part))), layout)
    else:
        raise SettingsError(
            f"{where} is a {type(part).__name__}; expected a pair (x, y) of arrays, a map-style torch Dataset "
            "or a Hugging Face data set"
        )
    return inputs(where, x, layout), y


def _array(where: str, value: Any) -> np.ndarray:
    """Return a tensor, a PIL image, an array or a list as an array."""
    parts: Any = value
    if any(map(np.ma.is_masked, parts if isinstance(parts, list) else [parts])):
        raise SettingsError(f"{where}: {MASKED}")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    if hasattr(value, "getbands") and value.mode != "F":
        value = shown(value)
    return np.asarray(value)


def _image_column(where: str, columns: list[str]) -> str:
    others = [column for column in columns if column != LABEL]
    found = [column for column in IMAGES if column in others] or others
    if LABEL not in columns or not found or (len(found) > 1 and found[0] not in IMAGES):
        names = ", ".join(columns)
        raise SettingsError(f"{where} has the columns {names}; expected image and label: rename two columns")
    return found[0]


def _stacked(where: str, items: Iterable[Any], layout: ImageLayout) -> tuple[np.ndarray, np.ndarray, ImageLayout]:
    """Return the inputs and labels of items (x, y), and the layout of the inputs."""
    xs, ys = list[np.ndarray](), list[Any]()
    with reading(where, "pairs (x, y), with inputs of one shape: data=((x, y), (x_test, y_test))"):
        for x, y in items:
            if not xs and layout == "auto":
                layout = "chw" if hasattr(x, "detach") else "hwc" if hasattr(x, "getbands") else "auto"
            xs.append(_array(where, x))
            ys.append(_array(where, y).tolist())
        if len(kinds := {x.dtype.name for x in xs}) > 1 and "uint8" in kinds:  # from 0 to 255, beside other ranges
            raise TypeError(f"inputs are {' and '.join(sorted(kinds))}")
        return np.stack(xs), np.asarray(ys), layout
