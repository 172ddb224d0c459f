"""Any data set in a NumPy archive."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from pflsim.data.dataset import MAX_CLASSES, Dataset, described
from pflsim.data.sources.common import Standardize, finished, joined
from pflsim.data.targets import array_card, found_targets
from pflsim.errors import SettingsError, reading

KEYS = ("x_train", "y_train", "x_test", "y_test")
FORMS = ("x_{}", "y_{}"), ("{}_images", "{}_labels")
"""Names of inputs and labels by part: ours, and those of MedMNIST."""
CHANNELS = (1, 3, 4)
ImageLayout = Literal["auto", "hwc", "chw"]


def load(
    *,
    path: str | None = None,
    layout: ImageLayout = "auto",
    num_classes: Annotated[int, Ge(1), Le(MAX_CLASSES)] | None = None,
    vocabulary: int | None = None,
    standardize: Standardize = False,
) -> Dataset:
    """Load a .npz file with x_train, y_train, x_test and y_test, or with the keys of MedMNIST (train_images, ...).

    Validation arrays (x_val and y_val, or val_images and val_labels) are added to the training part, from which
    `split.validation` draws.

    Args:
        path: the file. x: uint8 (divided by 255, unless all values are 0 or 1) or floating point (used as it is, as
            float32), shaped [n, H, W], [n, H, W, C], [n, C, H, W] or [n, features]; or other integers from 0: token
            sequences [n, length], in which 0 is padding. y: classes from 0, [n] or [n, 1]; values, floating point [n]
            or [n, T]; or labels [n, L], 0 or 1, which are classes if every row has one 1.
        layout: layout of 4-D arrays: "hwc", "chw" or "auto", which detects the axis of channels by its length 1, 3 or
            4.
        num_classes: C; None: largest class + 1.
        vocabulary: of token sequences: the number of different tokens; None: largest token + 1.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [n, channels, height, width], [n, features] or [n, length]. The name is the file name without ".npz".

    Raises:
        SettingsError: the file does not exist or has invalid arrays.
    """
    if not path:
        raise SettingsError(f"data=npz needs data.path=FILE.npz with the arrays {', '.join(KEYS)}")
    expected = f"an .npz archive with {', '.join(KEYS)}, arrays of numbers"
    with reading(f"data.path={path}", expected), open(path, "rb") as file, np.load(file) as archive:
        form = next((form for form in FORMS if form[0].format("train") in archive), FORMS[0])
        parts = [part for part in ("train", "val", "test") if part != "val" or form[0].format(part) in archive]
        names = [tuple(each.format(part) for each in form) for part in parts]
        xs = [inputs(f"{path}: {x}", np.asarray(archive[x]), layout) for x, _ in names]
        ys, values = [np.asarray(archive[y]) for _, y in names], None
    if num_classes is None and (ys[0].size > len(ys[0]) or ys[0].dtype.kind == "f"):
        with reading(f"data.path={path}", "targets of the same form in all parts"):
            y = np.concatenate(ys)
        y, num_classes, values = found_targets(path, y)
        ys = np.split(y, np.cumsum([*map(len, ys)])[:-1])
    dataset = joined(Path(path).stem, list(zip(xs, ys, strict=True)), num_classes)
    dataset = replace(dataset, train_size=len(dataset.y) - len(xs[-1]))
    if vocabulary is not None and dataset.kind != "token sequences":
        raise SettingsError(f"data.vocabulary={vocabulary}: {dataset.name} has {dataset.kind}; leave it out")
    dataset = finished(replace(dataset, vocabulary=vocabulary, values=values), standardize)
    return replace(dataset, card=array_card(dataset))


def inputs(where: str, x: np.ndarray, layout: ImageLayout) -> np.ndarray:
    """Return inputs as [n, channels, height, width], [n, features] or int64 [n, length]."""
    tokens = x.dtype != np.uint8 and x.dtype.kind in "iu"
    if x.dtype.kind not in "iuf" or x.ndim not in ((2,) if tokens else (2, 3, 4)):
        raise SettingsError(
            f"{where} is {described(x)}, expected uint8 (0..255) or floating point [n, H, W], [n, H, W, C], "
            "[n, C, H, W] or [n, features], or integers from 0 [n, length]"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.int64 if tokens else np.float32)
    if x.ndim == 4:
        first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
        if layout == "auto" and first == last:
            raise SettingsError(
                f"{where} is {described(x)}; the axis of channels (length 1, 3 or 4) is ambiguous; "
                "set data.layout=hwc or data.layout=chw"
            )
        if layout == "hwc" or (layout == "auto" and last):
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x[:, None] if x.ndim == 3 else x
