"""What a run ran on: versions, the code's commit, the machine; without names of machines or people."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil

from pflsim.run_folder.files import write_atomically

PACKAGES = (
    *("pflsim", "torch", "torchvision", "lightning", "ray", "numpy", "scipy", "scikit-learn", "torchmetrics"),
    *("tensorboard", "hydra-core", "omegaconf", "safetensors", "jaxtyping", "psutil", "rich", "matplotlib"),
)
JOB = "PFLSIM_JOB"
"""The environment variable with the id of the job that a run is submitted as, on a cluster."""
PACKAGE = Path(__file__).resolve().parents[1]
CODE = "PFLSIM_CODE"
"""The environment variable of a submitted job with the value of `code` on the machine that submitted it, as JSON."""


def versions() -> dict[str, str | None]:
    """Installed versions by package name, from their metadata (nothing is imported); null: not installed.

    Where torch is imported already, its own word counts, because it names the build too (e.g. 2.14.1+cpu).
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if "torch" in sys.modules:
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


def code(package: Path = PACKAGE) -> dict[str, str | bool | None]:
    """Commit of the repository that tracks this package, and whether anything in it differs (new files included).

    Both are null where the package is not under version control, e.g. installed from a wheel.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        try:
            said = json.loads(os.environ[CODE])
            return {"commit": said["commit"], "dirty": said["dirty"]}
        except (ValueError, KeyError, TypeError):
            return {"commit": None, "dirty": None}
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, object]:
    """Operating system, processors, memory in MB of 10⁶ bytes, names of NVIDIA GPUs."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "platform": platform.platform(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
        "gpus": gpu_names(),
    }


def gpu_names(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Names of the machine's NVIDIA GPUs from the driver's files; CUDA is not touched. Empty where there are none."""
    names = []
    for path in sorted(root.glob("*/information")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def environment() -> dict[str, object]:
    """All of it, with the command line that started the run."""
    return {"versions": versions(), "code": code(), "machine": machine(), "command": sys.argv}


def write_environment(folder: Path, name: str = "environment.json") -> None:
    """Write environment.json, or the like of a later session, into a run folder."""
    write_atomically(folder / name, json.dumps(environment(), indent=2, ensure_ascii=False) + "\n")
