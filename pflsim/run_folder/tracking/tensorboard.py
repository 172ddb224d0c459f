"""What a run shows in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.run_folder.diagnostics import Diagnostics
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import Scope
from pflsim.run_folder.summary import NewcomerFigures, Summary
from pflsim.run_folder.tracking.gallery import Gallery
from pflsim.run_folder.tracking.hyperparameters import begin, end
from pflsim.run_folder.tracking.scalars import STATISTICS, scalars
from pflsim.types import RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS: Any = np.linspace(0, 1, 31)
"""Edges of the histograms of rates, the same in every round so that they can be compared."""


class TensorBoard:
    """Writes each round into an event file that TensorBoard follows live.

    Args:
        folder: where the event files are; the partition's picture lies beside it.
        resume_after: the round after which this one goes on; readers that have points of later ones drop them.
        hyperparameters: the run's settings by dotted name, for the table of runs.
        per_client: whether every client has curves of its own.
    """

    def __init__(
        self,
        folder: Path,
        resume_after: int | None = None,
        hyperparameters: Mapping[str, bool | float | str] | None = None,
        per_client: bool = False,
    ):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)
        self._per_client = per_client
        self._gallery = Gallery(self._draw)
        if hyperparameters:
            begin(self._writer, hyperparameters)
        self._has_hyperparameters = bool(hyperparameters)
        self._show_partition(folder.parent / "partition.png")

    def write(self, record: RoundRecord, metrics: RoundMetrics, memory_mb: float) -> None:
        """Append a round."""
        step = metrics.round
        for tag, value in scalars(metrics).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.add_scalar("memory/held_mb", memory_mb, step)
        on_gpus = max((report.gpu_bytes for report in record.reports), default=0)
        if on_gpus:
            self._writer.add_scalar("memory/gpu_peak_mb", on_gpus / 1e6, step)
        for scope, rates in _rates(record).items():
            values = np.array(list(rates.values()))
            self._writer.add_histogram("/".join(("clients", *scope)), values, step, bins=BINS)
            if self._per_client:
                for client, rate in rates.items():
                    self._writer.add_scalar("/".join(("client", str(client), *scope)), rate, step)
        if self._per_client:
            for client, distance in record.drift.items():
                self._writer.add_scalar(f"client/{client}/drift", distance, step)
        if record.diagnostics:
            self._gallery.show(Diagnostics(step, record.diagnostics))
        self._writer.flush()

    def write_newcomers(self, figures: NewcomerFigures, round_number: int) -> None:
        """Append what newcomers came to, as `newcomer/test/<phase>/<statistic>`."""
        for phase, stats in (("received", figures.received), ("trained", figures.trained)):
            for name in STATISTICS if stats is not None else ():
                self._writer.add_scalar(f"newcomer/test/{phase}/{name}", getattr(stats, name), round_number)
        self._writer.flush()

    def close(self, summary: Summary | None = None) -> None:
        """Write what is left, and what the run came to, and close the event file."""
        self._gallery.close()
        if summary is not None and self._has_hyperparameters:
            end(self._writer, summary)
        self._writer.close()

    def _draw(self, kind: str, figure: Figure, round_number: int) -> None:
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())[:, :, :3]  # type: ignore[attr-defined]
        self._writer.add_image(f"diagnostics/{kind}", pixels, round_number, dataformats="HWC")

    def _show_partition(self, picture: Path) -> None:
        from PIL import Image

        if picture.is_file():
            with Image.open(picture) as image:
                self._writer.add_image("partition", np.asarray(image.convert("RGB")), 0, dataformats="HWC")


def _rates(record: RoundRecord) -> dict[Scope, dict[int, float]]:
    """The clients' rates by scope."""
    found: dict[Scope, dict[int, float]] = {}
    for row in record.evaluations:
        if row.total > 0:
            found.setdefault(Scope(row.model, row.split, row.phase), {})[row.client] = row.correct / row.total
    return found
