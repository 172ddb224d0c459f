"""Test sets besides the clients' own: their rows, and that runs are judged on them and change in nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dataset, partition

import pflsim
from pflsim.analysis.clients import all_intervals, client_records
from pflsim.analysis.runs import Run
from pflsim.config.settings import Eval, Settings
from pflsim.data.content import row_digests
from pflsim.data.corruptions import Corruptor
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, shard
from pflsim.data.sets import drawn, examples_of
from pflsim.data.shifts import Rotation, Shift

DATA = dataset()
ROTATED = Shift((0, 1, 2, 1), (Rotation(0.0), Rotation(90.0), Rotation(30.0)))
CLIENTS = replace(partition(DATA, (12, 7, 20, 9)), shift=ROTATED)


def with_sets(*names: str, data: Dataset = DATA, rows: Partition = CLIENTS, **settings: Any) -> Partition:
    chosen = Settings(clients=rows.clients, eval=Eval(sets=[*names], **settings))
    return replace(rows, sets=drawn(chosen, data, rows))


def test_others_are_rows_of_the_others() -> None:
    """Of two clients, those of the other one; of four, as many as its own."""
    two = replace(CLIENTS, **{part: getattr(CLIENTS, part)[:2] for part in ("train", "val", "test")})
    own = with_sets("others", rows=two).sets["others"]
    assert [sorted(each.rows) for each in own] == [[*two.test[1]], [*two.test[0]]]
    for client, each in enumerate(with_sets("others").sets["others"]):
        assert len({*each.rows}) == 5 and not {*each.rows} & {*CLIENTS.test[client]}


def test_rows_as_inputs() -> None:
    """With the shift of their owners, then corrupted: a row in the same way in each set."""
    four = with_sets("others", "contrast", "corrupted", "mixture", severity=5)
    tests = [shard(DATA, four, client).test for client in range(4)]
    corrupt = Corruptor(5, 0, np.zeros(0), np.zeros(0))
    for name, sets in four.sets.items():
        for client, own in enumerate(sets):
            found = examples_of(DATA, four, own)
            assert len(found) == 5 and (found.x.dtype == torch.uint8) == (name == "others")
            digests = [digest.tobytes().hex() for digest in row_digests(DATA, own.rows)]
            each = zip(own.rows, own.owners, own.corruptions, digests, strict=True)
            for (x, y), (row, owner, how, digest) in zip(
                zip(*found.batch(slice(None)), strict=True), each, strict=True
            ):
                at = [*four.test[owner]].index(row)
                plain = tests[owner].batch(slice(at, at + 1))[0][0].numpy()
                wanted = corrupt(how, plain, digest, owner) if how else plain
                assert np.array_equal(x.numpy(), wanted) and y == tests[owner].y[at]
            assert ({*own.rows} == {*four.test[client]}) == (name in ("contrast", "corrupted"))
    assert {*four.sets["contrast"][0].corruptions} == {"contrast"}
    kinds = {name: {*np.concatenate([own.corruptions for own in four.sets[name]])} for name in four.sets}
    assert len(kinds["corrupted"]) > 4 and "" in kinds["mixture"] and len(kinds["mixture"]) > 1
    assert any((own.owners != client).any() for client, own in enumerate(four.sets["mixture"]))


def test_rows_depend_on_content_only() -> None:
    """The order of the rows in the files changes nothing, and the last client, which joins later, has no part."""
    order = np.random.default_rng(1).permutation(len(DATA.y))
    moved = replace(DATA, x=DATA.x[order], y=DATA.y[order])
    places = {part: tuple(np.sort(np.argsort(order)[own]) for own in getattr(CLIENTS, part)) for part in ("test",)}
    held = {"all_examples": 9, "holdout_clients": 1}
    before, after = with_sets("all", "others", **held), with_sets(
        "all", "others", data=moved, rows=replace(CLIENTS, **places), **held
    )  # fmt: skip
    for name, own in before.sets.items():
        assert len(own) == 3 and not any(3 in each.owners for each in own)
        for one, other in zip(own, after.sets[name], strict=True):
            assert np.array_equal(order[other.rows], one.rows)
    assert len(before.sets["all"][0].rows) == 9 and len({*map(id, before.sets["all"])}) == 1


def small(folder: Path, *more: str) -> Run:
    """A run on digits, of which one client joins later."""
    base = ["method=fedavg", "data=digits", "executor=inline", "progress=none", "clients=4", "rounds=2", *more]
    return pflsim.run(overrides=[*base, "eval.holdout_clients=1", "shift=rotation", f"run_dir={folder}"])


def test_a_run_is_judged_on_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All other rows are as without sets; the global model's `all` is its pooled result on the clients' own rows."""
    run = small(tmp_path / "with", "eval.sets=[others,all]", "tracking.predictions=true")
    plain = small(tmp_path / "without", "tracking.predictions=true")
    assert "eval.sets: " in capsys.readouterr().err and run.partition_hash == plain.partition_hash
    lines = [(each.folder / "per_client.csv").read_text().splitlines() for each in (run, plain)]
    added = [line for line in lines[0] if line.split(",")[2] in ("others", "all")]
    assert [line for line in lines[0] if line not in added] == lines[1]
    assert len(added) == 2 * 2 * 2 * 3 and not any("newcomer" in line for line in added)
    assert (run.folder / "predictions.npz").read_bytes() == (plain.folder / "predictions.npz").read_bytes()

    found = run.summary["sets"]
    assert "sets" not in plain.summary and {*found} == {"others", "all"}
    for choice, own in run.summary["accuracy"]["global"].items():
        judged = found["all"]["global"][choice]
        assert judged["mean"] == judged["weighted_mean"] == own["weighted_mean"] and judged["std"] == 0
        assert judged["clients"] == 3 and judged["round"] == own["round"]
    last = run.metrics()["accuracy.personal.others.trained.mean"].iloc[-1]
    assert found["others"]["personal"]["last"]["mean"] == last
    own = [sum(counts["test"]) for counts in run.partition["class_counts"][:3]]
    for name, rows in {"others": own, "all": [sum(own)] * 3}.items():
        (compared,) = pflsim.compare([run], set=name)
        assert [each["test"] for each in client_records(compared, all_intervals(compared))] == rows
