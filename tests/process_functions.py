"""Functions for processes of their own, in a module that imports little."""

import os
import signal
import time
from pathlib import Path


def say(text: str) -> str:
    print(text)
    return text.upper()


def fail(error: BaseException) -> None:
    print("before")
    raise error


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count(folder: Path, number: int) -> int:
    (folder / str(number)).touch()
    time.sleep(0.3)
    found = len(list(folder.iterdir()))
    (folder / str(number)).unlink()
    return found


def wait_for_signal(marks: Path, name: str) -> str:
    """Counts the signals: a second one would end the process at once."""
    found: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, frame: found.append(signum))
    (marks / name).touch()
    while not found:
        time.sleep(0.01)
    time.sleep(0.3)
    return f"{name}: {len(found)}"
