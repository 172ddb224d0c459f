"""Passes the scalars of a run to loggers such as Weights & Biases (`tracking.loggers`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class RunLogger(Protocol):
    """A logger of Lightning, or an object with the same methods."""

    def log_hyperparams(self, params: dict[str, Any]) -> None: ...  # noqa: D102

    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...  # noqa: D102

    def finalize(self, status: str) -> None: ...  # noqa: D102


class Loggers:
    """Calls all loggers. One that fails is left out from then on, with one warning; the run goes on.

    Args:
        makers: functions that create a logger, by its name.
    """

    def __init__(self, makers: Mapping[str, Callable[[], RunLogger]]):
        self._makers = dict(makers)
        self._open: dict[str, RunLogger] = {}
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
                first = str(error).partition("\n")[0]
                logger.warning(f"tracking.loggers: {name} failed and is left out: {type(error).__name__}: {first}")
