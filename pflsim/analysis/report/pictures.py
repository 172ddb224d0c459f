"""The pictures of a report: partitions, and matrices of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.analysis.report.clients import shown_runs
from pflsim.analysis.results import Group, Run
from pflsim.figures.heatmaps import by_kind, draw_heatmaps
from pflsim.figures.svg import png_uri, to_png
from pflsim.run_folder.diagnostics import read_diagnostics


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a data URI with its alternative text and caption; wide pictures take the width of the page."""

    uri: str
    alt: str
    caption: str
    wide: bool = False


def partition_pictures(groups: Sequence[Group]) -> list[Picture]:
    """Return partition.png of every different partition among the shown runs."""
    seen: dict[str, Run] = {}
    for run in shown_runs(groups):
        if (run.folder / "partition.png").is_file():
            seen.setdefault(run.partition_hash, run)
    return [
        Picture(
            png_uri((run.folder / "partition.png").read_bytes()),
            f"Examples of {run.partition['clients']} clients by split and by {run.partition['classes']} classes",
            f"Seed {run.seed}: {run.partition['data']}, {run.partition['partition']}; partition {digest[:8]}.",
            wide=True,
        )
        for digest, run in seen.items()
    ]


def matrix_pictures(groups: Sequence[Group]) -> list[Picture]:
    """Return the matrices of every group's shown run, one picture for each kind; wide pictures come first."""
    pictures = []
    for group, run in zip(groups, shown_runs(groups), strict=True):
        diagnostics = read_diagnostics(run.folder)
        if diagnostics is None:
            continue
        for matrices in by_kind(diagnostics.matrices).values():
            first = matrices[0]
            what = f"{group.label}, seed {run.seed}, round {diagnostics.round}: {first.title}"
            alt = f"Heat map, {first.rows.label} by {first.columns.label}. {what}"
            pictures.append(Picture(to_png(draw_heatmaps(matrices), dpi=100), alt, f"{what}.", len(matrices) > 1))
    return sorted(pictures, key=lambda picture: not picture.wide)
