"""Results of single clients over seeds with their intervals, and means over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.analysis.comparison import Comparison, Row
from pflsim.analysis.differences import same_clients
from pflsim.analysis.intervals import METRICS, POOLED, pooled_interval, random_effects_mean, with_interval
from pflsim.analysis.runs import Run
from pflsim.display.formats import NONE, in_text
from pflsim.display.metrics import SHARES, THRESHOLD, rounded
from pflsim.progress import doing

if TYPE_CHECKING:
    from pandas import DataFrame


@lru_cache(256)
def over_clients(row: Row) -> Mapping[str, float]:
    """Return means over clients and intervals as means over seeds, those that all seeds have.

    They are `random_effects_…` of the primary metric, see `random_effects_mean`; and of the metrics `POOLED` over the
    rows of all clients `pooled_METRIC`, `pooled_METRIC_low` and `pooled_METRIC_high`, by the bootstrap over clients.
    """
    each = list[dict[str, float]]()
    for run, number in zip(row.group.runs, row.rounds, strict=False):
        doing(f"intervals of {row.label}")
        own, scores = dict[str, float](), run.scores(number, row.scope)
        if run.primary in METRICS:
            found = run.estimates(run.primary, run.counts(number, row.scope).reset_index())
            values = (found[key].to_numpy(float) for key in ("value", "variance", "n"))
            own = {f"random_effects_{key}": value for key, value in random_effects_mean(run.primary, *values).items()}
        metrics = next(line.evaluations[row.scope].metrics for line in run.history if line.round == number)
        for metric in (name for name in POOLED if name in metrics and math.isfinite(metrics[name].pooled)):
            own[f"pooled_{metric}"] = metrics[metric].pooled
            if ends := pooled_interval(metric, scores):
                own |= {f"pooled_{metric}_low": ends[0], f"pooled_{metric}_high": ends[1]}
        each.append(own)
    return {name: fmean(own[name] for own in each) for name in (each or [{}])[0] if all(name in own for own in each)}


def all_intervals(comparison: Comparison) -> dict[str, DataFrame]:
    """Return `client_intervals` of the primary metric by label, and those of `SHARES`, by `LABEL sensitivity`, …."""
    found = {metric: client_intervals(comparison, metric=metric) for metric in ("", *SHARES)}
    return {f"{label} {in_text(m)}".strip(): own for m, each in found.items() for label, own in each.items()}


def client_intervals(comparison: Comparison, same: bool | None = None, metric: str = "") -> dict[str, DataFrame]:
    """Return value, low, high and why of a metric by seed and client, of each row and baseline by its label.

    Clients that are the same in every seed have the number 0 as their seed, and means over the seeds: of values, and of
    variances, which are not divided by the number of seeds, because the same rows return.

    Args:
        comparison: the groups.
        same: whether they are the same; None: find out.
        metric: one of `SHARES`, of the rows with a threshold; "": the primary one.
    """
    from pandas import concat

    same = comparison.seeds > 1 and same_clients(comparison.runs) if same is None else same
    found: dict[str, DataFrame] = {}
    for row in (row for row in (*comparison.rows, *comparison.baselines) if row.rounds):
        if metric and THRESHOLD not in row.metrics:
            continue
        doing(f"intervals of {row.label}")
        each: dict[int, DataFrame] = {}
        for run, number in zip(row.group.runs, row.rounds, strict=True):
            rows = run.counts(number, row.scope).reset_index()
            each[run.seed] = run.estimates(metric or run.primary, rows).set_index(rows["client"])
        table = concat(each)
        if same:
            seeds = table.groupby(level=1)
            over: Any = seeds[["value", "variance", "n"]].mean()
            for key in ("variance", "n"):  # without that of a seed there is none
                over[key] = over[key].mask(seeds[key].agg(lambda each: each.isna().any()))
            table = concat([over.assign(why=seeds["why"].max())], keys=[0])
        found[row.label] = with_interval(metric or comparison.primary, table)
    return found


def client_keys(intervals: Mapping[str, DataFrame]) -> list[tuple[int, int]]:
    """Return the seed and the number of each client of `client_intervals`, ascending."""
    return sorted({key for each in intervals.values() for key in each.index})


def interval_texts(intervals: Mapping[str, DataFrame]) -> tuple[dict[str, dict[tuple[int, int], str]], list[str]]:
    """Return the values of `client_intervals` as `value [low, high]`, or with a letter for the reason why it has none.

    Returns:
        The texts by label and client, and the meaning of the letters.
    """
    reasons = sorted({why for each in intervals.values() for why in each["why"]} - {""})
    letters = {why: f"({letter})" for why, letter in zip(reasons, ascii_lowercase, strict=False)}
    texts = {
        label: {
            key: f"{NONE if math.isnan(value) else rounded(value)} {letters.get(why) or bracketed(low, high)}"
            for key, value, low, high, why in each[["value", "low", "high", "why"]].itertuples(name=None)
        }
        for label, each in intervals.items()
    }
    return texts, [f"{letter} no interval: {why}" for why, letter in letters.items()]


def bracketed(low: float | None, high: float | None) -> str:
    """Format an interval; a dash if there is none."""
    return NONE if low is None or high is None else f"[{rounded(low)}, {rounded(high)}]".replace("-", "−")


def client_records(comparison: Comparison, found: Mapping[str, DataFrame]) -> list[dict[str, Any]]:
    """Return a record for each client: name, rows, share of positives, and value and interval with each method.

    Its test rows are those of the set on which the groups are compared.

    Args:
        comparison: the groups.
        found: their `client_intervals`.
    """
    same, records = comparison.seeds == 1 or same_clients(comparison.runs), list[dict[str, Any]]()
    base = next(row for row in comparison.rows if row.group is comparison.reference)
    judged = zip(base.group.runs, base.rounds, strict=False)
    tests = {run.seed: run.counts(number, base.scope)["total"].to_dict() for run, number in judged}
    for seed, client in client_keys(found):
        runs = [run for run in comparison.reference.runs if same or run.seed == seed]
        record: dict[str, Any] = {"client": (runs[0].partition.get("names") or {client: str(client)})[client]}
        record |= ({} if same else {"seed": seed}) | _sizes(runs, client)
        if own := [tests[run.seed][client] for run in runs if client in tests.get(run.seed, {})]:
            record["test"] = fmean(own)
        for label, each in found.items():
            own = each.loc[(seed, client)] if (seed, client) in each.index else {}
            record |= {label: own.get("value"), **{f"{label} {key}": own.get(key) for key in ("low", "high", "why")}}
        records.append(record)
    return records


def _sizes(runs: Sequence[Run], client: int) -> dict[str, float | None]:
    """Return the mean numbers of training and test rows, and of two classes the share of the second in all rows."""
    each = [run.partition["class_counts"][client] for run in runs]
    train, test, val = (np.mean([own[split] for own in each], 0) for split in ("train", "test", "val"))
    binary, total = runs[0].partition["classes"] == 2 and "accuracy" in runs[0].summary, train + test + val
    return {"train": train.sum(), "test": test.sum(), "positives": total[1] / total.sum() if binary else None}
