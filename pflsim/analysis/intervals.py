"""Variances and intervals of metrics: DeLong, Wilson, bootstraps, and random-effects means, as pure functions.

docs/statistics.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.display.metrics import SHARES

if TYPE_CHECKING:
    from pandas import DataFrame

ALPHA = 0.05
"""Intervals have the confidence 1 − ALPHA, and a corrected p-value must be below ALPHA."""
LEAST = 5
"""The least number of rows, and of rows of each class, of a client whose RMSE or AUROC has an interval."""
RESAMPLES = 1999
OF_ROWS = ("accuracy", "top_k_accuracy")
"""Metrics that are shares of a client's rows."""
PROPORTIONS = (*OF_ROWS, *SHARES)
"""Metrics that are shares."""
STEPS, TOLERANCE, TINY = 25, 1e-6, 1e-300
"""Newton steps, the largest one at which they have converged, and the least probability."""
Z = NormalDist().inv_cdf(1 - ALPHA / 2)
Statistic = Callable[[np.ndarray], float]
"""A function of how often each row counts, [n]."""


def _columns(scores: np.ndarray, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the scores [n] and the positives [n] of class 1, or of each class or label that divides the rows."""
    if targets.ndim == 1:
        scores = scores[:, 1:] if scores.shape[1] == 2 else scores
        targets = targets[:, None] == np.arange(scores.shape[1]) + (scores.shape[1] == 1)
    return [(p, y) for p, y in zip(scores.T, targets.T > 0.5, strict=True) if y.any() and not y.all()]


def _auroc_variance(scores: np.ndarray, targets: np.ndarray) -> tuple[float, str]:
    """Return DeLong's variance of an AUROC; of several classes, of their mean."""
    from scipy.stats import rankdata

    columns = _columns(scores, targets)
    if not columns or any(min(y.sum(), (~y).sum()) < LEAST for _, y in columns):
        return np.nan, f"fewer than {LEAST} test rows of a class"
    parts = np.zeros(len(scores))  # of the sum of squares, by row
    for p, y in columns:
        ranks = rankdata(p)
        for own in (y, ~y):
            above = (ranks[own] - rankdata(p[own])) / (~own).sum()  # share of the other class with a lower score
            parts[own] += (above - above.mean()) / np.sqrt(own.sum() * (own.sum() - 1)) * (1 if own is y else -1)
    return float(((parts / len(columns)) ** 2).sum()), ""


def _rmse_variance(values: np.ndarray, targets: np.ndarray) -> tuple[float, str]:
    """Return the bootstrap variance of an RMSE; of several targets, of their mean."""
    n = len(values)
    if n < LEAST:
        return np.nan, f"fewer than {LEAST} test rows"
    squares, rng, left, found = (values - targets.reshape(values.shape)) ** 2, np.random.default_rng(0), RESAMPLES, []
    while left:  # scipy.stats.bootstrap takes ten times as long for a few rows
        some = min(left, max(1, 10**6 // squares.size))
        found.append(np.sqrt(squares[rng.integers(n, size=(some, n))].mean(1)).mean(-1))
        left -= some
    return float(np.concatenate(found).var(ddof=1)), ""


VARIANCES = {"auroc": _auroc_variance, "rmse": _rmse_variance}
"""Functions of the scores and targets of a client's rows, which return a variance, or NaN and why there is none."""
METRICS = (*OF_ROWS, *VARIANCES)
"""Metrics that have intervals of clients."""


def outcomes(rows: DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return scores [n, C] and targets, [n] or of several [n, T], of rows of `read_predictions`."""
    targets = rows["target"] if "target" in rows else rows.filter(regex="^target_")
    return rows.filter(regex="^(score|value)_").to_numpy(float), targets.to_numpy()


def variances_of(metric: str, rows: DataFrame, places: np.ndarray) -> dict[int, tuple[float, str]]:
    """Return the variance of a metric on the rows of each place, or NaN and the reason."""
    (scores, targets), found = outcomes(rows), dict[int, tuple[float, str]]()
    order = np.argsort(places, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(places[order])) + 1) if len(order) else ():
        why = np.nan, "its scores are not finite"
        finite = np.isfinite(scores[own]).all()
        found[int(places[own[0]])] = VARIANCES[metric](scores[own], targets[own]) if finite else why
    return found


def wilson(share: Any, n: Any) -> tuple[Any, Any]:
    """Return the ends of Wilson's score interval of a share of n."""
    middle, half = share + Z**2 / (2 * n), Z * np.sqrt(share * (1 - share) / n + (Z / (2 * n)) ** 2)
    return (middle - half) / (1 + Z**2 / n), (middle + half) / (1 + Z**2 / n)


def _scaled(metric: str, value: Any, variance: Any) -> tuple[Any, Any]:
    """Return a value and its variance on the logit scale, or of an RMSE on the log scale."""
    odds, slope = (value, value) if metric == "rmse" else (value / (1 - value), value * (1 - value))
    return np.log(odds), variance / slope**2


def _unscaled(metric: str, value: Any) -> Any:
    return np.exp(value) if metric == "rmse" else 1 / (1 + np.exp(-value))


def interval(metric: str, value: np.ndarray, variance: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of intervals; NaN without a variance, and where the scale of the metric is infinite.

    Args:
        metric: one of `PROPORTIONS` or `VARIANCES`.
        value: of the metric.
        variance: of the value, if the metric is no proportion.
        n: number of rows of a proportion.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if metric in PROPORTIONS:
            return wilson(value, n)
        middle, spread = _scaled(metric, value, variance)
        ends = (_unscaled(metric, middle + sign * Z * np.sqrt(spread)) for sign in (-1, 1))
        low, high = (np.where(np.isfinite(middle), end, np.nan) for end in ends)
    return low, high


def with_interval(metric: str, estimates: DataFrame) -> DataFrame:
    """Return `pflsim.analysis.runs.Run.estimates` with the ends of intervals, and why there is none."""
    low, high = interval(metric, *(estimates[key].to_numpy(float) for key in ("value", "variance", "n")))
    extreme = "the value is 0" if metric == "rmse" else "the value is 0 or 1"
    why = np.where(np.isfinite(low), "", np.where(estimates["why"] == "", extreme, estimates["why"]))
    return estimates.assign(low=low, high=high, why=why)


def random_effects(y: np.ndarray, v: np.ndarray) -> dict[str, float]:
    """Return the mean of DerSimonian and Laird, with the interval of Hartung and Knapp, τ² and I².

    Args:
        y: at least two estimates.
        v: their variances.
    """
    from scipy.stats import t

    w, df = 1 / v, len(y) - 1
    q = float(w @ (y - w @ y / w.sum()) ** 2)
    tau2 = max(0.0, (q - df) / (w.sum() - w @ w / w.sum()))
    w = 1 / (v + tau2)
    mean = w @ y / w.sum()
    half = t.ppf(1 - ALPHA / 2, df) * np.sqrt(w @ (y - mean) ** 2 / df / w.sum())
    return {"mean": mean, "low": mean - half, "high": mean + half, "tau2": tau2, "i2": max(0.0, 1 - df / q) if q else 0}


def random_effects_mean(metric: str, value: np.ndarray, variance: np.ndarray, n: np.ndarray) -> dict[str, float]:
    """Return `random_effects` over clients, in the unit of the metric but for τ², and the number of clients left out.

    Those without a variance are left out. Nothing is returned with fewer than two others. See `interval`.
    """
    if metric in PROPORTIONS:
        value = (value * n + 0.5) / (n + 1)
        variance = value * (1 - value) / (n + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        y, v = _scaled(metric, value, variance)
    known = np.isfinite(y) & np.isfinite(v) & (v > 0)
    if known.sum() < 2:
        return {}
    found = random_effects(y[known], v[known])
    ends = {key: float(_unscaled(metric, found[key])) for key in ("mean", "low", "high")}
    return found | ends | {"left_out": int((~known).sum())}


def _auroc(scores: np.ndarray, targets: np.ndarray) -> Statistic:
    columns = []
    for p, y in _columns(scores, targets):
        order = np.argsort(p)
        columns.append((order, np.unique(p[order], return_inverse=True)[1], y[order]))

    def auroc(counts: np.ndarray, order: np.ndarray, rank: np.ndarray, y: np.ndarray) -> float:
        positive, negative = (np.bincount(rank, counts[order] * own) for own in (y, ~y))
        return positive @ (negative.cumsum() - negative / 2) / (positive.sum() * negative.sum())

    return lambda counts: float(np.mean([auroc(counts, *column) for column in columns]))


def _rmse(values: np.ndarray, targets: np.ndarray) -> Statistic:
    squares = (values - targets.reshape(values.shape)) ** 2
    return lambda counts: float(np.sqrt(counts @ squares / counts.sum()).mean())


def _calibration(coefficients: int, scores: np.ndarray, targets: np.ndarray) -> Statistic:
    """Return the last one of a logistic regression on the logit; of 1, the slope is fixed at 1."""
    logits = np.log(scores[:, 1].clip(TINY)) - np.log(scores[:, 0].clip(TINY))
    x = np.column_stack([np.ones(len(logits)), logits])[:, :coefficients]

    def fitted(counts: np.ndarray) -> float:
        beta = np.array([0.0, 1.0])
        for _ in range(STEPS):
            p = 1 / (1 + np.exp(-beta[0] - beta[1] * logits))
            try:
                step = np.linalg.solve((x.T * (counts * p * (1 - p))) @ x, x.T @ (counts * (targets - p)))
            except np.linalg.LinAlgError:  # one class, or a logit that separates the classes
                break
            beta[:coefficients] += step
            if abs(step).max() < TOLERANCE:
                return float(beta[coefficients - 1])
        return np.nan

    return fitted


POOLED: Mapping[str, Callable[[np.ndarray, np.ndarray], Statistic]] = {
    "auroc": _auroc,
    "rmse": _rmse,
    "calibration_slope": partial(_calibration, 2),
    "calibration_intercept": partial(_calibration, 1),
}
"""Metrics of all rows together, as functions of scores and targets."""


def pooled_interval(metric: str, rows: DataFrame | None) -> tuple[float, float] | None:
    """Return the interval of a metric of all rows together, as of `read_predictions`; None if there is none."""
    if metric not in POOLED or rows is None or len({*rows["client"]}) < 2:
        return None
    return cluster_bootstrap(rows["client"].to_numpy(), POOLED[metric](*outcomes(rows)))


def cluster_bootstrap(clients: np.ndarray, statistic: Statistic) -> tuple[float, float]:
    """Return the percentile interval of a statistic of rows; clients are drawn with all their rows, by a fixed seed.

    Args:
        clients: of each row.
        statistic: the rows count as often as their client is drawn; draws for which it is NaN are left out.
    """
    names, found = np.unique(clients, return_inverse=True)
    drawn = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = [statistic(counts[found]) for counts in drawn.astype(float)]
        low, high = np.nanquantile(values, (ALPHA / 2, 1 - ALPHA / 2))
    return float(low), float(high)
