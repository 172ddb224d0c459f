"""Writes partition.json and partition.png, a picture of examples per client above and class counts per client below."""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from pflsim.config.components import component_name
from pflsim.config.settings import Settings
from pflsim.data.content import partition_hash
from pflsim.data.dataset import BINS, Dataset, dataset_warnings
from pflsim.data.federated import Partition, class_counts
from pflsim.data.shifts import Shift
from pflsim.errors import SettingsError
from pflsim.records.heatmaps import drawing
from pflsim.types import SPLITS, Split

DATA_CARD = "data_card.json"
ENCODER = "encoder.joblib"
"""Maps the rows of a table or texts to inputs."""
LONGEST = 24
"""Characters of a client's name in a figure; the rest is cut off."""
COLOURS: Mapping[Split, str] = {"train": "#2f6db8", "val": "#7da9de", "test": "#c3cbd6"}
MUTED = "#5b626e"


def write_partition(
    folder: Path, dataset: Dataset, partition: Partition, names: Mapping[str, str], task: dict[str, Any] | None = None
) -> str:
    """Write partition.json (hash, names, sizes, inputs, class counts and rows per client, its shift) and partition.png.

    The rows count through the file of the training part and then that of the test part, so partition.json is a file for
    `pflsim.data.explicit`. data_card.json says what was read, if the data set has a card.

    Args:
        folder: the output folder; created if missing.
        dataset: the data set.
        partition: its partition.
        names: `partition`, `split` and `shift` with their settings, see `record_names`.
        task: `Task.record` of the run.

    Returns:
        The partition's hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = partition_hash(dataset, partition)
    counts: dict[Split, np.ndarray] = {name: class_counts(dataset, partition, name) for name in SPLITS}
    clients = range(partition.clients)
    inputs = {name: getattr(dataset, name) for name in ("scale", "mean", "std", "tokens", "fields")}
    head = {
        "hash": digest,
        "data": dataset.name,
        "partition": names["partition"],
        "split": names["split"],
        "clients": len(clients),
        "classes": dataset.by_class().num_classes,
        "examples": {name: int(c.sum()) for name, c in counts.items()},
        "numbering": "file",
        "inputs": {"shape": dataset.input_shape, "dtype": dataset.x.dtype.name, **inputs},
    }
    if task:
        head["task"] = task
    if partition.names:
        head["names"] = list(partition.names)
    if dataset.values:
        head["values"] = [str(value) for value in dataset.values]
    if partition.shift.groups:
        head["shift"] = {"name": names["shift"], **partition.shift.record()}
        head["unshifted_hash"] = partition_hash(dataset, replace(partition, shift=Shift()))
    head["class_counts"] = [{"client": i} | {name: c[i].tolist() for name, c in counts.items()} for i in clients]
    numbers = np.arange(len(dataset.y)) if dataset.rows is None else dataset.rows
    head |= {name: [numbers[rows].tolist() for rows in getattr(partition, name)] for name in SPLITS}
    lines = ",\n  ".join(f"{json.dumps(key)}: {_line_by_line(value)}" for key, value in head.items())
    (folder / "partition.json").write_text(f"{{\n  {lines}\n}}\n", encoding="utf-8")
    title = ", ".join(filter(None, (dataset.name, names["partition"], names["split"], names["shift"])))
    if dataset.card.lines:
        text = json.dumps(dataset.card.record(), indent=1, ensure_ascii=False)
        (folder / DATA_CARD).write_text(f"{text}\n", encoding="utf-8")
    if dataset.encoder:
        (folder / ENCODER).write_bytes(dataset.encoder)
    with drawing():
        figure = partition_figure(counts, title, partition.shift.groups, partition.names)
        figure.savefig(folder / "partition.png", dpi=100)
    return digest


def write_federation(settings: Settings, folder: Path) -> tuple[Dataset, Partition]:
    """Load and partition the data of a run, write the partition to a folder, and print warnings about the data.

    Raises:
        SettingsError: see `load_federation`, or the folder has a partition.
    """
    from pflsim.data.federate import load_federation

    if (folder / "partition.json").exists():
        raise SettingsError(f"{folder} has a partition.json, and files are not overwritten; give another into=FOLDER")
    dataset, partition = load_federation(settings)
    if dataset.card.lines:
        print(dataset.card)
    for warning in dataset_warnings(dataset):
        print(f"warning: {warning}", file=sys.stderr)
    write_partition(folder, dataset, partition, record_names(settings))
    return dataset, partition


def sizes(dataset: Dataset, partition: Partition) -> str:
    """Return a table of the examples and classes per client, in a few lines."""
    counts = {name: class_counts(dataset, partition, name) for name in SPLITS}
    columns = {f"{name} examples": c.sum(axis=1) for name, c in counts.items()}
    columns["classes"] = ((counts["train"] + counts["val"]) > 0).sum(axis=1)
    lines = [[name, each.min(), np.median(each), each.max(), each.sum()] for name, each in columns.items()]
    table = tabulate(lines, (f"{partition.clients} clients", "min", "median", "max", "sum"), "plain")
    return f"{table}\nhash {partition_hash(dataset, partition)}"


def record_names(settings: Settings) -> dict[str, str]:
    """Return partition, split and shift with their settings: `dirichlet(alpha=0.1)`.

    Given rows need no split, so its name is "", as that of no shift.
    """
    names = {group: component_name(settings, group) for group in ("partition", "split", "shift")}
    if names["partition"] == "explicit":
        names["split"] = ""
    if names["shift"] == "none":
        names["shift"] = ""
    for group, name in names.items():
        asked = getattr(settings, group).items()
        given = {key: value for key, value in asked if not key.startswith("_") and value is not None}
        if given.get("bins") == BINS:  # of regression only
            del given["bins"]
        chosen = ", ".join(f"{key}={value}" for key, value in given.items())
        names[group] = f"{name}({chosen})" if name and chosen else name
    return names


def _line_by_line(value: object) -> str:
    """Return JSON: a list of lists or mappings with one line per item."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n  ]"


def partition_figure(
    counts: Mapping[Split, np.ndarray], title: str = "", groups: Sequence[int] = (), names: Sequence[str] = ()
) -> Any:
    """Draw a stacked bar of train/val/test examples per client, below it its group, and below that a tile per class.

    The shade of a tile is the client's number of training and validation examples of the class on a logarithmic scale;
    none has no shade. Small pictures show the numbers.

    Args:
        counts: [N, C] int by split, from `pflsim.data.federated.class_counts`.
        title: the figure's title.
        groups: the group of each client in a shift, shown as a row of colours; () if there is none.
        names: of the clients; () if they have none. The figure has room for 60.

    Returns:
        A matplotlib `Figure`.
    """
    from matplotlib.figure import Figure

    clients, classes = counts["train"].shape
    width, height = min(max(6.0, 2.2 + 0.45 * clients), 14.0), 3.0 + min(max(1.5, 0.25 * classes), 7.0)
    names = [name[:LONGEST] for name in names] if clients <= 60 else []
    bottom = 0.5 + 0.07 * max(map(len, names), default=0)
    height += bottom - 0.5
    figure = Figure(figsize=(width, height))
    margins = {"left": 0.75 / width, "right": 1 - 0.65 / width, "bottom": bottom / height, "top": 1 - 0.45 / height}
    heights = (1, *([0.1] if groups else []), 1.2 + classes / 14)
    widths, gaps = (60, 1), {"hspace": 0.08, "wspace": 0.04}
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights, width_ratios=widths, **gaps, **margins)
    tiles = figure.add_subplot(grid[-1, 0])
    bars = figure.add_subplot(grid[0, 0], sharex=tiles)
    _draw_bars(bars, counts)
    if groups:
        _draw_groups(figure.add_subplot(grid[1, 0], sharex=tiles), groups)
    _draw_tiles(figure, tiles, figure.add_subplot(grid[-1, 1]), counts["train"] + counts["val"])
    if names:
        tiles.set_xticks(range(clients), names, rotation=90, fontsize=7)
    for axes in figure.axes:
        axes.tick_params(labelsize=8, labelcolor=MUTED, color=MUTED)
        axes.spines[:].set_color(MUTED)
    bars.set_title(textwrap.fill(title, round(14 * width)), fontsize=8, loc="left", color=MUTED)
    return figure


def _draw_bars(axes: Any, counts: Mapping[Split, np.ndarray]) -> None:
    clients = len(counts["train"])
    base = np.zeros(clients)
    for name, colour in COLOURS.items():
        height = counts[name].sum(axis=1)
        if height.any() and clients <= 60:
            axes.bar(np.arange(clients), height, 0.85, bottom=base, color=colour, label=name, linewidth=0)
        elif height.any():  # one shape for all clients
            lower, upper = (np.append(each, each[-1]) for each in (base, base + height))
            style = {"step": "post", "color": colour, "label": name, "linewidth": 0}
            axes.fill_between(np.arange(clients + 1) - 0.5, lower, upper, **style)
        base += height
    axes.set_ylabel("examples")
    axes.set_ylim(0, base.max() * 1.22)
    axes.tick_params(labelbottom=False)
    axes.legend(ncols=3, loc="upper right", fontsize=8, frameon=False, borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_groups(axes: Any, groups: Sequence[int]) -> None:
    axes.imshow([groups], aspect="auto", cmap="Set3", interpolation="none")
    axes.set_yticks([0], ["group"])
    axes.tick_params(labelbottom=False, bottom=False, left=False)
    for client, group in enumerate(groups if len(groups) <= 60 else ()):
        axes.text(client, 0, str(group), ha="center", va="center", fontsize=7, color="black")


def _draw_tiles(figure: Any, axes: Any, bar_axes: Any, held: np.ndarray) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import MaxNLocator

    clients, classes = held.shape
    top = max(int(held.max()), 2)
    shown = np.ma.masked_equal(held.T, 0)
    norm = LogNorm(0.5, top)
    blues = LinearSegmentedColormap.from_list("blues", ["#2f6db833", "#2f6db8"])  # more opaque: also for dark pages
    image = axes.imshow(shown, aspect="auto", cmap=blues, norm=norm, interpolation="none")
    axes.set_xlabel("client")
    axes.set_ylabel("class (train + val)")
    for axis, size in ((axes.xaxis, clients), (axes.yaxis, classes)):
        axis.set_major_locator(MaxNLocator(min(size, 20), integer=True))
    axes.set_xlim(-0.5, clients - 0.5)
    axes.spines[:].set_visible(False)
    if clients <= 60:
        axes.vlines(np.arange(1, clients) - 0.5, -0.5, classes - 0.5, color="#d8dee4", linewidth=0.6)
    if classes <= 30:
        axes.hlines(np.arange(1, classes) - 0.5, -0.5, clients - 0.5, color="#d8dee4", linewidth=0.6)
    if clients <= 24 and classes <= 20:
        for client, c in np.argwhere(held > 0):
            colour = "white" if held[client, c] > top**0.6 else "black"
            axes.text(client, c, str(held[client, c]), ha="center", va="center", fontsize=7, color=colour)
        bar_axes.set_axis_off()
    else:
        figure.colorbar(image, cax=bar_axes, format="%d").minorticks_off()
