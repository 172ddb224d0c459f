"""A tracker that takes a run up leaves what one would have left that was never interrupted."""

import csv
import itertools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import random_record
from run_files import FailingCalls
from support import events
from tensorboard.summary.writer import event_file_writer

from pflsim.records.history import read_history
from pflsim.records.per_client import complete_rounds
from pflsim.records.summary import RunMeta
from pflsim.records.trace import RoundMatrices, read_matrices, write_matrices
from pflsim.records.tracker import Tracker
from pflsim.types import Axis, EvalRow, Matrix, NewcomerRecord, RoundRecord

META = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 6, 5, 0, newcomers=1)
LAST = 5


def record(number: int) -> RoundRecord:
    """Round 0 is initial; 3 is not evaluated; a client of round 2 has no test examples; 4 has neither traffic nor
    evaluations.
    """
    found = random_record(number, cohort={0: range(6), 4: ()}.get(number), seconds={"train": 2.0})
    rows = [replace(row, total=0) if (number, row.client) == (2, 1) else row for row in found.evaluations]
    faults: Any = {1: {5: "dropout", 3: "error"}, 3: {0: "straggler", 4: "dropout"}}.get(number, {})
    found = replace(found, evaluations=tuple(rows if number in (1, 2, 5) else ()), faults=faults)
    return replace(found, down_bytes={}) if number == 0 else found


RECEIVED, TRAINED = (EvalRow(6, "test", "personal", p, n, 10, 2.0) for p, n in (("received", 1), ("trained", 8)))
JOINED = NewcomerRecord(LAST, {6: 300}, (RECEIVED,), (TRAINED,))


def go(tracker: Tracker, numbers: Sequence[int], newcomers: bool = False, complete: bool = True) -> Any:
    for number in numbers:
        tracker.round(record(number))
    if newcomers:
        tracker.newcomers(JOINED)
    return tracker.close(complete)


def start(folder: Path, last: int = LAST, **options: Any) -> Path:
    """A run from round 0 to `last`."""
    folder.mkdir()
    go(Tracker(folder, META), range(last + 1), **options)
    return folder


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve but those of the clock and the memory: steps and values, as TensorBoard reads them."""
    found = events(folder)
    own = [tag for tag in found.Tags()["scalars"] if tag != "memory/held_mb"]
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in own}


def files(folder: Path) -> tuple[str, bytes, dict[str, Any]]:
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("seconds", "peak_rss_mb", "resumed_after"):
        summary.pop(name, None)
    return (folder / "metrics.jsonl").read_text(), (folder / "per_client.csv").read_bytes(), summary


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard sorts files of the same second by a counter, as text: 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    return start(tmp_path_factory.mktemp("whole") / "run", newcomers=True)


def torn(folder: Path) -> None:
    """What a kill in the middle of writing leaves."""
    for name, text in (("metrics.jsonl", '{"round": 6, "coh'), ("per_client.csv", "6,1,test,pers")):
        with (folder / name).open("a") as file:
            file.write(text)
    for path in folder.glob("*tfevents*"):
        with path.open("ab") as file:
            file.write(b"\x18\x00\x00\x00\x00\x00\x00\x00half")
    (folder / "summary.json").unlink()


def nothing(folder: Path) -> None:
    del folder


@pytest.mark.parametrize("after", range(LAST + 1))
@pytest.mark.parametrize("ended", [nothing, torn])
def test_it_is_as_if_nothing_had_happened(whole: Path, tmp_path: Path, after: int, ended: Callable[..., None]) -> None:
    """After any round of a run that had come to its end, or was killed while it wrote."""
    folder = start(tmp_path / "run", newcomers=True)
    ended(folder)
    tracker = Tracker(folder, META, resume_after=after)
    assert [metrics.round for metrics in tracker.history] == list(range(after + 1))
    assert tracker.history == read_history(whole)[: after + 1]
    assert [metrics.round for metrics in read_history(folder)] == list(range(after + 1))
    go(tracker, range(after + 1, LAST + 1), newcomers=True)
    assert files(folder) == files(whole)
    assert curves(folder) == curves(whole)


@pytest.mark.parametrize(("after", "kept"), [(2, None), (3, 3), (4, 3)])
def test_matrices_of_rounds_that_are_gone_go_too(tmp_path: Path, after: int, kept: int | None) -> None:
    folder = start(tmp_path / "run", 4, complete=False)
    matrix = Matrix("alpha", "weights", Axis("receiver"), Axis("sender"), np.zeros((2, 2), np.float32))
    write_matrices(folder, RoundMatrices(3, (matrix,)))
    Tracker(folder, META, resume_after=after).close(complete=False)
    found = read_matrices(folder)
    assert (found and found.round) == kept


def test_seconds_add_up_and_memory_is_the_most(tmp_path: Path) -> None:
    """Rounds take 2 s by their lines. The first session says 100 s for rounds 0 to 2; the second is killed after 3 and
    4; the third takes over after 3.
    """
    folder = start(tmp_path / "run", 2, complete=False)
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 100.0, "peak_rss_mb": 1e6}))
    killed = Tracker(folder, META, resume_after=2)
    between = json.loads(path.read_text())
    assert (between["complete"], between["rounds"], between["resumed_after"]) == (False, 2, [2])
    for number in (3, 4):
        killed.round(record(number))
    for file in (killed._lines, killed._per_client, killed._tensorboard):
        file.close()
    summary = go(Tracker(folder, META, resume_after=3), [4, 5])
    assert 104.0 <= summary.seconds < 110.0
    assert summary.peak_rss_mb == 1e6
    assert summary.resumed_after == (2, 3)
    assert json.loads(path.read_text())["seconds"] == round(summary.seconds, 3)


def drop_line(name: str, number: int) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:number] + lines[number + 1 :]))

    return apply


def change(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / ROWS).write_text((folder / ROWS).read_text().replace(old, new, 1))


def rearrange(order: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        head, *rows = (folder / ROWS).read_text().splitlines()
        (folder / ROWS).write_text("\n".join([head, *order(rows)]) + "\n")

    return apply


HEADER = "round,client,split,model,phase,correct,total,loss,up_bytes,down_bytes,fault"
ROWS, LINES = "per_client.csv", "metrics.jsonl"
WRONGS: dict[str, tuple[Callable[[Path], object], int]] = {
    "no rows": (lambda f: (f / ROWS).write_text("round,client\n"), 0),
    "line missing": (drop_line(LINES, 2), 1),
    "first missing": (lambda f: [drop_line(LINES, 0)(f) for _ in "01"], 0),
    "a row lost": (drop_line(ROWS, 40), 1),
    "other bytes": (change(",0.0,100,0,", ",0.0,101,0,"), 0),
    "bad row": (change("\n2,0,", "\n2,x,"), 1),
    "a row twice": (rearrange(lambda rows: rows[:-1] + rows[-2:-1]), 4),
    "reversed": (rearrange(lambda rows: rows[::-1]), 0),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_records_are_read_up_to_what_is_wrong(tmp_path: Path, wrong: str) -> None:
    act, last = WRONGS[wrong]
    folder = start(tmp_path / "run")
    act(folder)
    history = complete_rounds(folder)
    assert (history[-1].round if history else 0) == last


def test_a_run_that_was_ended_while_it_was_resumed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename or removal in turn: it can still be resumed."""
    for fails_at in itertools.count(1):
        folder, ended = start(tmp_path / str(fails_at), newcomers=True), True
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            FailingCalls(patch, fails_at, KeyboardInterrupt(), True, (os, "replace"), (Path, "unlink"))
            with closing(Tracker(folder, META, resume_after=2)):
                ended = False
        go(Tracker(folder, META, resume_after=2), [3, 4, 5], newcomers=True)
        assert files(folder) == files(whole)
        assert curves(folder) == curves(whole)
        if not ended:
            break
    assert fails_at > 4


def test_faults_are_counted_by_kind_and_listed_by_client(whole: Path) -> None:
    lines = [json.loads(text) for text in (whole / LINES).read_text().splitlines()]
    both = {"dropout": 1, "straggler": 1}
    assert [line["faults"] for line in lines] == [{}, {"dropout": 1, "error": 1}, {}, both, {}, {}]
    assert list(lines[3]["faults"]) == list(both)
    with (whole / ROWS).open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["client"]: row["fault"] for row in table if row["round"] == "1"} == {
        "0": "", "1": "", "2": "", "3": "error", "4": "", "5": "dropout",
    }  # fmt: skip
    assert not any(row["fault"] for row in table if row["round"] in "0245")


def test_a_client_that_only_had_a_fault_has_a_line(tmp_path: Path) -> None:
    tmp_path.joinpath("run").mkdir()
    with closing(Tracker(tmp_path / "run", META)) as tracker:
        tracker.round(RoundRecord(1, (1, 2), (), {2: 7}, (), {}, {2: "nonfinite", 1: "dropout"}))
    text = (tmp_path / "run" / ROWS).read_text()
    assert text == HEADER + "\n1,1,,,,0,0,0.0,0,0,dropout\n1,2,,,,0,0,0.0,0,7,nonfinite\n"
    assert complete_rounds(tmp_path / "run")[-1].round == 1
