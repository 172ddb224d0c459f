"""How pflsim is installed and how it was started."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath

PACKAGES = ("pflsim", "lightning_modules", "ray_actors")
FOLDER = Path(__file__).resolve().parents[2]
"""The folder that contains the packages: a clone, or site-packages."""


def program() -> str:
    """Return how the user starts pflsim, for commands in messages: `pflsim` or `python launch.py`, for example."""
    return started_as(sys.argv[0]) or "pflsim"


def started_as(script: str) -> str | None:
    """Return the command that runs a script; None if it is not a script of pflsim.

    Args:
        script: its path, as in `sys.argv[0]`.
    """
    match PurePath(script).parts:
        case (*_, "launch.py"):
            return "python launch.py"
        case (*_, "pflsim", "__main__.py"):
            return "python -m pflsim"
        case (*_, "pflsim"):
            return "pflsim"
    return None
