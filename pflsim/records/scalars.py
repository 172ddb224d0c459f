"""The scalars and hyperparameters of a run, for TensorBoard and for loggers such as Weights & Biases."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pflsim.config.components import TARGET
from pflsim.config.names import written
from pflsim.config.settings import Settings, dotted
from pflsim.errors import in_one_line
from pflsim.records.evaluation import STATISTICS, Scope, rows_by_scope
from pflsim.records.history import RoundMetrics
from pflsim.records.summary import chosen_round
from pflsim.types import RoundRecord

logger = logging.getLogger(__name__)
SPREAD = tuple(name for name in STATISTICS if name not in ("clients", "mean"))


def best_tag(primary: str) -> str:
    """Return the tag of the reported model's test results in the best round so far, by validation."""
    return f"{primary}/best_by_validation"


ALWAYS = ("lr", "seed")
"""Settings that are shown also if they have their default."""


class Loggers:
    """Calls all loggers of `tracking.loggers`. One that fails is left out from then on, with one warning.

    Args:
        makers: functions that create a logger of Lightning, by its name.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]]):
        self._makers = dict(makers)
        self._open: dict[str, Any] = {}
        self._each(lambda name: self._open.update({name: self._makers[name]()}))

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Log the settings of the run."""
        self._each(lambda name: self._open[name].log_hyperparams(dict(values)))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log the scalars of a round."""
        self._each(lambda name: self._open[name].log_metrics(dict(values), step))

    def close(self, complete: bool) -> None:
        """Finish all loggers."""
        self._each(lambda name: self._open[name].finalize("success" if complete else "failed"))

    def _each(self, call: Callable[[str], None]) -> None:
        for name in [*self._makers]:
            try:
                call(name)
            except Exception as error:  # a logger must not end the run
                del self._makers[name]
                logger.warning(f"tracking.loggers: {name} failed and is left out: {in_one_line(error)}")


class Scalars:
    """Returns the scalars of one round after the other. The number of tags does not depend on the number of clients.

    Tags of the primary metric, by default of accuracy, are `accuracy/best_by_validation/mean` and `/worst_decile`,
    `accuracy/<model>/<split>/<phase>` (mean), `accuracy_statistics/<model>/<split>/<phase>/<statistic>`. Other metrics
    are `<metric>/<model>/<split>/<phase>`. Then follow
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
        for scope, stats in metrics.evaluations.items():
            name = "/".join(scope)
            values[f"evaluation_loss/{name}"] = stats.loss
            values |= {f"{metric}/{name}": each.mean for metric, each in stats.metrics.items()}
            about = f"{stats.measures.primary}_statistics/{name}"
            values |= {f"{about}/{each}": getattr(stats.primary, each) for each in SPREAD}
        best = chosen_round([*self._best, metrics], self._reported, "best_val")
        if best is not None and self._reported in metrics.evaluations:
            self._best, stats = [best], best.evaluations[self._reported]
            tag = best_tag(stats.measures.primary)
            values |= {f"{tag}/mean": stats.mean, f"{tag}/worst_decile": stats.primary.worst_decile}
        values |= {f"drift/{name}": value for name, value in metrics.drift.items()}
        values["traffic/up_bytes_total"] = metrics.traffic_total.up_bytes
        values["traffic/down_bytes_total"] = metrics.traffic_total.down_bytes
        return values | {f"seconds/{phase}": value for phase, value in metrics.seconds.items()}


def memory_scalars(record: RoundRecord, held_mb: float) -> dict[str, float]:
    """Return the memory that all processes hold, and the highest GPU allocation of one process if there is one."""
    gpu_bytes = max((report.gpu_bytes for report in record.reports), default=0)
    return {"memory/held_mb": held_mb} | ({"memory/gpu_peak_mb": gpu_bytes / 1e6} if gpu_bytes else {})


def client_scalars(record: RoundRecord, names: Sequence[str] = ()) -> dict[str, float]:
    """Return accuracy, metrics and drift of every client.

    Their tags are `client/<id>/<model>/<split>/<phase>`, `client/<id>/<metric>/<model>/...` and `client/<id>/drift`,
    with the client's name in place of its id if the clients have names.
    """

    def tag(client: int, *words: str) -> str:
        return "/".join(("client", names[client] if names else str(client), *words))

    values: dict[str, float] = {}
    for scope, rows in rows_by_scope(record.evaluations).items():
        for row in rows:
            if row.correct is not None:
                values[tag(row.client, *scope)] = row.correct / row.total
            values |= {tag(row.client, name, *scope): x for name, x in row.metrics.items()}
    return values | {tag(client, "drift"): distance for client, distance in record.drift.items()}


def hyperparameters(settings: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, float | str]:
    """Return the settings to show: those that vary in the sweep of the run.

    Without a sweep, those of the components, and those of the run that differ from their default.

    Args:
        settings: by dotted key.
        names: names of the components by group, and under "sweep" the keys that vary.
    """
    varying = names.get("sweep", "").split(",")
    components = {group: name for group, name in names.items() if group not in ("placement", "sweep")}
    if "sweep" in names:
        components = {group: name for group, name in components.items() if group in varying}
        settings = {key: value for key, value in settings.items() if key in varying}
    default = dotted(asdict(Settings()))
    always = varying if "sweep" in names else ALWAYS
    shown = {
        key: value
        for key, value in settings.items()
        if not key.endswith((TARGET, "data.download"))
        and value is not None
        and (key in always or written(value) != written(default.get(key)))
    }
    numbers = {k: v for k, v in shown.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return components | {key: numbers.get(key, written(value)) for key, value in shown.items()}
