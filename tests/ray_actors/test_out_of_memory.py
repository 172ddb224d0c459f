"""Ray kills an actor because memory runs out, and the result is equal to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from out_of_memory_run import MAX_EATEN, OURS
from ray.exceptions import OutOfMemoryError, RayActorError

from ray_actors.executor import how_it_died

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TESTS = Path(__file__).resolve().parents[1]
SAID = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: d8637915) "
    "was 4.34GB used / 23.54GB limit (0.184484)\nOOM kill reason: Memory usage 4623798272B exceeded threshold of "
    "3109010944B (12.3% of 25276510208B limit)\nObject store memory usage: [- objects spillable: 0\n]"
)
"""By Ray 2.60, with its list of processes and its advice behind it."""


def test_an_actor_that_eats_all_memory_changes_nothing(tmp_path: Path) -> None:
    """For real: the threshold of Ray's monitor is a little above what is in use."""
    if psutil.virtual_memory().available < MAX_EATEN + OURS + 2**30:
        pytest.skip(f"needs {(MAX_EATEN + OURS) / 2**30 + 1:.0f} GiB of free memory")
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(TESTS / "out_of_memory_run.py"), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True,
        timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if "disturbed" in found:
        changed = found["disturbed"] / 2**30
        pytest.skip(f"other processes changed their use of memory by {changed:+.1f} GiB, which decides what is killed")
    assert found["equal"] and found["restarts"] == len(found["lines"]) >= 1


def test_how_ray_says_it() -> None:
    as_task = OutOfMemoryError(SAID)
    as_actor = RayActorError(error_msg=f"The actor died unexpectedly before finishing this task. {SAID}")
    for error in (as_task, as_actor):
        assert how_it_died(error) == "Ray killed it because the node was out of memory"


def test_a_kill_is_not_taken_for_it() -> None:
    """Although Ray's advice names memory among the causes."""
    error = RayActorError(
        error_msg="The actor died. Worker exit detail: Worker unexpectedly exits with a connection error code 2. End "
        "of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
    )
    assert "kill -9" in how_it_died(error)
