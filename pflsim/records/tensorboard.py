"""Writes the results of a run for TensorBoard."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.display.pictures import draw_heatmaps, drawing
from pflsim.records.evaluation import Scope, grouped, rows_by_scope
from pflsim.records.scalars import best_tag
from pflsim.records.trace import RoundMatrices
from pflsim.types import RoundRecord

logger = logging.getLogger(__name__)
BINS: Any = np.linspace(0, 1, 31)
"""The bin edges of accuracy histograms."""
SHARE = 0.01
"""The maximum share of the run's time to spend on drawing matrices."""
EXPECTED_S = 0.3
"""The expected seconds of the first drawing."""


class TensorBoard:
    """Writes each round to an event file, which TensorBoard shows during the run.

    Skips the matrices of a round if drawing them would exceed its share of the time. Those of the last round are always
    drawn, at the end if necessary.

    Args:
        folder: the run folder. It may contain partition.png, which is shown too.
        reported: the scope that the method reports.
        resume_after: the round after which the run resumes; TensorBoard drops scalars of later rounds.
        primary: the primary metric of the run.
    """

    def __init__(self, folder: Path, reported: Scope, resume_after: int | None = None, primary: str = "accuracy"):
        from PIL import Image
        from torch.utils.tensorboard import SummaryWriter

        self._reported, self._primary = reported, primary
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)
        self._pending: RoundMatrices | None = None
        self._next_drawing = time.perf_counter() + EXPECTED_S / SHARE
        if (picture := folder / "partition.png").is_file():
            with Image.open(picture) as image:
                self._writer.add_image("partition", np.asarray(image.convert("RGB")), 0, dataformats="HWC")

    def hyperparameters(self, values: Mapping[str, float | str]) -> None:
        """Write settings by dotted key for the HPARAMS tab, which shows the curves' last values beside them."""
        from torch.utils.tensorboard.summary import hparams

        best, traffic = best_tag(self._primary), ("traffic/up_bytes_total", "traffic/down_bytes_total")
        tags = (f"{best}/mean", f"{best}/worst_decile", "/".join((self._primary, *self._reported)), *traffic)
        for summary in hparams(dict(values), dict.fromkeys(tags, 0.0)):  # `add_hparams` would make another folder
            self._writer.file_writer.add_summary(summary)

    def write(self, record: RoundRecord, scalars: Mapping[str, float]) -> None:
        """Write a round and its scalars by tag."""
        step = record.round
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        for scope, rows in rows_by_scope(record.evaluations).items():
            own = [row.metrics.get(self._primary, row.correct and row.correct / row.total) for row in rows]
            values = np.array([value for value in own if value is not None])
            bins = BINS if self._primary == "accuracy" else "auto"
            if len(values) and np.isfinite(values).all():
                self._writer.add_histogram("/".join(("clients", *scope)), values, step, bins=bins)
        if record.diagnostics:
            self._pending = RoundMatrices(step, record.diagnostics)
            if time.perf_counter() >= self._next_drawing:
                self._draw()
        self._writer.flush()

    def close(self) -> None:
        """Draw the last matrices, and close the event file."""
        self._draw()
        self._writer.close()

    def _draw(self) -> None:
        """Draw the latest matrices as figures if they are not drawn yet."""
        found, self._pending, start = self._pending, None, time.perf_counter()
        if found is None:
            return
        try:
            with drawing():
                for kind, matrices in grouped((m.name.partition("/")[0], m) for m in found.matrices).items():
                    figure = draw_heatmaps(matrices, f"{matrices[0].title}, round {found.round}")
                    self._writer.add_figure(f"diagnostics/{kind}", figure, found.round)
        except Exception as error:  # a failed drawing must not end the run
            logger.warning(f"the matrices of round {found.round} could not be drawn: {error}")
        end = time.perf_counter()
        self._next_drawing = end + (end - start) / SHARE
