"""Writing a checkpoint where the disk fails, or the process dies, at any point of it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from run_files import FailingCalls, write_checkpoint

from pflsim.records.checkpoint_read import newest_checkpoint

COMPONENTS = ["clients_000000.pt", "meta.json", "server.pt"]


def write(folder: Path, number: int, keep: int = 1, score: float | None = None) -> Path:
    clients = [(c, {"w": torch.full((50,), float(number))}) for c in (0, 1)]
    return write_checkpoint(folder, number, {"round": number}, clients, {}, keep, score)


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def found(folder: Path) -> tuple[int, dict[str, int]]:
    """The newest usable checkpoint: which, and the number that was in its server's state; all others are refused."""
    said: list[str] = []
    checkpoint = newest_checkpoint(folder, said.append)
    assert checkpoint is not None and not said
    return checkpoint.round, checkpoint.server()


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("dies", [False, True])
def test_whatever_fails_leaves_a_whole_checkpoint(tmp_path: Path, dies: bool) -> None:
    """At every flush to the disk, rename and removal in turn: the disk is full, or the process dies.

    There are two checkpoints already. `outcomes`: the newest one found afterwards, and whether the call returned.
    """
    outcomes: list[tuple[int, bool]] = []
    for fails_at in itertools.count(1):
        folder = tmp_path / f"{fails_at}"
        write(folder, 1, keep=2)
        write(folder, 2, keep=2)
        with pytest.MonkeyPatch.context() as patch:
            functions = (Path, "mkdir"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")
            calls = FailingCalls(patch, fails_at, Killed() if dies else OSError(errno.ENOSPC, "full"), dies, *functions)
            returned = False
            with suppress(OSError, Killed):
                write(folder, 3, keep=2)
                returned = True
        if not returned and not dies:
            assert visible(folder)[:2] == ["round_0001", "round_0002"]
        newest, server = found(folder)
        assert server == {"round": newest} and newest in (2, 3)
        for name in visible(folder):
            assert sorted(os.listdir(folder / name)) == COMPONENTS
        write(folder, 4, keep=1)
        assert os.listdir(folder) == ["round_0004"]  # writing has cleaned up
        outcomes.append((newest, returned))
        if calls.count < fails_at:
            break
    assert len(outcomes) >= 9 and outcomes[0] == (2, False) and outcomes[-1] == (3, True)
    assert dies or all(newest == 3 for newest, returned in outcomes if returned)


def test_clients_that_cannot_be_read_leave_the_checkpoint_before(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, 2, {}, ((c, {"w": torch.tensor(1 // (1 - c))}) for c in (0, 1)), {}, 1)
    assert os.listdir(tmp_path) == ["round_0001"]


def test_one_of_the_same_round_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        write_checkpoint(tmp_path, 5, {"value": value}, [], {}, 1)
    checkpoint = newest_checkpoint(tmp_path, pytest.fail)
    assert checkpoint is not None and checkpoint.server() == {"value": 2} and os.listdir(tmp_path) == ["round_0005"]


def kept(folder: Path, scores: dict[int, float | None], keep: int) -> list[str]:
    for number, score in scores.items():
        write(folder, number, keep, score)
    return visible(folder)


@pytest.mark.parametrize(
    ("scores", "keep", "expected"),
    [
        ({1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8}, 1, [2, 4]),
        ({1: 0.5, 2: 0.9, 3: 0.9, 4: 0.8}, 1, [2, 4]),  # the earlier of equals
        ({1: 0.5, 2: 0.6, 3: 0.7}, 1, [3]),
        ({1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8}, 2, [2, 3, 4]),
        ({1: None, 2: None, 3: None}, 2, [2, 3]),
        ({1: 0.1, 2: None, 3: None, 4: float("nan")}, 1, [1, 4]),
        ({1: 0.0, 2: None}, 1, [1, 2]),
        ({1: 0.5, 2: 0.4, 3: 0.9, 4: 0.1}, 1, [3, 4]),  # 1 was the best until 3
        ({9999: None, 10000: None}, 0, [10000]),  # the one just written stays
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, scores: dict[int, float | None], keep: int, expected: list[int]
) -> None:
    assert kept(tmp_path, scores, keep) == [f"round_{number:04d}" for number in expected]


def test_checkpoints_of_later_rounds_go_when_a_run_was_resumed_before_them(tmp_path: Path) -> None:
    """They would count as the newest, and the best of them is none of this run's."""
    kept(tmp_path, {5: 0.5, 10: 0.9, 15: 0.8}, keep=3)
    write(tmp_path, 6, keep=1, score=0.4)
    assert visible(tmp_path) == ["round_0005", "round_0006"]
