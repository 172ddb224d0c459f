"""Writes the results of a run for TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.run_folder.diagnostics import Diagnostics
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import AccuracyStats, rows_by_scope
from pflsim.run_folder.summary import NewcomerFigures, Summary
from pflsim.run_folder.tracking.gallery import Gallery
from pflsim.run_folder.tracking.hyperparameters import begin, end
from pflsim.types import RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS: Any = np.linspace(0, 1, 31)
"""The bin edges of accuracy histograms."""

STATISTICS = tuple(f.name for f in fields(AccuracyStats) if f.name != "clients")


def scalars(metrics: RoundMetrics) -> dict[str, float]:
    """Return a round's scalars by tag. The number of tags does not depend on the number of clients.

    `<model>/<split>/<phase>/<statistic>`, `loss/<term>`, `drift/mean`, `drift/max`, `traffic/up_bytes_total`,
    `traffic/down_bytes_total`, `seconds/<phase>`. A round without evaluation has no accuracy tags.
    """
    values = {f"loss/{name}": value for name, value in metrics.losses.items()}
    for scope, stats in metrics.accuracy.items():
        values |= {"/".join((*scope, name)): getattr(stats, name) for name in STATISTICS}
    values |= {f"drift/{name}": value for name, value in metrics.drift.items()}
    values["traffic/up_bytes_total"] = metrics.traffic_total.up_bytes
    values["traffic/down_bytes_total"] = metrics.traffic_total.down_bytes
    return values | {f"seconds/{phase}": value for phase, value in metrics.seconds.items()}


class TensorBoard:
    """Writes each round to an event file, which TensorBoard shows during the run.

    Args:
        folder: the folder of the event files. Its parent may contain partition.png, which is shown too.
        resume_after: the round after which the run resumes; TensorBoard drops scalars of later rounds.
        hyperparameters: settings by dotted key, for the HPARAMS tab.
        per_client: whether to write scalars of every client.
    """

    def __init__(
        self,
        folder: Path,
        resume_after: int | None = None,
        hyperparameters: Mapping[str, bool | float | str] | None = None,
        per_client: bool = False,
    ):
        from torch.utils.tensorboard import SummaryWriter

        self._report = threading.excepthook
        threading.excepthook = self._report_others
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)
        self._per_client = per_client
        self._gallery = Gallery(self._draw)
        if hyperparameters:
            begin(self._writer, hyperparameters)
        self._has_hyperparameters = bool(hyperparameters)
        self._show_partition(folder.parent / "partition.png")

    def write(self, record: RoundRecord, metrics: RoundMetrics, memory_mb: float) -> None:
        """Write a round; `memory_mb` is the memory in use."""
        step = metrics.round
        for tag, value in scalars(metrics).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.add_scalar("memory/held_mb", memory_mb, step)
        gpu_bytes = max((report.gpu_bytes for report in record.reports), default=0)
        if gpu_bytes:
            self._writer.add_scalar("memory/gpu_peak_mb", gpu_bytes / 1e6, step)
        for scope, rows in rows_by_scope(record.evaluations).items():
            values = np.array([row.correct / row.total for row in rows])
            self._writer.add_histogram("/".join(("clients", *scope)), values, step, bins=BINS)
            for row in rows if self._per_client else ():
                tag = "/".join(("client", str(row.client), *scope))
                self._writer.add_scalar(tag, row.correct / row.total, step)
        if self._per_client:
            for client, distance in record.drift.items():
                self._writer.add_scalar(f"client/{client}/drift", distance, step)
        if record.diagnostics:
            self._gallery.show(Diagnostics(step, record.diagnostics))
        self._writer.flush()

    def write_newcomers(self, figures: NewcomerFigures, round_number: int) -> None:
        """Write the results of newcomers, as `newcomer/test/<phase>/<statistic>`."""
        for phase, stats in (("received", figures.received), ("trained", figures.trained)):
            for name in STATISTICS if stats is not None else ():
                self._writer.add_scalar(f"newcomer/test/{phase}/{name}", getattr(stats, name), round_number)
        self._writer.flush()

    def close(self, summary: Summary | None = None) -> None:
        """Write pending diagnostics and the final metrics, and close the event file."""
        self._gallery.close()
        if summary is not None and self._has_hyperparameters:
            end(self._writer, summary)
        self._writer.close()
        threading.excepthook = self._report

    def _report_others(self, error: threading.ExceptHookArgs) -> None:
        """Ignore what ends the writer's thread: the writer raises it again in the next call."""
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
            self._report(error)

    def _draw(self, kind: str, figure: Figure, round_number: int) -> None:
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())[:, :, :3]  # type: ignore[attr-defined]
        self._writer.add_image(f"diagnostics/{kind}", pixels, round_number, dataformats="HWC")

    def _show_partition(self, picture: Path) -> None:
        from PIL import Image

        if picture.is_file():
            with Image.open(picture) as image:
                self._writer.add_image("partition", np.asarray(image.convert("RGB")), 0, dataformats="HWC")
