"""The live display of a sweep."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from pflsim.terminal.status import Status, read_status, watching, write_status
from pflsim.terminal.sweep_table import SweepTable

NAMES = [f"{method} seed={seed}" for method in ("local", "fedavg", "pfedcfr lr=0.01") for seed in range(4)]


def status(rounds: int = 37) -> Status:
    values = [1 - math.exp(-n / 9) for n in range(rounds)]
    return Status(100, "accuracy", rounds, values, 0.61, 0.93, 36, True, 2.4, 123_000_000, 223_000_000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(width: int = 80, height: int = 40) -> Console:
    return Console(file=Terminal(), width=width, height=height, force_terminal=True, color_system=None)


def lines(table: SweepTable, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table.rows())
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "headers"), [(60, "now best worst left"), (80, "round worst left"), (200, "bytes")])
def test_rows_fit_the_terminal(width: int, headers: str) -> None:
    table = SweepTable(NAMES, True, screen(width))
    with table:
        for number, state in enumerate(["done", "failed", "running"]):
            with table.running(number):
                watch = watching.get()
                assert watch
                watch(status())
            if state != "running":
                table.ended(number, failed=state == "failed")
        found = lines(table, width)
    assert max(map(len, found)) <= width and len(found) == len(NAMES) + (3 if width == 60 else 2)
    assert all(header in found[0] for header in headers.split())
    for name, line in zip(NAMES, found[1:], strict=False):
        assert line.startswith(name[:10])
    assert "done" in found[1] and "failed" in found[2] and "2m31s" in found[3] and "waiting" in found[4]
    assert "37/100" in found[3] and "0.930" in found[3] and "0.610" in found[3]
    assert ("▁" in found[3]) == (width >= 80) and found[len(NAMES) + 1].startswith("2 of 12 runs done")
    assert "best: by validation" in found[len(NAMES) + 1]


def test_runs_in_other_processes_write_their_status(tmp_path: Path) -> None:
    with SweepTable(NAMES, True, screen()) as table:
        path = table.path(1)
        assert path and read_status(path) is None
        write_status(path, status(3))
        assert read_status(path) == status(3)
        assert "3/100" in lines(table, 80)[2] and "waiting" in lines(table, 80)[1]
        write_status(path, status(1000))
        found = read_status(path)
        assert (
            found and found.round == 1000 and len(found.values) <= 200 and found.values[-1] == status(1000).values[-1]
        )
    assert not path.exists()
    write_status(path, status(4))  # a run that ends after the display
