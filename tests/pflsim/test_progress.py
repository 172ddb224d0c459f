"""Lines about what takes long: when they are due, what they say, and who wants none."""

import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pflsim import progress
from pflsim.progress import counted, doing, watched


def test_a_line_when_nothing_was_said_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first after 1.5 seconds of work, the next after 10; then work begins anew."""
    monkeypatch.setattr(progress, "FIRST", 1.5)
    clock, said = SimpleNamespace(now=100.0, monotonic=lambda: clock.now), list[str]()
    monkeypatch.setattr(progress, "time", clock)
    items = counted("reading", range(3000))
    script: list[tuple[float, Callable[[], Any]]] = [
        (0.0, lambda: doing("")), (9.0, lambda: doing("starting")), (1.0, lambda: doing("importing")),  # 10.0: silent
        (0.6, lambda: next(items)), (9.0, lambda: next(items)), (1.1, lambda: None),  # 10.6 and 20.7: two lines
        (99.0, lambda: doing("")), (0.0, lambda: doing("drawing")), (1.4, lambda: None), (0.2, lambda: None),
    ]  # fmt: skip

    def wait(seconds: float) -> bool:
        said.extend(capsys.readouterr().err.splitlines())
        if not script:
            return True
        passed, act = script.pop(0)
        clock.now += passed
        act()
        return False

    progress._watch(SimpleNamespace(wait=wait))  # type: ignore[arg-type]
    assert said == ["reading: 0 of 3,000", "reading: 1 of 3,000", "drawing"]
    assert [*counted("reading", ["one"])] == ["one"] and progress._doing == "reading"


@pytest.mark.parametrize(("setting", "threads"), [(None, 1), ("none", 0), ("quiet", 0)])
def test_who_asks_for_no_output_gets_none(setting: str | None, threads: int) -> None:
    """The thread that prints ends with the block, also after an error."""
    before = {*threading.enumerate()}
    with pytest.raises(ValueError), watched(setting):
        found = {*threading.enumerate()} - before
        assert len(found) == threads
        raise ValueError
    for thread in found:
        thread.join()


def test_the_first_line_does_not_wait_for_imports() -> None:
    code = "from pflsim import progress as p; p.FIRST = p.STEP = 0.001; from pflsim.__main__ import main; main()"
    command = [sys.executable, "-c", code, "method=fedpox"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.partition(":")[0] for line in said.stderr.splitlines()] == ["starting", "error"]
