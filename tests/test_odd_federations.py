"""Federations that nobody would plan and that data may bring: they run to the end, inline, and give sane figures."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import METHOD_PARAMS, RUN_PARAMS, Records, dataset, inline, settings_of

from lightning_modules import prepare as preparing
from lightning_modules.prepare import prepare
from pflsim.config.settings import Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.display.formats import who_is_evaluated
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError

SMALL = ["data=digits", "clients=4", "rounds=2", "model.hidden=[6]", "lr=0.05", "executor=inline", "partition=iid"]
NORMS = ["model=cnn_bn", "model.channels=[2,3]", "model.kernel=3", "model.padding=1", "model.hidden=6"]
"""A model with batch normalisation, for images of 8×8."""


@cache
def small(method: str, *overrides: str) -> Settings:
    given = [o for o in SMALL if not (NORMS[0] in overrides and o.startswith("model."))]
    return settings_of(f"method={method}", *given, *overrides)


def rows_of(data: Dataset, *classes: int) -> np.ndarray:
    """The training rows of these classes."""
    return np.flatnonzero(np.isin(data.y[: data.train_size], classes))


def rows_to_test(data: Dataset, *classes: int) -> np.ndarray:
    return np.flatnonzero(np.isin(data.y[data.train_size :], classes)) + data.train_size


NONE = np.arange(0)
GAP = 2
"""A class that the data set counts and that no example has."""


def made_up() -> tuple[Dataset, Partition]:
    """Four clients: one with a single example, one with a single class, one without tests, one with all there is."""
    whole = dataset(classes=4, per_class=40, shape=(1, 8, 8))
    kept = np.flatnonzero(whole.y != GAP)
    data = replace(whole, x=whole.x[kept], y=whole.y[kept], train_size=int((kept < whole.train_size).sum()))
    train = rows_of(data, 0)[:1], rows_of(data, 1)[:7], rows_of(data, 0, 3)[2:12], rows_of(data, 0, 1, 3)[20:40]
    test = rows_to_test(data, 0)[:3], rows_to_test(data, 1)[:5], NONE, rows_to_test(data, 0, 1, 3)[10:25]
    val = rows_of(data, 0)[-1:], rows_of(data, 1)[-2:], rows_of(data, 3)[-3:], rows_of(data, 0, 1, 3)[-4:]
    return data, Partition(train, val, test)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, settings: Settings, changes: Any = None) -> Records:
    """A run on the made-up data, whose partition `changes` may alter."""
    data, partition = made_up()
    partition = partition if changes is None else changes(partition)
    monkeypatch.setattr(preparing, "load_federation", lambda *_: (data, partition))
    job = prepare(settings)
    Simulation(inline(job), job.plan, folder, listener := Records()).run()
    assert [record.round for record in listener.records if record.round] == [1, 2]
    for record in listener.records:
        for row in record.evaluations:
            assert row.total == len(getattr(partition, row.split)[row.client]) and 0 <= row.correct <= row.total
            assert math.isfinite(row.loss) and row.loss >= 0 and (row.total or row.loss == 0)
        for report in record.reports:
            assert all(math.isfinite(value) for value in report.losses.values())
    return listener


@pytest.mark.parametrize("lockstep", ["auto", "false"])
@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_one_example_one_class_no_tests_and_a_class_nobody_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, lockstep: str
) -> None:
    """With a batch larger than every shard, too."""
    listener = run(monkeypatch, tmp_path, small(method, "batch_size=1000", f"lockstep={lockstep}"))
    assert {row.client for row in listener.records[-1].evaluations if row.split == "test"} == {0, 1, 2, 3}


@pytest.mark.parametrize("method", RUN_PARAMS)
def test_small_batches_that_leave_one_example_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """Batches of 3 of 7 and 10 examples: the last has one."""
    run(monkeypatch, tmp_path, small(method, "batch_size=3"))


@pytest.mark.parametrize("method", RUN_PARAMS)
def test_batch_normalisation_leaves_out_a_last_batch_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """And refuses a client with a single example, by name; Per-FedAvg, which halves its batches, needs four."""
    least = 4 if method == "per_fedavg" else 2
    chosen = small(method, *NORMS, f"batch_size={3 * least // 2}")
    with pytest.raises(SettingsError, match=f"client 0 has 1 training examples, .* at least {least}"):
        run(monkeypatch, tmp_path, chosen)

    def enough(partition: Partition) -> Partition:
        return replace(partition, train=(partition.train[3][:least], *partition.train[1:]))

    run(monkeypatch, tmp_path, replace(chosen, batch_size=chosen.batch_size if least == 2 else least), enough)


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_a_batch_of_one_is_refused_with_batch_normalisation(method: str) -> None:
    with pytest.raises(SettingsError, match="batch_size=1: a model with batch normalisation needs at least"):
        prepare(small(method, *NORMS, "batch_size=1"))


def test_the_reported_model_has_to_be_evaluated() -> None:
    prepare(small("fedavg", "eval.models=[global]"))
    with pytest.raises(SettingsError, match=r"eval.models=.global], .*method=ditto .*eval.models=.personal]"):
        prepare(small("ditto", "eval.models=[global]"))


@pytest.mark.parametrize(("asked", "words"), [(3, "all clients"), (2, "2 clients chosen by the seed")])
def test_as_many_evaluated_clients_as_there_are_is_all(asked: int, words: str) -> None:
    """Of four clients, one joins after the last round."""
    job = prepare(small("fedavg", f"eval.clients={asked}", "eval.holdout_clients=1"))
    assert who_is_evaluated(job.plan.meta.evaluated_on) == words
