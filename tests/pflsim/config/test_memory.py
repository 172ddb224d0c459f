import subprocess
import sys
from pathlib import Path

import pytest

import pflsim
from pflsim.config import memory

LAUNCH = Path(pflsim.__file__).parents[1] / "launch.py"


@pytest.mark.parametrize("limit", [memory.ADDRESS_SPACE, -1])
def test_address_space_that_is_enough(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (limit, -1))
    memory.check_address_space()


def test_a_process_with_few_addresses_ends_with_one_line(tmp_path: Path) -> None:
    """As after `ulimit -v`; torch and Ray abort, hang or raise ImportError."""
    command = f"ulimit -v 3000000; exec {sys.executable} {LAUNCH} data=digits"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "2.86 GiB" in done.stderr and "ulimit -v unlimited" in done.stderr
    assert not list(tmp_path.iterdir())
