"""The pictures of a page: who holds what, and the matrices of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.figures.heatmaps import by_kind, draw_heatmaps
from pflsim.figures.svg import png_uri, to_png
from pflsim.report.clients import shown_runs
from pflsim.results import Run
from pflsim.results.groups import Group
from pflsim.views import Matrix, read_views


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a data URI, what it shows in words, and what is written under it."""

    uri: str
    alt: str
    caption: str


def partition_pictures(groups: Sequence[Group]) -> list[Picture]:
    """partition.png of the shown runs, each partition once."""
    seen: dict[str, Run] = {}
    for run in shown_runs(groups):
        if (run.folder / "partition.png").is_file():
            seen.setdefault(run.partition_hash, run)
    return [
        Picture(
            png_uri((run.folder / "partition.png").read_bytes()),
            f"Examples of every client by split, and by class: {run.partition['clients']} clients, "
            f"{run.partition['classes']} classes",
            f"Seed {run.seed}: {run.partition['data']}, {run.partition['partition']}; partition {digest[:8]}.",
        )
        for digest, run in seen.items()
    ]


def view_pictures(groups: Sequence[Group]) -> list[Picture]:
    """The views of every group's shown run, one picture for each kind of matrix."""
    pictures = []
    for group, run in zip(groups, shown_runs(groups), strict=True):
        views = read_views(run.folder)
        if views is None:
            continue
        for matrices in by_kind(views.matrices).values():
            alike = matrices[0]
            what = f"{group.label}, seed {run.seed}, round {views.round}: {_title(matrices)}"
            alt = f"Heat map, {alike.rows.label} by {alike.columns.label}. {what}"
            pictures.append(Picture(to_png(draw_heatmaps(matrices, title=_title(matrices)), dpi=100), alt, f"{what}."))
    return pictures


def _title(matrices: Sequence[Matrix]) -> str:
    """What all have in common: the title of one, or the beginnings of all titles that are the same."""
    titles = [matrix.title for matrix in matrices]
    if len(set(titles)) == 1:
        return titles[0]
    words = [title.split() for title in titles]
    common = []
    for same in zip(*words, strict=False):
        if len(set(same)) > 1:
            break
        common.append(same[0])
    return " ".join(common).rstrip(" ,:;(") or matrices[0].name.partition("/")[0]
