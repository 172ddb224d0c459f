import csv
import json
import math
import random
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import EVALUATED, SPLITS
from made_runs import random_record as record
from support import events

from pflsim.records.history import Traffic, from_line, read_history, round_metrics, to_line
from pflsim.records.scalars import hyperparameters
from pflsim.records.summary import RunMeta
from pflsim.records.tracker import MemorySampler, Tracker
from pflsim.types import RoundRecord, TrainReport

META = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 6, 4, 0, reported_model="personal")


def track(folder, records, complete=True):
    folder.mkdir()
    tracker = Tracker(folder, META)
    for entry in records:
        tracker.round(entry)
    return tracker.close(complete)


def test_every_line_can_be_recomputed_from_per_client_csv(tmp_path):
    records = [record(n) if n % 2 == 0 else record(n, evaluations=()) for n in range(1, 5)]
    track(tmp_path / "run", records)
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    with (tmp_path / "run" / "per_client.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    up_total = down_total = 0
    for line, entry in zip(lines, records, strict=True):
        mine = [row for row in table if int(row["round"]) == line["round"]]
        per_client = {int(row["client"]): (int(row["up_bytes"]), int(row["down_bytes"])) for row in mine}
        up, down = (sum(pair[side] for pair in per_client.values()) for side in (0, 1))
        up_total, down_total = up_total + up, down_total + down
        assert up == sum(report.up_bytes for report in entry.reports)
        assert line["traffic"] == {
            "up_bytes": up, "down_bytes": down, "up_bytes_total": up_total, "down_bytes_total": down_total,
        }  # fmt: skip
        assert set(line["accuracy"]) == ({"personal", "global"} if entry.evaluations else set())
        for model, splits in line["accuracy"].items():
            for split, phases in splits.items():
                ((phase, stats),) = phases.items()
                kept = [r for r in mine if (r["model"], r["split"], r["phase"]) == (model, split, phase)]
                rates = np.array([int(r["correct"]) / int(r["total"]) for r in kept])
                assert (stats["clients"], stats["mean"]) == (6, pytest.approx(rates.mean()))
                assert stats["worst_decile"] == pytest.approx(rates.min())
                loss = np.mean([float(r["loss"]) / int(r["total"]) for r in kept])
                assert stats["loss"] == pytest.approx(loss)


def test_all_but_the_seconds_is_the_same_in_any_order_and_at_any_speed(tmp_path):
    def shuffled(entry):
        reports, rows = (tuple(random.Random(7).sample(x, len(x))) for x in (entry.reports, entry.evaluations))
        return replace(entry, reports=reports, evaluations=rows, seconds={"downlink": 0.25, "train": 9.0})

    track(tmp_path / "a", [record(n) for n in range(1, 4)])
    track(tmp_path / "b", [shuffled(record(n)) for n in range(1, 4)])
    texts = [(tmp_path / run / "per_client.csv").read_bytes() for run in "ab"]
    assert texts[0] == texts[1]
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in "ab"]
    assert lines[0] != lines[1]
    cut = [[text[: text.index(', "seconds"')] for text in run] for run in lines]
    assert cut[0] == cut[1]


def test_the_files_are_whole_after_every_round(tmp_path):
    with closing(Tracker(tmp_path, META)) as tracker:
        for number in (1, 2):
            metrics = tracker.round(record(number))
            assert read_history(tmp_path)[-1] == metrics
            with (tmp_path / "per_client.csv").open(newline="") as file:
                assert len(list(csv.DictReader(file))) == number * 24
            assert json.loads((tmp_path / "summary.json").read_text())["complete"] is False
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is True


def test_an_interruption_leaves_an_incomplete_summary(tmp_path):
    tracker = Tracker(tmp_path, META)
    tracker.round(record(1))
    tracker.close(complete=False)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert (content["complete"], content["rounds"]) == (False, 1)
    assert content["peak_rss_mb"] > 10
    assert tracker.close(complete=True).complete is False


def test_nan_is_null_on_the_line_and_nan_again_when_read():
    entry = record(1)
    broken = TrainReport(entry.reports[0].client, 10, 1, {"ce": math.inf})
    metrics = round_metrics(RoundRecord(1, (0,), (broken,), {}, (), {}), Traffic())
    text = to_line(metrics)
    assert json.loads(text)["losses"] == {"ce": None}
    assert math.isnan(from_line(text).losses["ce"])


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return the entry and the TensorBoard events of a run of one round with everything that can be logged."""
    folder, entry = tmp_path_factory.mktemp("runs"), record(1)
    reports = tuple(replace(report, gpu_bytes=1_000_000 * report.client) for report in entry.reports)
    entry = replace(entry, reports=reports, drift={1: 1.0, 2: 2.0})
    with closing(Tracker(folder, META, per_client=True, hyperparameters={"lr": 0.1})) as tracker:
        metrics = tracker.round(entry)
    assert metrics.drift == {"mean": 1.5, "max": 2.0} and read_history(folder) == [metrics]
    assert len([*folder.glob("*tfevents*")]) == 1
    return entry, events(folder)


def test_curves_of_a_run(shown):
    entry, found = shown
    statistics = ("weighted_mean", "std", "median", "worst_decile", "best_decile")
    scopes = [f"{model}/{split}/{phase}" for model, phase in EVALUATED for split in SPLITS]
    expected = {f"{kind}/{scope}" for kind in ("accuracy", "evaluation_loss") for scope in scopes}
    expected |= {f"accuracy_statistics/{scope}/{name}" for scope in scopes for name in statistics}
    expected |= {"accuracy/best_by_validation/mean", "accuracy/best_by_validation/worst_decile"}
    expected |= {"loss/ce", "loss/prox", "traffic/up_bytes_total", "traffic/down_bytes_total", "memory/held_mb"}
    expected |= {"seconds/downlink", "seconds/train", "seconds/total", "drift/mean", "drift/max", "memory/gpu_peak_mb"}
    assert {tag for tag in found.Tags()["scalars"] if not tag.startswith("client/")} == expected
    assert (found.Scalars("drift/mean")[0].value, found.Scalars("drift/max")[0].value) == (1.5, 2.0)
    assert found.Scalars("memory/gpu_peak_mb")[0].value == max(r.client for r in entry.reports)
    assert found.Scalars("traffic/up_bytes_total")[0].value == sum(r.up_bytes for r in entry.reports)
    parts = ("experiment", "session_start_info", "session_end_info")
    assert set(found.PluginTagToContent("hparams")) == {f"_hparams_/{part}" for part in parts}


def test_histograms_of_the_clients_rates(shown):
    """In bins of equal width, whatever the rates; the same counts as by numpy."""
    entry, found = shown
    assert set(found.Tags()["histograms"]) == {f"clients/{m}/{s}/{p}" for m, p in EVALUATED for s in SPLITS}
    value = found.Histograms("clients/personal/test/trained")[0].histogram_value
    rates = [r.correct / r.total for r in entry.evaluations if (r.model, r.split) == ("personal", "test")]
    assert value.num == 6 and value.sum == pytest.approx(sum(rates))
    expected, edges = np.histogram(rates, np.linspace(0, 1, 31))
    counted = {round(limit, 9): count for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
    assert counted == {round(e, 9): n for e, n in zip(edges[1:].tolist(), expected.tolist(), strict=True) if n}


def test_hyper_parameters_with_their_default_are_left_out_and_booleans_are_words() -> None:
    names = {"method": "fedprox", "model": "mlp", "placement": "default"}
    fedprox = "lightning_modules.methods.fedprox.FedProx"
    values = {"batch_size": 20, "momentum": 0.5, "lr": 0.1, "seed": 0, "clients": 10, "partition.balanced": True}
    values |= {"model._target_": "lightning_modules.nets.mlp.Mlp", "model.hidden": [100]}
    values |= {"method.client._target_": fedprox}
    assert hyperparameters(values, names) == {
        "method": "fedprox", "model": "mlp", "momentum": 0.5, "lr": 0.1, "seed": 0, "partition.balanced": "true",
        "model.hidden": "[100]",
    }  # fmt: skip


def test_the_best_round_by_validation_is_a_curve(tmp_path: Path) -> None:
    """Its last point is what summary.json has."""
    rounds = [record(n, evaluations=()) if n == 3 else record(n) for n in range(1, 8)]
    best = track(tmp_path / "run", rounds).figures("personal")["best_val"]
    for name in ("mean", "worst_decile"):
        curve = events(tmp_path / "run").Scalars(f"accuracy/best_by_validation/{name}")
        assert [point.step for point in curve] == [1, 2, 4, 5, 6, 7]
        assert curve[-1].value == pytest.approx(getattr(best[1].primary, name))


class Kept:
    """A logger that keeps what it gets, and fails in a call of our choice."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, list[Any]()

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == self.fails:
            raise OSError("no network\nand more")

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self._called("hyperparameters", params)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._called("scalars", metrics, step)

    def finalize(self, status: str) -> None:
        self._called("close", status)


def test_loggers_get_what_tensorboard_gets(tmp_path: Path) -> None:
    kept = Kept()
    options: dict[str, Any] = {"hyperparameters": {"lr": 0.1}, "per_client": True, "loggers": {"mine": lambda: kept}}
    with closing(Tracker(tmp_path, META, **options)) as tracker:
        tracker.round(replace(record(1), drift={2: 0.5}))
    (first, (_, values, step), last) = kept.calls
    assert (first, last) == (("hyperparameters", {"lr": 0.1}), ("close", "success"))
    found = events(tmp_path)
    assert step == 1 and values.keys() == set(found.Tags()["scalars"])
    assert all(found.Scalars(tag)[0].value == pytest.approx(value) for tag, value in values.items())


def test_a_resumed_run_logs_its_earlier_rounds_again(tmp_path: Path) -> None:
    first, second = Kept(), Kept()
    with closing(Tracker(tmp_path, META, loggers={"mine": lambda: first})) as tracker:
        for number in (1, 2, 3):
            tracker.round(record(number))
    with closing(Tracker(tmp_path, META, resume_after=2, loggers={"mine": lambda: second})) as tracker:
        tracker.round(record(3))
    scalars = [[(s, v) for name, v, s in kept.calls[1:-1] if name == "scalars"] for kept in (first, second)]
    own = [[(s, {k: x for k, x in v.items() if not k.startswith("memory")}) for s, v in each] for each in scalars]
    assert own[0] == own[1] and [s for s, _ in own[1]] == [1, 2, 3]


@pytest.mark.parametrize("fails", ["make", "hyperparameters", "scalars", "close"])
def test_a_logger_that_fails_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    bad, good = Kept(fails), Kept()

    def make() -> Kept:
        return bad if fails != "make" else [][0]

    with closing(Tracker(tmp_path, META, loggers={"bad": make, "good": lambda: good})) as tracker:
        for number in (1, 2):
            tracker.round(record(number))
    (warning,) = caplog.messages
    assert "bad" in warning and "\n" not in warning and "more" not in warning
    assert [name for name, *_ in good.calls] == ["hyperparameters", "scalars", "scalars", "close"]
    assert [name for name, *_ in bad.calls].count(fails) == (fails != "make")


def test_memory_of_a_child_process_counts_and_the_peak_stays():
    hold = "import sys; block = bytearray(b'x') * 100_000_000; print(flush=True); sys.stdin.read()"
    sampler = MemorySampler()
    before = sampler.sample(force=True)
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline()
        during = sampler.sample(force=True)
        child.communicate()
    assert 80 < during - before < 160 and sampler.sample(force=True) < during - 80
    assert sampler.peak_mb == during
