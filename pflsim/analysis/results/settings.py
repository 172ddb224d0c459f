"""The settings that a run's result follows from, by dotted key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pflsim.analysis.results.run import Run
from pflsim.config.components import COMPONENTS
from pflsim.config.plain import dotted
from pflsim.config.settings import Settings

IGNORED = (
    "seed", "names", "run_dir", "data.root", "data.path", "data.download",
    "executor", "placement", "on_client_error", "checkpoint", "trace", "tracking", "progress",
    "eval.batch_size", "eval.received",
)  # fmt: skip
"""What makes no other experiment: the seed, names and places; where a run is carried out, which can change the last
bits at most; and what is written down besides."""


def run_settings(run: Run) -> dict[str, Any]:
    """A run's settings without those `IGNORED`; equal for runs that differ in their seed alone.

    Under each part's own name (`method`, `data`, `model`, …) is what it was called on the command line. Settings that
    were not there yet when the run was made have their defaults.
    """
    default = {key: value for key, value in asdict(Settings()).items() if key not in COMPONENTS}
    names: Mapping[str, str] = run.config.get("names") or {}
    known = {"method": run.method, "data": run.summary["data"], "model": run.summary["model"]}
    found: dict[str, Any] = {part: names.get(part) or known.get(part) or _target(run, part) for part in COMPONENTS}
    found |= dotted(default) | dotted(run.config)
    if found["local_epochs"] is None and found["local_steps"] is None:
        found["local_epochs"] = 1
    return {key: value for key, value in found.items() if not _ignored(key)}


def written(value: Any) -> str:
    """A value as the command line takes it: `[1,2]`, `null`, `true`."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(written(inner) for inner in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _target(run: Run, part: str) -> str:
    return str(run.config[part].get("_target_", "")).rpartition(".")[2]


def _ignored(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in IGNORED)
