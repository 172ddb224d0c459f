"""The curves of a run, by the tags that they have in TensorBoard."""

from __future__ import annotations

from dataclasses import fields

from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import AccuracyStats

STATISTICS = tuple(f.name for f in fields(AccuracyStats) if f.name != "clients")


def scalars(metrics: RoundMetrics) -> dict[str, float]:
    """Every curve's value in a round, by tag; the number of tags does not grow with the number of clients.

    `<model>/<split>/<phase>/<statistic>`, `loss/<term>`, `drift/mean`, `drift/max`, `traffic/up_bytes_total`,
    `traffic/down_bytes_total`, `seconds/<part>`. A round without evaluation has no accuracy tags.
    """
    values = {f"loss/{name}": value for name, value in metrics.losses.items()}
    for scope, stats in metrics.accuracy.items():
        values |= {"/".join((*scope, name)): getattr(stats, name) for name in STATISTICS}
    values |= {f"drift/{name}": value for name, value in metrics.drift.items()}
    values["traffic/up_bytes_total"] = metrics.traffic_total.up_bytes
    values["traffic/down_bytes_total"] = metrics.traffic_total.down_bytes
    return values | {f"seconds/{part}": value for part, value in metrics.seconds.items()}
