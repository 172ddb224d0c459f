import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pflsim.records.evaluation import SCOPES, Scope, evaluation, evaluations_by_scope, mean_losses
from pflsim.types import EvalPhase, EvalRow, ModelKind, Split, TrainReport


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


def test_scopes_are_separate_and_ordered_and_empty_ones_left_out():
    rows = [
        *rows_of([(1, 2, 0.0)], model="global", phase="received"),
        *rows_of([(0, 0, 0.0)], split="val"),
        *rows_of([(2, 2, 0.0)]),
        *rows_of([(0, 2, 0.0)], phase="received"),
    ]
    found = evaluations_by_scope(rows)
    assert {scope: stats.mean for scope, stats in found.items()} == {
        Scope("personal", "test", "received"): 0.0,
        Scope("personal", "test", "trained"): 1.0,
        Scope("global", "test", "received"): 0.5,
    }
    assert list(found) == [scope for scope in SCOPES if scope in found]


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
