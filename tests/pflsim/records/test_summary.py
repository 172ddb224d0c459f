import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import stats

from pflsim.records.evaluation import Scope
from pflsim.records.files import write_atomically
from pflsim.records.history import RoundMetrics, Traffic
from pflsim.records.summary import RunMeta, Summary, to_dict, write_summary

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


def test_without_validation_or_a_global_model_the_places_are_null():
    accuracy = to_dict(Summary(META, [line(1, 0.5)], True, 3.0, 100.0))["accuracy"]
    assert accuracy["personal"]["best_val"] is None
    assert accuracy["global"] == {"last": None, "best_val": None, "best_test_oracle": None}


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


def test_an_initial_round_is_no_round():
    assert Summary(META, [line(0), line(1, 0.5), line(2, 0.6)], True, 3.0, 100.0).rounds == 2
    assert Summary(META, [line(0)], False, 3.0, 100.0).rounds == 0
