"""Writing a checkpoint where the disk fails, or the process dies, at any point of it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from run_files import write_checkpoint

from pflsim.records.checkpoint_read import newest_checkpoint

COMPONENTS = ["client_000.pt", "client_001.pt", "meta.json", "server.pt"]


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


class Disk:
    """Fails at the n-th thing that is asked of it. `dies`: nothing can be done after that either, not even clean up."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int, error: Callable[[], BaseException], dies: bool):
        self.count, self.fails_at, self.error, self.dies = 0, fails_at, error, dies
        opened = Path.open

        def open_it(path: Path, *args: Any, **kwargs: Any) -> IO[Any]:
            self.asked()
            return self.watched(opened(path, *args, buffering=0, **kwargs)) if "xb" in args else opened(path, *args)

        patch.setattr(Path, "open", open_it)
        for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree"), (Path, "unlink")):
            patch.setattr(owner, name, self.failing(getattr(owner, name)))

    def asked(self) -> None:
        self.count += 1
        if self.count == self.fails_at or (self.dies and self.count > self.fails_at):
            raise self.error()

    def failing(self, function: Any) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            self.asked()
            return function(*args, **kwargs)

        return instead

    def watched(self, file: IO[Any]) -> Any:
        disk = self

        class Watched:
            def write(self, data: Any) -> int:
                disk.asked()
                return file.write(data)

            def flush(self) -> None:
                file.flush()

            def fileno(self) -> int:
                return file.fileno()

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

        return Watched()


class Killed(BaseException):
    """The process is gone."""


def attempts(tmp_path: Path, error: Callable[[], BaseException], dies: bool) -> list[tuple[int, bool]]:
    """Write a checkpoint where there are two already; fail at the first point, the second, … until nothing fails.

    Returns:
        For each: the newest checkpoint found afterwards, and whether the call returned.
    """
    outcomes: list[tuple[int, bool]] = []
    for fails_at in range(1, 1000):
        folder = tmp_path / f"{fails_at}"
        write(folder, 1, keep=2)
        write(folder, 2, keep=2)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, fails_at, error, dies)
            returned = False
            try:
                write(folder, 3, keep=2)
                returned = True
            except (OSError, Killed):
                pass
        if not returned and not dies:
            assert visible(folder)[:2] == ["round_0001", "round_0002"]
        newest, server = found(folder)
        assert server == {"round": newest}
        assert newest in (2, 3)
        for name in visible(folder):
            assert sorted(os.listdir(folder / name)) == COMPONENTS
        write(folder, 4, keep=1)
        assert os.listdir(folder) == ["round_0004"]  # writing has cleaned up
        outcomes.append((newest, returned))
        if disk.count < fails_at:
            return outcomes
    raise AssertionError("it never ends")


def test_whatever_the_disk_refuses_leaves_the_checkpoints_before_it(tmp_path: Path) -> None:
    """At every open, write, flush to the disk, rename and removal in turn."""
    outcomes = attempts(tmp_path, lambda: OSError(errno.ENOSPC, "full"), dies=False)
    assert len(outcomes) > 12 and outcomes[0] == (2, False) and outcomes[-1] == (3, True)
    assert [newest for newest, returned in outcomes if returned] == [3] * sum(returned for _, returned in outcomes)


def test_a_process_that_dies_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    outcomes = attempts(tmp_path, Killed, dies=True)
    assert len(outcomes) > 12 and outcomes[0] == (2, False) and outcomes[-1] == (3, True)


def test_one_of_the_same_round_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        write_checkpoint(tmp_path, 5, {"value": value}, [], {}, 1)
    checkpoint = newest_checkpoint(tmp_path, pytest.fail)
    assert checkpoint is not None and checkpoint.server() == {"value": 2} and os.listdir(tmp_path) == ["round_0005"]


def test_a_full_disk_says_so_though_torch_writes_the_file(tmp_path: Path) -> None:
    """A real limit: no file may be longer than 64 KiB. Torch's own error would be a RuntimeError without a reason."""
    code = """
import resource, signal, sys, torch
from pathlib import Path
from pflsim.records.checkpoint_read import newest_checkpoint
from pflsim.records.checkpoint_write import stage_checkpoint
folder = Path(sys.argv[1])
stage_checkpoint(folder, 1, {"w": torch.zeros(10)}, [(0, {"w": torch.zeros(10)})], {}).publish(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
large = {"w": torch.zeros(100_000)}
for server, client in ((large, {}), ({}, large)):
    try:
        stage_checkpoint(folder, 2, server, [(0, client)], {})
    except OSError as error:
        print(error.strerror)
print(newest_checkpoint(folder, print).round, [path.name for path in folder.iterdir()])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large"] * 2 + ["1 ['round_0001']"]


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


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    kept(tmp_path, {1: None, 2: None, 3: None}, keep=3)
    (tmp_path / "round_0003" / "meta.json").write_text("{")
    assert kept(tmp_path, {4: None}, keep=2) == ["round_0002", "round_0004"]
