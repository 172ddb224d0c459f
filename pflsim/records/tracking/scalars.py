"""The scalars of a round by tag, for TensorBoard and other loggers."""

from __future__ import annotations

from pflsim.records.history import RoundMetrics
from pflsim.records.metrics import STATISTICS, Scope, rows_by_scope
from pflsim.records.summary import chosen_round
from pflsim.types import RoundRecord

SPREAD = tuple(name for name in STATISTICS if name not in ("clients", "mean", "loss"))
BEST = "accuracy/best_by_validation"
"""Test accuracy of the reported model in the best round so far, by mean validation accuracy."""


class Scalars:
    """Returns the scalars of one round after the other. The number of tags does not depend on the number of clients.

    TensorBoard sorts tags by name, so accuracy comes first: `accuracy/best_by_validation/mean` and `/worst_decile`,
    `accuracy/<model>/<split>/<phase>` (mean), `accuracy_statistics/<model>/<split>/<phase>/<statistic>`. Metrics
    besides accuracy are `<metric>/<model>/<split>/<phase>`. Then follow
    `drift/mean`, `drift/max`, `evaluation_loss/<model>/<split>/<phase>`, `loss/<term>`, `seconds/<phase>`,
    `traffic/up_bytes_total` and `traffic/down_bytes_total`. A round without evaluation has no accuracy.

    Args:
        reported: the scope that the method reports.
    """

    def __init__(self, reported: Scope):
        self._reported = reported
        self._best: list[RoundMetrics] = []

    def __call__(self, metrics: RoundMetrics) -> dict[str, float]:
        """Return the scalars of the next round."""
        values = {f"loss/{name}": value for name, value in metrics.losses.items()}
        for scope, stats in metrics.accuracy.items():
            name = "/".join(scope)
            values |= {f"accuracy/{name}": stats.mean, f"evaluation_loss/{name}": stats.loss}
            values |= {f"accuracy_statistics/{name}/{each}": getattr(stats, each) for each in SPREAD}
            values |= {f"{metric}/{name}": value for metric, value in stats.metrics.items()}
        model, _, phase = self._reported
        best = chosen_round([*self._best, metrics], model, phase, "best_val")
        if best is not None and self._reported in metrics.accuracy:
            self._best, stats = [best], best.accuracy[self._reported]
            values |= {f"{BEST}/mean": stats.mean, f"{BEST}/worst_decile": stats.worst_decile}
        values |= {f"drift/{name}": value for name, value in metrics.drift.items()}
        values["traffic/up_bytes_total"] = metrics.traffic_total.up_bytes
        values["traffic/down_bytes_total"] = metrics.traffic_total.down_bytes
        return values | {f"seconds/{phase}": value for phase, value in metrics.seconds.items()}


def memory_scalars(record: RoundRecord, held_mb: float) -> dict[str, float]:
    """Return the memory that all processes hold, and the highest GPU allocation of one process if there is one."""
    gpu_bytes = max((report.gpu_bytes for report in record.reports), default=0)
    return {"memory/held_mb": held_mb} | ({"memory/gpu_peak_mb": gpu_bytes / 1e6} if gpu_bytes else {})


def client_scalars(record: RoundRecord) -> dict[str, float]:
    """Return accuracy, metrics and drift of every client.

    Their tags are `client/<id>/<model>/<split>/<phase>`, `client/<id>/<metric>/<model>/...` and `client/<id>/drift`.
    """
    rows = [(scope, row) for scope, found in rows_by_scope(record.evaluations).items() for row in found]
    values = {"/".join(("client", str(row.client), *scope)): row.correct / row.total for scope, row in rows}
    for scope, row in rows:
        values |= {"/".join(("client", str(row.client), name, *scope)): each for name, each in row.metrics.items()}
    return values | {f"client/{client}/drift": distance for client, distance in record.drift.items()}
