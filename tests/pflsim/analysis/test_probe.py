"""The answer of `pflsim probe` from made-up runs, and how unlike clients are, against loops over examples and pairs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import made

from pflsim.analysis import probe
from pflsim.analysis.probe import FINETUNED, Answer, label_distance, reporting, unlikeness, update_cosine
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.shifts import Change, Inversion, LabelPermutation, Shift
from pflsim.messages import Message
from pflsim.records.trace import write_trace

pytestmark = pytest.mark.slow

CLIENTS, EXAMPLES = 8, 1000
EQUAL = {"local": 0.7, "fedavg": 0.7, FINETUNED: 0.7, "ditto": 0.7, "ifca": 0.7}


def answer(folder: Path, accuracy: Mapping[str, float | tuple[float, float]], best: str = "ditto") -> Answer:
    """Of methods with these mean accuracies, also by seed, and little noise; one has a higher validation accuracy."""
    rng, runs = np.random.default_rng(0), []
    for method, seed in itertools.product(accuracy, range(2)):
        right = np.rint(EXAMPLES * np.broadcast_to(accuracy[method], 2)[seed] + rng.normal(0, 5, CLIENTS)).astype(int)
        test, val = [(int(n), EXAMPLES) for n in right], [(500 + 10 * (method == best), EXAMPLES)] * CLIENTS
        runs.append(made(folder / f"{method}-{seed}", [test] * 2, val=[val] * 2, method=method, seed=seed))
    return Answer.of(runs)


@pytest.mark.parametrize(
    ("better", "best", "ahead", "pays", "decides"),
    [
        ({"local": 0.8}, "ditto", ["alone"], "No: alone", "nothing, clear"),
        ({"ifca": 0.8}, "ditto", ["in groups"], "Yes: in groups", "nothing, clear"),
        ({"ditto": 0.8}, FINETUNED, ["alone", "in groups", "personal", "together"], "Perhaps not: alone", "--seeds 5"),
        ({"fedavg": 0.8, "ifca": 0.802}, "ditto", ["in groups", "together"], "Perhaps not: together", "(in groups and"),
        ({"ifca": (0.9, 0.75), "fedavg": 0.8}, "ditto", ["in groups"], "Perhaps: in groups", "--seeds 5 (in groups"),
    ],
)
def test_what_is_best_and_what_decides(
    tmp_path: Path,
    better: Mapping[str, float | tuple[float, float]],
    best: str,
    ahead: list[str],
    pays: str,
    decides: str,
) -> None:
    """The best estimate is named, though it is not clear, and of those within half a point the simplest.

    Of the two personal methods, the one with the better validation result counts, whatever the test results.
    """
    found = answer(tmp_path, EQUAL | better, best=best)
    assert sorted(found.ahead) == ahead and found.pays == pays and decides in found.verdict, found


@pytest.mark.parametrize(
    ("values", "others", "noise", "rises"),
    [
        ((50, 52, 54, 56, 58, 60, 62, 64), 66, 0, True),
        ((50, 52, 54, 56, 58, 60, 62, 64), 80, 0, False),  # 4 points are less than half of the distance
        ((50, 52, 54, 56, 58, 60, 62, 64), 50, 0, False),  # ahead by 14 points
        ((50, 52, 54, 56, 58, 60, 62, 64), 66, 20, False),  # less than two standard errors
        ((50, 56, 62, 68, 68, 50, 56, 68), 66, 0, False),  # its best value is from the first half
        ((50, 56, 62, 63.8, 64, 64, 64, 64.2), 64, 0, False),  # less than half of 0.5 points
    ],
)
def test_what_still_rises(tmp_path: Path, values: tuple[float, ...], others: float, noise: float, rises: bool) -> None:
    """FedAvg has these validation accuracies in eight rounds, and all others one, with noise between clients."""
    rng, runs = np.random.default_rng(0), []
    for method, seed in itertools.product(EQUAL, range(2)):
        own = values if method == "fedavg" else [others] * 8
        val = [[(int(10 * v + noise * 10 * rng.normal()), 1000) for _ in range(CLIENTS)] for v in own]
        test = [[(700, 1000)] * CLIENTS] * 8
        runs.append(made(tmp_path / f"{method}-{seed}", test, val=val, method=method, seed=seed))
    found = Answer.of(runs)
    assert bool(found.rises) == rises and bool(found.next()[1]) != rises and (found.pays == "Not yet known") == rises
    assert not rises or "+4.0 points in the last 2 rounds; rounds=16" in found.verdict


def test_differences_and_the_clients_that_lose(tmp_path: Path) -> None:
    found = answer(tmp_path, EQUAL | {"fedavg": 0.6, "ifca": 0.8})
    by_method = {g.method: np.concatenate([r.counts(1)["accuracy"] for r in g.runs]) for g in found.whole.groups}
    text, gap = " ".join(found.sentences), 100 * np.mean(by_method["ifca"] - by_method["fedavg"])
    assert found.ahead == ["in groups"] and found.pays == "Yes: in groups"
    assert f"IFCA (in groups) is ahead of FedAvg (together) by {gap:.1f} points" in text
    lose = np.sum(by_method["ditto"] < by_method["local"])
    assert f"FedAvg (together) for 16, Ditto (personal) for {lose}, " in text and "of 16 clients of all seeds." in text
    said = {"again": "data=<x>", "command": "c", "advice": found.next()[0], "plan": "3 runs"}
    html = probe.page(
        found, unlike=[("labels", 0.5, "a < b")], chosen={"ifca": "ifca-1"}, trials={"ifca-1": "x y"}, **said
    )
    assert "Does personalisation pay here? Yes: in groups." in html and "a &lt; b" in html and "data=&lt;x&gt;" in html
    assert "{ --l: #ba5909; --d: #ff964f; }" in html and "<code>y</code>" in html and "in groups: IFCA" in html


def test_label_distance() -> None:
    y, sizes = np.array([0, 0, 1, 1, 2, 2, 2, 0]), [3, 1, 4]
    parts, expected = ([0, 0, 1], [1], [2, 2, 2, 0]), []
    for part in parts:
        expected.append(sum(abs(part.count(c) / len(part) - list(y).count(c) / 8) for c in range(3)) / 2)
    assert label_distance(y, sizes) == pytest.approx(sum(expected) / 3, abs=1e-15)
    assert label_distance(np.array([0, 0, 1, 1]), [2, 2]) == 0.5 and label_distance(np.array([0, 1, 0, 1]), [2, 2]) == 0


def test_variance_between() -> None:
    """Total variance is that between clients and that within them."""
    values, sizes = np.random.default_rng(1).normal(size=(9, 3)), [2, 4, 3]
    total = sum((row - values.mean(0)) @ (row - values.mean(0)) for row in values)
    within = sum(
        (row - part.mean(0)) @ (row - part.mean(0)) for part in (values[:2], values[2:6], values[6:]) for row in part
    )
    assert probe.variance_between(values, sizes) == pytest.approx(1 - within / total, abs=1e-14)


def test_update_cosine(tmp_path: Path) -> None:
    rng, changes = np.random.default_rng(2), []
    for client in range(3):
        start, change = rng.normal(size=(2, 4)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
        for name, weight in (("down", start), ("up", start + change)):
            tensors = {"net.a": torch.from_numpy(weight), "net.running_mean": torch.full((3,), 9.0 * (name == "up"))}
            write_trace(tmp_path, 1, f"{name}_{client:03}", Message(weights=tensors), {})
        changes.append(((start + change).astype(float) - start).ravel())
    pairs = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.combinations(changes, 2)]
    assert update_cosine(tmp_path / "trace" / "round_0001") == pytest.approx(np.mean(pairs), abs=1e-12)


def test_inputs_are_compared_at_equal_labels_after_the_shift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Label skew alone leaves no variance between clients; inverted inputs or swapped labels of one do."""
    monkeypatch.setattr("pflsim.analysis.probe.update_cosine", lambda trace: 0.0)
    rng, y = np.random.default_rng(3), np.repeat([0, 1], 40)
    x = np.float32(5 * y + rng.normal(0, 0.1, 80)).reshape(80, 1, 1, 1)
    data = Dataset("made", x, y, 2, 80)
    skewed = Partition(*[(np.arange(36), np.arange(36, 80))] * 3)
    labels, inputs, _ = unlikeness(data, skewed, tmp_path)
    assert labels[1] > 0.4 and inputs[1] < 0.1
    mixed = Partition(*[(np.arange(0, 80, 2), np.arange(1, 80, 2))] * 3, Shift((0, 1), (Change(), Inversion(50.0))))
    labels, inputs, _ = unlikeness(data, mixed, tmp_path)
    assert labels[1] == 0 and inputs[1] > 0.9
    swapped = Partition(
        *[(np.arange(0, 80, 2), np.arange(1, 80, 2))] * 3, Shift((0, 1), (Change(), LabelPermutation((1, 0))))
    )
    labels, inputs, _ = unlikeness(data, swapped, tmp_path)
    assert labels[1] == 0 and inputs[1] > 0.9
    values = Dataset("made", x, np.float32(y)[:, None] * 3, 1, 80)
    targets, _, _ = unlikeness(values, skewed, tmp_path)
    assert targets[0] == "targets" and 0.7 < targets[1] < 0.9  # 36 of 80 with 0, 4 and 40 with 3


def test_fine_tuning_reports_the_personal_model_of_the_same_run(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [[(1, 2)]], reported=("global", "trained"), method="fedavg")
    found = reporting(FINETUNED, run)
    assert (found.method, found.reported.model, found.reported.phase) == (FINETUNED, "personal", "trained")
    assert reporting("fedavg", run) is run
