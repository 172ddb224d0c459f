"""Calibration of probabilities of two classes: the observed share of the second one by its probability."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pflsim.analysis.comparison import Comparison, Row
from pflsim.analysis.differences import same_clients
from pflsim.analysis.groups import Group
from pflsim.config.names import listed
from pflsim.display.formats import Choice
from pflsim.display.metrics import UNDIRECTED
from pflsim.records.evaluation import grouped
from pflsim.records.predictions import read_predictions

if TYPE_CHECKING:
    from pandas import DataFrame

WHEN: dict[Choice, str] = {"last": "last", "best_val": "best"}
"""Rounds of which scores are recorded."""
POINTS = 50


class Calibration(NamedTuple):
    """The calibration of a group over the test rows of all its clients and seeds.

    Args:
        p: probabilities, from the 1% to the 99% quantile.
        observed, low, high: the share of class 1 at these, and its 95% band.
        metrics: slope, intercept and Brier score: mean over seeds of the pooled value, NaN if one is undefined.
    """

    p: np.ndarray
    observed: np.ndarray
    low: np.ndarray
    high: np.ndarray
    metrics: dict[str, float]


def calibrations(comparison: Comparison) -> tuple[dict[str, Calibration], list[str]]:
    """Return the calibration of groups and baselines by label, in the chosen round, and a line for each lack of one."""
    if not second_class(comparison):
        return {}, ["calibration is of two classes"]
    each = {row.label: calibration(row.group, comparison.choice) for row in shown(comparison)}
    lacking = grouped((own, label) for label, own in each.items() if isinstance(own, str))
    found = {label: own for label, own in each.items() if isinstance(own, Calibration)}
    return found, [f"no calibration of {listed(labels)}: {why}" for why, labels in lacking.items()]


def shown(comparison: Comparison) -> list[Row]:
    """Return the rows of groups and baselines, best first."""
    return [*comparison.lines, *comparison.baselines]


def second_class(comparison: Comparison) -> str:
    """Return what class 1 is in the data; "" if the runs do not have two classes."""
    about = comparison.runs[0].partition
    two = about.get("task", {}).get("name", "classification") == "classification" and about.get("classes") == 2
    return str(about.get("values", "01")[1]) if two else ""


def calibration(group: Group, choice: Choice) -> Calibration | str:
    """Return the calibration of a group in a round; else why there is none."""
    from pandas import DataFrame, concat

    parts = list[DataFrame]()
    for run in group.runs:
        line, scored = run.at(choice), read_predictions(run.folder)
        if line is None or scored is None or choice not in WHEN:
            return "scores of the round were not recorded, which tracking.predictions=true does"
        at = (scored["when"] == WHEN[choice]) & (scored["round"] == line.round)
        own = scored[at & (scored["model"] == run.reported.model) & (scored["phase"] == run.reported.phase)]
        if own.empty or not {"target", "score_1"} <= {*own} or "score_2" in own:
            return "scores of two classes in the round were not recorded"
        parts.append(own.assign(seed=run.seed))
    each = [_metrics(part) for part in parts]
    metrics = {name: float(np.mean([own[name] for own in each])) for name in each[0]}
    if any(map(math.isnan, metrics.values())):
        return "a class has fewer than 10 test rows, or the probabilities separate the classes"
    rows = concat(parts)
    clients = rows.groupby(["client"] if same_clients(group.runs) else ["seed", "client"]).ngroup().to_numpy()
    return Calibration(*_curve(_logits(rows), rows["target"].to_numpy(), clients), metrics)


def _logits(rows: DataFrame) -> np.ndarray:
    # 1 − p has few digits in float32 where p is near 1; the least positive number stands for 0
    no, yes = (np.log(rows[name].to_numpy(np.float64).clip(1e-45)) for name in ("score_0", "score_1"))
    return yes - no


def _metrics(rows: DataFrame) -> dict[str, float]:
    import torch

    from pflsim.tasks.metrics import metrics_of
    from pflsim.tasks.task import Task

    logits, y = torch.tensor(_logits(rows)), torch.tensor(rows["target"].to_numpy())
    scores, asked = torch.stack([torch.zeros_like(logits), logits], 1), (*UNDIRECTED, "brier")
    values = {metric.name: metric(scores, y) for metric in metrics_of(asked, Task("classification", 2))}
    return {name: math.nan if value is None else value for name, value in values.items()}


def _curve(
    logits: np.ndarray, y: np.ndarray, clusters: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return p, the observed share and its band: a logistic regression on a restricted cubic spline of the logit.

    The knots are the 10%, 50% and 90% quantiles (Harrell 2001, 2.4.5). The covariance is robust to dependence within
    clusters, which are the clients; with one client, rows are independent.
    """
    from scipy.special import expit, logit
    from sklearn.linear_model import LogisticRegression

    unit, (first, middle, last) = logits.std(), np.quantile(logits, (0.1, 0.5, 0.9))

    def basis(x: np.ndarray) -> np.ndarray:
        columns = [np.ones_like(x), x / unit]
        if first < middle < last:
            a, b, c = (((x - knot) / (last - first)).clip(0) ** 3 for knot in (first, middle, last))
            columns.append(a - b * (last - first) / (last - middle) + c * (middle - first) / (last - middle))
        return np.column_stack(columns)

    x = basis(logits)
    fitted = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-8).fit(x[:, 1:], y)
    weights = np.append(fitted.intercept_, fitted.coef_)
    p = expit(x @ weights)
    inverse = np.linalg.inv(x.T @ (x * (p * (1 - p))[:, None]))
    sums = np.zeros((int(clusters.max()) + 1, x.shape[1]))
    np.add.at(sums, clusters, x * (y - p)[:, None])
    many = len(sums) > 1
    covariance = inverse @ sums.T @ sums @ inverse * len(sums) / (len(sums) - 1) if many else inverse
    low, high = expit(np.quantile(logits, (0.01, 0.99))).clip(1e-6, 1 - 1e-6)
    at = np.linspace(low, high, POINTS)
    x = basis(logit(at))
    line, half = x @ weights, 1.96 * np.sqrt(np.einsum("ij,jk,ik->i", x, covariance, x))
    return at, expit(line), expit(line - half), expit(line + half)
