"""The TensorBoard curves of a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from pflsim.history import RoundMetrics
from pflsim.metrics import AccuracyStats
from pflsim.summary import NewcomerFigures

STATISTICS = tuple(f.name for f in fields(AccuracyStats) if f.name != "clients")


def scalars(metrics: RoundMetrics) -> dict[str, float]:
    """Every curve's value in a round, by tag; the number of tags does not grow with the number of clients.

    `<model>/<split>/<phase>/<statistic>`, `loss/<term>`, `traffic/up_bytes_total`, `traffic/down_bytes_total`,
    `seconds/<part>`. A round without evaluation has no accuracy tags.
    """
    values = {f"loss/{name}": value for name, value in metrics.losses.items()}
    for scope, stats in metrics.accuracy.items():
        values |= {"/".join((*scope, name)): getattr(stats, name) for name in STATISTICS}
    values["traffic/up_bytes_total"] = metrics.traffic_total.up_bytes
    values["traffic/down_bytes_total"] = metrics.traffic_total.down_bytes
    return values | {f"seconds/{part}": value for part, value in metrics.seconds.items()}


class TensorBoard:
    """Writes the scalars of each round into an event file that TensorBoard follows live.

    Args:
        folder: where the event files are.
        resume_after: the round after which this one goes on; readers that have points of later ones drop them.
    """

    def __init__(self, folder: Path, resume_after: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)

    def write(self, metrics: RoundMetrics, memory_mb: float) -> None:
        """Append a round."""
        for tag, value in scalars(metrics).items():
            self._writer.add_scalar(tag, value, metrics.round)
        self._writer.add_scalar("memory/held_mb", memory_mb, metrics.round)
        self._writer.flush()

    def write_newcomers(self, figures: NewcomerFigures, round_number: int) -> None:
        """Append what newcomers came to, as `newcomer/test/<phase>/<statistic>`."""
        for phase, stats in (("received", figures.received), ("trained", figures.trained)):
            for name in STATISTICS if stats is not None else ():
                self._writer.add_scalar(f"newcomer/test/{phase}/{name}", getattr(stats, name), round_number)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
