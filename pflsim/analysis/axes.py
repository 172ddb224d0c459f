"""Axes of charts: places as percentages, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pflsim.analysis.verdict import fixed


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis, or a logarithmic one.

    Args:
        low, high: its ends; of a logarithmic axis, their logarithms to the base 10.
        ticks: values with a label.
        log: whether it is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value as a percentage of the axis, from its low end; beyond the ends too."""
        found = math.log10(value) if self.log else value
        return round(100 * (found - self.low) / (self.high - self.low), 2)

    def up(self, value: float, height: float) -> float:
        """Return the place of a value on a vertical axis in pixels from the top."""
        return round(height * (1 - self.at(value) / 100), 1)

    def text(self, value: float, sign: str = "", scale: float = 1.0) -> str:
        """Return a tick's label in a unit, with the decimals that the ticks need and a true minus."""
        step = min((b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)), default=abs(value) or 1.0)
        decimals = max(0, -math.floor(math.log10(step * scale) + 1e-9))
        return fixed(value * scale, decimals, sign if value else "").replace("-", "−")


def axis(values: Iterable[float], least: float = 0.0, count: int = 4, pad: float = 0.04) -> Axis:
    """Return an axis that covers values.

    Args:
        values: finite numbers; without any, 0 and 1. There is no tick below 0 if no value is.
        least: the least length.
        count: about how many ticks, at least two.
        pad: what is added at each end, as a share of the length.
    """
    from matplotlib.ticker import MaxNLocator

    found = [*values] or [0.0, 1.0]
    low, high = min(found), max(found)
    more = max(least or 1e-3 * max(abs(low), abs(high), 1e-9), high - low) * (1 + 2 * pad) - (high - low)
    low, high = low - more / 2, high + more / 2
    ticks = MaxNLocator(round(1.6 * count), steps=[1, 2, 5, 10]).tick_values(
        max(low, 0) if min(found) >= 0 else low, high
    )
    return Axis(low, high, tuple(round(tick, 12) for tick in ticks.tolist() if low <= tick <= high))


def log_axis(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis that covers positive values, with ticks at 1, 2 and 5 times powers of ten.

    Over three decades or more, ticks are at powers of ten.
    """
    from matplotlib.ticker import LogLocator

    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    more = max(0.06 * (high - low), 0.2, 0.35 - (high - low) / 2)  # so that there are at least two ticks
    low, high = low - more, high + more
    ticks = LogLocator(subs=(1, 2, 5) if high - low < 2.7 else (1,), numticks=99).tick_values(10**low, 10**high)
    return Axis(low, high, tuple(tick for tick in ticks.tolist() if low <= math.log10(tick) <= high), log=True)
