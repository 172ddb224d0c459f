"""launch.py in a process of its own, and what is left of one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from documents import ROOT

LAUNCH = ROOT / "launch.py"


def launched(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start launch.py in a folder."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-u", str(LAUNCH), *arguments], cwd=folder, text=True, **streams)


def lines_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Read the output up to a line that begins so."""
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(start):
            return said
    raise AssertionError(f"no line {start}: {''.join(said)} {process.communicate()[1]}")


def is_gone(process: subprocess.Popen[str], family: Sequence[psutil.Process]) -> bool:
    """Whether all processes of a run have ended, or do so soon, and nothing of its Ray is left."""
    return not psutil.wait_procs(family, timeout=60)[1] and not [*Path("/tmp").glob(f"pflsim-ray-{process.pid}-*")]
