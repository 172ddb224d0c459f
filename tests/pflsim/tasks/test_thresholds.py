"""Thresholds for a sensitivity, against a search over all of them, and the shares that they lead to."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_score, recall_score

from pflsim.display.metrics import SHARES
from pflsim.tasks.thresholds import chosen, decided, of_class_1
from pflsim.types import EvalRow

RNG = torch.Generator()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in whatever order the tests run."""
    RNG.manual_seed(0)


@pytest.mark.parametrize("sensitivity", [0.05, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("decimals", [1, 6])
def test_the_highest_threshold_that_reaches_a_sensitivity(sensitivity: float, decimals: int) -> None:
    for positives in (1, 10, 37):
        p = torch.rand(60, generator=RNG).round(decimals=decimals)
        y = torch.arange(60) < positives
        reaching = [float(t) for t in p.unique() if int((p >= t)[y].sum()) >= sensitivity * positives - 1e-9]
        assert chosen(p, y, sensitivity) == max(reaching)
    assert math.isnan(chosen(p, y & False, sensitivity)) and math.isnan(chosen(p.log() * 0 / 0, y, sensitivity))


def evaluated(client: int, split: Any, phase: Any, no: int, yes: int) -> EvalRow:
    y = torch.cat((torch.zeros(no), torch.ones(yes))).long()
    scores = torch.randn((no + yes, 2), generator=RNG) + y[:, None] * torch.tensor([0.0, 1.0])
    row = EvalRow(client, split, "personal", phase, 0, no + yes, 0.0, metrics={"auroc": 0.5})
    return replace(row, outcomes=(scores, y)) if no + yes else row


def shares(p: np.ndarray, y: np.ndarray, threshold: Any) -> list[float]:
    yes = p >= threshold
    return [of(y, yes, pos_label=label) for of in (recall_score, precision_score) for label in (1, 0)]


def test_thresholds_of_clients_with_few_validation_rows_are_those_of_all() -> None:
    """Per phase. Client 0 has 10 rows of each class, client 1 has 9 of one, client 2 none."""
    sizes = {0: (20, 10), 1: (30, 9), 2: (0, 0)}
    rows = [
        evaluated(client, split, phase, *((40, 25) if split == "test" else sizes[client]))
        for phase in ("received", "trained") for client in sizes for split in ("test", "val")
    ]  # fmt: skip
    found, together = decided(rows, 0.8)
    outcomes = {(row.client, row.split, row.phase): row.outcomes for row in rows if row.outcomes}
    known = {key: (of_class_1(scores).numpy(), y.numpy()) for key, (scores, y) in outcomes.items()}
    for phase in ("received", "trained"):
        p, y = (np.concatenate([known[client, "val", phase][part] for client in (0, 1)]) for part in (0, 1))
        every = chosen(torch.tensor(p), torch.tensor(y == 1), 0.8)
        own = chosen(*map(torch.tensor, (known[0, "val", phase][0], known[0, "val", phase][1] == 1)), 0.8)
        assert own != every
        tested = [row.metrics for row in found if (row.split, row.phase) == ("test", phase)]
        assert [metrics["threshold"] for metrics in tested] == [own, every, every]
        for client, metrics in enumerate(tested):
            expected = shares(*known[client, "test", phase], metrics["threshold"])
            assert [metrics[name] for name in SHARES] == pytest.approx(expected) and metrics["auroc"] == 0.5
        p, y = (np.concatenate([known[client, "test", phase][part] for client in sizes]) for part in (0, 1))
        mixed = shares(p, y, np.repeat([metrics["threshold"] for metrics in tested], 65))
        assert [together["personal", "test", phase][name] for name in SHARES] == pytest.approx(mixed)
        assert together["personal", "test", phase]["threshold"] == every
    assert [row.metrics for row in decided(rows, None)[0]] == [row.metrics for row in rows]


@pytest.mark.parametrize(("rows", "missing"), [((5, 0), {"sensitivity"}), ((0, 5), {"specificity"})])
def test_shares_of_no_rows_are_missing(rows: tuple[int, int], missing: set[str]) -> None:
    found, _ = decided([evaluated(0, "val", "trained", 10, 10), evaluated(0, "test", "trained", *rows)], 0.9)
    assert {*SHARES} - {*next(row.metrics for row in found if row.split == "test")} >= missing
    unchosen, _ = decided([evaluated(0, "val", "trained", 9, 0), evaluated(0, "test", "trained", *rows)], 0.9)
    assert all([*row.metrics] == ["auroc"] for row in unchosen)
