"""Writes the results of a run for TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.records.diagnostics import Diagnostics
from pflsim.records.metrics import Scope, rows_by_scope
from pflsim.records.summary import NewcomerFigures
from pflsim.records.tracking.gallery import Gallery
from pflsim.records.tracking.hyperparameters import begin, end
from pflsim.types import RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS: Any = np.linspace(0, 1, 31)
"""The bin edges of accuracy histograms."""


class TensorBoard:
    """Writes each round to an event file, which TensorBoard shows during the run.

    Args:
        folder: the run folder. It may contain partition.png, which is shown too.
        reported: the scope that the method reports.
        resume_after: the round after which the run resumes; TensorBoard drops scalars of later rounds.
        hyperparameters: settings by dotted key, for the HPARAMS tab.
    """

    def __init__(
        self,
        folder: Path,
        reported: Scope,
        resume_after: int | None = None,
        hyperparameters: Mapping[str, float | str] | None = None,
    ):
        from torch.utils.tensorboard import SummaryWriter

        self._report = threading.excepthook
        threading.excepthook = self._report_others
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)
        self._gallery = Gallery(self._draw)
        if hyperparameters:
            begin(self._writer, hyperparameters, reported)
        self._has_hyperparameters = bool(hyperparameters)
        self._show_partition(folder / "partition.png")

    def write(self, record: RoundRecord, scalars: Mapping[str, float]) -> None:
        """Write a round and its scalars by tag."""
        step = record.round
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        for scope, rows in rows_by_scope(record.evaluations).items():
            values = np.array([row.correct / row.total for row in rows])
            self._writer.add_histogram("/".join(("clients", *scope)), values, step, bins=BINS)
        if record.diagnostics:
            self._gallery.show(Diagnostics(step, record.diagnostics))
        self._writer.flush()

    def write_newcomers(self, figures: NewcomerFigures, round_number: int) -> None:
        """Write the results of newcomers as a table."""
        found = {"as received": figures.received, "after training": figures.trained}
        columns = {phase: stats.values() for phase, stats in found.items() if stats is not None}
        lines = [f"| accuracy | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name in next(iter(columns.values()), ()):
            lines.append(f"| {name} | {' | '.join(f'{stats[name]:.4g}' for stats in columns.values())} |")
        self._writer.add_text("newcomers", "\n".join(lines), round_number)
        self._writer.flush()

    def close(self, complete: bool = False) -> None:
        """Write pending diagnostics and whether the run is complete, and close the event file."""
        self._gallery.close()
        if complete and self._has_hyperparameters:
            end(self._writer)
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
