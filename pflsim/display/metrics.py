"""Formats of metrics and of differences in them."""

import math
import re

from pflsim.display.formats import NONE

UNDIRECTED = ("calibration_slope", "calibration_intercept")
"""Metrics of which neither higher nor lower values are better: they cannot be primary."""
SHARES: tuple[str, ...] = ("sensitivity", "specificity", "ppv", "npv")
"""Shares of the positives, of the negatives, and of those predicted as such, that are predicted right."""
THRESHOLD = "threshold"
"""The probability from which on class 1 is predicted, in records."""
UNITS = 15
"""Least length of a bootstrap interval in units of its last digit: its ends vary by up to 1/15 of it with the seed."""


def scale_of(metric: str) -> tuple[int, int | None, str]:
    """Return how differences in a metric are written: the factor, the decimals, and the unit.

    Without a unit, the decimals are None: they depend on the size (`decimals_of`).
    """
    return (100, 1, " points") if "accuracy" in metric else (1, None, "")


def decimals_of(value: float, most: int = 3) -> int:
    """Return the decimals that write a number with `most` + 1 digits, at most `most`: 3 of 0.446, 1 of 230.4."""
    whole = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return min(max(most - max(whole, 0), 0), most)


def fixed(value: float, decimals: int, sign: str = "") -> str:
    """Return a number with so many decimals; from a million on, three digits and an exponent: 4.45e8."""
    large = abs(value) >= 1e6 and math.isfinite(value)
    return re.sub(r"e\+0*", "e", f"{value:{sign}.3g}") if large else f"{value:{sign}.{decimals}f}"


def rounded(value: float, most: int = 3) -> str:
    """Return a value of a metric as text (`decimals_of`)."""
    return fixed(value, decimals_of(value, most))


def signed(value: float | None, decimals: int | None = None) -> str:
    """Return a difference with its sign and a true minus, with a digit more where it would read as 0."""
    if value is None:
        return NONE
    first = decimals_of(value) if decimals is None else decimals
    texts = [fixed(value, n, "+").replace("-", "−") for n in range(first, first + 3)]
    return next((text for text in texts if text.strip("+−0.")), texts[0][1:])


def points(value: float | None, metric: str) -> str:
    """Return a difference in a metric with its sign, in points if the metric is an accuracy."""
    scale, decimals, _ = scale_of(metric)
    return signed(None if value is None else scale * value, decimals)


def steady(low: float | None, high: float | None, scale: float, decimals: int | None) -> str:
    """Return a bootstrap interval with so many digits that another seed changes the last one by at most one unit.

    It has one digit more if it excludes 0 and would not show so.
    """
    if low is None or high is None:
        return NONE
    low, high = scale * low, scale * high
    most, digits = max(-low, high), decimals_of(max(-low, high)) if decimals is None else decimals
    if low < high:
        own = -math.ceil(math.log10((high - low) / UNITS))
        digits = own if most < 0.5 * 10.0**-digits else min(own, digits)
        digits += low * high > 0 and not round(min(abs(low), abs(high)), digits)
    ends = (fixed(round(end, digits), max(digits, 0), "+").replace("-", "−") for end in (low, high))
    return f"[{', '.join(ends)}]"
