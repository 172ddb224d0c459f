"""A virtual clock: how long rounds would take if clients computed and transferred at given speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pflsim.config.settings import Settings
from pflsim.errors import SettingsError
from pflsim.seeding import numpy_generator
from pflsim.types import Traffic, TrainReport

MEGABIT = 125_000
"""Bytes of a megabit."""


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """The speeds of clients.

    Args:
        step: seconds of an optimisation step of each client, [N].
        down, up: seconds of a byte to and from each client, [N].
    """

    step: np.ndarray
    down: np.ndarray
    up: np.ndarray

    @classmethod
    def of(cls, settings: Settings, clients: int) -> VirtualClock | None:
        """Return the clock of a run with so many clients that train; None if it has none.

        Raises:
            SettingsError: a list of seconds has another length.
        """
        given = settings.clock
        if given.step_s is None and given.down_mbps is None and given.up_mbps is None:
            return None
        if isinstance(given.step_s, list) and len(given.step_s) != clients:
            raise SettingsError(f"clock.step_s has {len(given.step_s)} values, but {clients} clients train")
        normal = [numpy_generator(settings.seed, "clock", client).standard_normal(3) for client in range(clients)]
        factors = np.exp(given.spread * np.array(normal)).T
        step = np.array(given.step_s) if isinstance(given.step_s, list) else (given.step_s or 0.0) * factors[0]
        speeds = zip((given.down_mbps, given.up_mbps), factors[1:], strict=True)
        return cls(step, *(1 / (mbps * MEGABIT * own) if mbps else 0 * own for mbps, own in speeds))

    def round(
        self, reports: Sequence[TrainReport], down_bytes: Mapping[int, int], surveyed: Mapping[int, Traffic]
    ) -> float:
        """Return the seconds of a round: those of the slowest client, after the slowest one of a survey before it."""
        jobs = [
            self.step[each.client] * each.steps
            + self.down[each.client] * down_bytes.get(each.client, 0)
            + self.up[each.client] * each.up_bytes
            for each in reports
        ]
        survey = [self.down[c] * sent.down_bytes + self.up[c] * sent.up_bytes for c, sent in surveyed.items()]
        return float(max(jobs, default=0.0) + max(survey, default=0.0))
