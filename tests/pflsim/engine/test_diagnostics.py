"""What is seen of a round, against numpy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pflsim.engine.diagnostics import MAX_MATRIX_SIZE, diagnose, drift, mean_confusion, prototype_similarity
from pflsim.messages import Prototypes, Uplink
from pflsim.types import Axis, EvalRow, Matrix


def uplink(client: int, **weights: np.ndarray) -> Uplink:
    return Uplink(weights={k: torch.from_numpy(np.asarray(w)) for k, w in weights.items()}, client=client)


def test_drift_is_the_distance_from_the_mean() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(3, 4, 5000)).astype(np.float32), draw.normal(size=(3, 7)).astype(np.float32)
    flat = np.concatenate([a.reshape(3, -1), b], axis=1).astype(np.float64)
    expected = np.linalg.norm(flat - flat.mean(0), axis=1)
    found = drift([uplink(c, a=a[i], b=b[i], n=np.array(i)) for i, c in enumerate((2, 5, 9))])
    assert list(found) == [2, 5, 9]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-6)


def test_near_models_keep_their_digits() -> None:
    """Squares of norms less twice a product would leave nothing of this."""
    far = np.full(10, 1e4, np.float32)
    found = drift([uplink(0, a=far), uplink(1, a=far + np.float32(1 / 512) * np.eye(10, dtype=np.float32)[0])])
    assert found[0] == found[1] == pytest.approx(1 / 1024, rel=1e-6)


def test_drift_of_different_architectures_is_of_what_they_share() -> None:
    ups = [uplink(0, shared=np.zeros(2), own=np.zeros(3)), uplink(1, shared=np.array([2.0, 0.0]), own=np.ones(4))]
    assert drift(ups) == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("ups", [[], [uplink(0, a=np.ones(2))], [uplink(0), uplink(1)]], ids=["none", "one", "empty"])
def test_no_drift_without_two_models(ups: list[Uplink]) -> None:
    assert drift(ups) == {}


def test_similarity_of_prototypes() -> None:
    """Clients 0 and 2 share class 1 and class 2, client 3 has none of theirs; client 1 sent nothing."""
    means = np.zeros((3, 4, 2), np.float32)
    means[0, 1], means[0, 2] = (1, 0), (0, 3)
    means[1, 1], means[1, 2] = (1, 1), (0, -2)
    means[2, 0] = (5, 5)
    means[0, 3] = (7, 7)  # a class that it does not have: its row means nothing
    counts = np.array([[0, 4, 1, 0], [0, 2, 2, 0], [3, 0, 0, 0]])
    rows = zip((0, 2, 3), torch.from_numpy(means), torch.from_numpy(counts), strict=True)
    sent = {client: Prototypes(m, n) for client, m, n in rows}
    found = prototype_similarity(sent, 4).values
    nan = np.nan
    both = (np.sqrt(0.5) - 1) / 2
    expected = [[1, nan, both, nan], [nan] * 4, [both, nan, 1, nan], [nan, nan, nan, 1]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def row(client: int, total: int, confusion: tuple[tuple[int, int, int], ...]) -> EvalRow:
    return EvalRow(client, "test", "personal", "trained", 0, total, 0.0, confusion)


def test_the_mean_client_is_confused_as_clients_are_on_average() -> None:
    """Class 0: client 0 has 4 of its 4 examples, 3 right; client 1 has 10 of its 20, 5 right."""
    rows = [row(0, 4, ((0, 0, 3), (0, 1, 1))), row(1, 20, ((0, 0, 5), (0, -1, 5), (1, 1, 10))), row(2, 0, ())]
    found = mean_confusion(rows, 3)
    share = (3 / 4 + 5 / 20) / (4 / 4 + 10 / 20)
    expected = [[share, (1 / 4) / 1.5, 0], [0, 1, 0], [np.nan] * 3]
    np.testing.assert_allclose(found.values, expected, rtol=1e-6)


def test_matrices_where_they_are_asked_for_only() -> None:
    shown = Matrix("seen", "Seen", Axis("a"), Axis("b"), np.zeros((2, 2), np.float32))
    large = Matrix("large", "Large", Axis("a"), Axis("b"), np.zeros((1, MAX_MATRIX_SIZE + 1), np.float32))
    rule: Any = SimpleNamespace(diagnostics=lambda state: [shown, large])
    up = Uplink(prototypes=Prototypes(torch.ones(2, 3), torch.ones(2)), client=0)
    assert diagnose(rule, None, [up], 2).matrices == ()
    assert [m.name for m in diagnose(rule, None, [up], 2, True).matrices] == ["seen", "prototype_similarity"]
    assert [m.name for m in diagnose(rule, None, [up], MAX_MATRIX_SIZE + 1, True).matrices] == ["seen"]
