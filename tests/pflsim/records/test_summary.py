import itertools
import json
import math
import os
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import stats

from pflsim.records.evaluation import Measures, Scope, evaluation, evaluations_by_scope, mean_losses
from pflsim.records.files import write_atomically
from pflsim.records.history import RoundMetrics, Traffic
from pflsim.records.summary import RunMeta, Summary, write_summary
from pflsim.types import EvalPhase, EvalRow, ModelKind, Split, TrainReport

META = RunMeta("pfedcfr", "digits", "label_lognormal", "abc", "mlp", 10, 20, 5)
TEST, VAL = Scope("personal", "test", "trained"), Scope("personal", "val", "trained")


def line(number, test=None, val=None):
    accuracy = {scope: stats(mean) for scope, mean in ((VAL, val), (TEST, test)) if mean is not None}
    return RoundMetrics(number, 10, {}, accuracy, Traffic(1, 2), Traffic(number, 2 * number), {"total": 1.0})


def test_each_round_that_matters_is_found_and_gives_its_test_numbers():
    history = [line(1, 0.9, 0.1), line(2, 0.5, 0.8), line(3), line(4, 0.6, 0.8), line(5, 0.7, 0.2), line(6)]
    figures = Summary(META, history, True, 1.0, 1.0).figures("personal")
    found = {name: (at, figure.mean) for name, (at, figure) in figures.items()}
    assert found == {"last": (5, 0.7), "best_val": (2, 0.5), "best_test_oracle": (1, 0.9)}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_ties_go_to_the_first_round(pairs):
    history = [line(n, test / 5, val / 5) for n, (test, val) in enumerate(pairs, start=1)]
    figures = Summary(META, history, True, 1.0, 1.0).figures("personal")
    tests, vals = [test for test, _ in pairs], [val for _, val in pairs]
    assert figures["best_val"][0] == vals.index(max(vals)) + 1
    assert figures["best_val"][1].mean == pairs[vals.index(max(vals))][0] / 5
    assert figures["best_test_oracle"][0] == tests.index(max(tests)) + 1


def test_the_phase_decides_which_personal_numbers_count():
    both = {TEST: stats(0.5), Scope("personal", "test", "received"): stats(0.25)}
    history = [RoundMetrics(1, 10, {}, both, Traffic(), Traffic(), {"total": 1.0})]
    for meta, mean in ((META, 0.5), (replace(META, reported_phase="received"), 0.25)):
        assert Summary(meta, history, True, 1.0, 1.0).figures("personal")["last"][1].mean == mean


def test_the_file_has_every_promised_field(tmp_path):
    history = [line(1, 0.5, 0.5), line(2, 0.75, 0.25)]
    write_summary(tmp_path, Summary(META, history, False, 12.5, 345.67))
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["accuracy"]["personal"]["last"] == {
        "round": 2, "clients": 10, "mean": 0.75, "weighted_mean": 0.75, "std": 0.1, "median": 0.75,
        "worst_decile": 0.65, "best_decile": 0.85, "loss": 1.0,
    }  # fmt: skip
    assert content["metrics"]["accuracy"]["personal"]["last"] == {
        "round": 2, "clients": 10, "undefined": 0, "mean": 0.75, "weighted_mean": 0.75, "pooled": 0.75, "std": 0.1,
        "median": 0.75, "worst_decile": 0.65, "best_decile": 0.85,
    }  # fmt: skip
    assert content["primary"] == {"name": "accuracy", "higher_is_better": True}
    del content["accuracy"], content["metrics"], content["primary"]
    assert content == {
        "complete": False, "method": "pfedcfr", "data": "digits", "partition": "label_lognormal",
        "partition_hash": "abc", "model": "mlp", "clients": 10, "rounds": 2, "rounds_planned": 20, "seed": 5,
        "precision": "ieee",
        "seconds": 12.5, "reported_model": "personal", "reported_phase": "trained",
        "accuracy_of": {"split": "test", "clients": "all", "phase": {"personal": "trained", "global": "received"}},
        "traffic": {"up_bytes": 2, "down_bytes": 4}, "peak_rss_mb": 345.7,
    }  # fmt: skip


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, "new" * 1000)
    assert path.read_text() == "old"


def rows_of(counts, split: Split = "test", model: ModelKind = "personal", phase: EvalPhase = "trained"):
    return [EvalRow(client, split, model, phase, c, t, loss) for client, (c, t, loss) in enumerate(counts)]


counts = st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 100)).map(
    lambda drawn: (min(drawn[0], drawn[1]), drawn[1], drawn[2])
)


@given(st.lists(counts, max_size=35), st.randoms())
def test_statistics_equal_numpy_on_the_clients_with_examples(drawn, random):
    stats = evaluation(rows_of(drawn))
    kept = np.array([entry for entry in drawn if entry[1] > 0])
    if len(kept) == 0:
        assert stats is None
        return
    loss, stats = stats.loss, stats.primary
    assert stats.undefined == 0
    rates = kept[:, 0] / kept[:, 1]
    ordered, tenth = sorted(rates), -(-len(rates) // 10)
    assert stats.clients == len(kept)
    assert stats.mean == float(sum(Fraction(int(c), int(t)) for c, t in kept[:, :2]) / len(kept))
    assert stats.weighted_mean == pytest.approx(np.average(rates, weights=kept[:, 1]))
    assert stats.pooled == stats.weighted_mean
    assert stats.std == pytest.approx(math.sqrt(np.average((rates - rates.mean()) ** 2)), abs=1e-12)
    assert stats.median == pytest.approx(np.percentile(rates, 50))
    assert stats.worst_decile == pytest.approx(sum(ordered[:tenth]) / tenth)
    assert stats.best_decile == pytest.approx(sum(ordered[::-1][:tenth]) / tenth)
    assert loss == pytest.approx(np.average(kept[:, 2] / kept[:, 1]))
    slack = 1e-12
    assert stats.worst_decile <= stats.mean + slack <= stats.best_decile + 2 * slack
    shuffled = rows_of(drawn)
    random.shuffle(shuffled)
    assert evaluation(shuffled) == evaluation(rows_of(drawn))


def test_metrics_without_a_direction_or_a_client():
    rows = [EvalRow(n, "test", "personal", "trained", 1, 2, 0.0, metrics={"calibration_slope": n}) for n in range(3)]
    assert evaluation(rows, Measures(("accuracy", "auroc")), {"auroc": 0.7}).metrics["auroc"].pooled == 0.7
    stats = evaluation(rows).metrics["calibration_slope"]
    assert stats.mean == 1 and math.isnan(stats.worst_decile) and math.isnan(stats.best_decile)


def test_scopes_are_separate_and_ordered_and_empty_ones_left_out():
    rows = [
        *rows_of([(1, 2, 0.0)], model="global", phase="received"),
        *rows_of([(0, 0, 0.0)], split="val"),
        *rows_of([(1, 1, 0.0)], split="all"),
        *rows_of([(2, 2, 0.0)]),
        *rows_of([(0, 2, 0.0)], phase="received"),
    ]
    found = evaluations_by_scope(rows)
    assert [(scope, stats.mean) for scope, stats in found.items()] == [
        (Scope("personal", "test", "received"), 0.0),
        (Scope("personal", "test", "trained"), 1.0),
        (Scope("personal", "all", "trained"), 1.0),
        (Scope("global", "test", "received"), 0.5),
    ]


def test_losses_are_weighted_by_examples_over_the_clients_that_report_them():
    reports = [
        TrainReport(2, 30, 1, {"ce": 2.0, "prox": 5.0}),
        TrainReport(0, 10, 1, {"ce": 1.0}),
        TrainReport(1, 0, 0, {"ce": 100.0, "none": 1.0}),
    ]
    losses = mean_losses(reports)
    assert losses == {"ce": (10 * 1.0 + 30 * 2.0) / 40, "prox": 5.0}
    assert list(losses) == ["ce", "prox"]
    assert mean_losses([]) == {}


def test_the_order_of_arrival_does_not_touch_the_losses():
    values = [0.1, 0.7, 1e16, -1e16, 3.3]
    reports = [TrainReport(c, 1 + c, 1, {"prox" if c else "ce": v, "sum": v}) for c, v in enumerate(values)]
    losses = list(mean_losses(reports).items())
    assert [name for name, _ in losses] == ["ce", "sum", "prox"]
    assert all(list(mean_losses(order).items()) == losses for order in itertools.permutations(reports))
