"""The pictures of a page: who holds what, and the matrices of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.analysis.report.clients import shown_runs
from pflsim.analysis.results import Run
from pflsim.analysis.results.groups import Group
from pflsim.figures.heatmaps import by_kind, draw_heatmaps
from pflsim.figures.svg import png_uri, to_png
from pflsim.run_folder.diagnostics import read_diagnostics


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a data URI, what it shows in words, what is written under it, and whether it wants all the width."""

    uri: str
    alt: str
    caption: str
    wide: bool = False


def partition_pictures(groups: Sequence[Group]) -> list[Picture]:
    """partition.png of the shown runs, each partition once."""
    seen: dict[str, Run] = {}
    for run in shown_runs(groups):
        if (run.folder / "partition.png").is_file():
            seen.setdefault(run.partition_hash, run)
    return [
        Picture(
            png_uri((run.folder / "partition.png").read_bytes()),
            f"Examples of every client by split, and by class: number of clients {run.partition['clients']}, "
            f"{run.partition['classes']} classes",
            f"Seed {run.seed}: {run.partition['data']}, {run.partition['partition']}; partition {digest[:8]}.",
            wide=True,
        )
        for digest, run in seen.items()
    ]


def view_pictures(groups: Sequence[Group]) -> list[Picture]:
    """The views of every group's shown run, one picture for each kind of matrix; wide ones first."""
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
