"""Draws mixing weights of traced rounds, as pFedLA's Figures 1, 5, 6 and 7: `python -m benchmarks.studies.weights`.

Without `--client`, a map for each layer of the last traced round, receivers by clients. With it, a map for each traced
round of each run, layers by clients: what that receiver takes from whom. Layers are named as in the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from safetensors.numpy import load_file

from pflsim.analysis.runs import Run, find_runs, read_run
from pflsim.display.pictures import draw_heatmaps
from pflsim.errors import SettingsError
from pflsim.terminal.exit_status import exit_status
from pflsim.types import Axis, Matrix

PREFIX = "alpha/"


def layer_maps(run: Run) -> list[Matrix]:
    """Return α [N, N] of each layer in the last traced round, a row per receiver."""
    *_, (number, weights) = traced(run)
    axes = Axis("receiver"), Axis("client")
    title = f"{run.name}, round {number}"
    return [Matrix(f"{PREFIX}{layer}", title, *axes, alpha) for layer, alpha in weights.items()]


def client_maps(run: Run, client: int) -> list[Matrix]:
    """Return α [L, N] of one receiver in each traced round, a row per layer."""
    return [
        Matrix(
            f"{PREFIX}{run.name}, round {number}",
            f"Weights for client {client}",
            Axis("layer", tuple(weights)),
            Axis("client"),
            np.stack([alpha[client] for alpha in weights.values()]),
        )
        for number, weights in traced(run)
    ]


def traced(run: Run) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the traced rounds with their α [N, N] by layer.

    Raises:
        SettingsError: there is none.
    """
    files = sorted(run.folder.glob("trace/round_*/server.safetensors"))
    if not files:
        raise SettingsError(f"{run.folder}: no round was traced; set trace.rounds=[600]")
    for file in files:
        found = {key: alpha for key, alpha in load_file(file).items() if key.startswith(PREFIX)}
        number = int(file.parent.name.removeprefix("round_"))
        yield number, {key.removeprefix(PREFIX).removeprefix("net."): alpha for key, alpha in found.items()}


def accuracy_curves(runs: Sequence[Run], client: int) -> Figure:
    """Draw the test accuracy of a client's personal model as received, by round, with a line per run."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        rows = run.per_client().query("client == @client and split == 'test' and model == 'personal'")
        rows = rows[rows["phase"] == "received"]
        axes.plot(rows["round"], rows["accuracy"], label=run.name)
    axes.set(xlabel="round", ylabel=f"test accuracy of client {client}")
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figures; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.weights", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, folders of runs or patterns")
    parser.add_argument("--client", type=int, help="draw the weights for this receiver alone")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="also draw the client's accuracy by round")
    given = parser.parse_args(arguments)
    return exit_status(lambda: _draw(given.runs, given.client, given.out, given.curves))


def _draw(folders: Sequence[str], client: int | None, out: Path, curves: Path | None) -> None:
    runs = [read_run(folder) for folder in find_runs(folders)]
    maps = [m for run in runs for m in (layer_maps(run) if client is None else client_maps(run, client))]
    draw_heatmaps(maps, maps[0].title).savefig(out, dpi=150)
    if curves:
        accuracy_curves(runs, client or 0).savefig(curves, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
