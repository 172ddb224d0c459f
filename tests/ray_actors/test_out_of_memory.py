"""Ray kills an actor because memory runs out, and the result is equal to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from out_of_memory_run import MAX_EATEN, OURS

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TESTS = Path(__file__).resolve().parents[1]


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
