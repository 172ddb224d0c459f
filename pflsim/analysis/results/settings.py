"""The settings that determine a run's result, by dotted key."""

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
"""Settings that two runs of one experiment may differ in: the seed, names and paths, the executor and its placement
(which change at most the last bits of a result), and what is recorded."""


def run_settings(run: Run) -> dict[str, Any]:
    """Return a run's settings without those in `IGNORED`; runs that differ only in their seed have equal settings.

    The key of a component (`method`, `data`, `model`, …) holds the name used on the command line. Settings that the
    version of the run did not have get their defaults.
    """
    names: Mapping[str, str] = run.config.get("names") or {}
    known = {"method": run.method, "data": run.summary["data"], "model": run.summary["model"]}
    chosen = {part: names.get(part) or known.get(part) or _target(run, part) for part in COMPONENTS}
    return settings_by_key(run.config, chosen)


def settings_by_key(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a config by dotted key, without those `IGNORED`.

    Args:
        config: settings as nested mappings; missing ones have their defaults.
        names: the name of each component.
    """
    default = {key: value for key, value in asdict(Settings()).items() if key not in COMPONENTS}
    found: dict[str, Any] = {part: names[part] for part in COMPONENTS} | dotted(default) | dotted(config)
    if found["local_epochs"] is None and found["local_steps"] is None:
        found["local_epochs"] = 1
    return {key: value for key, value in found.items() if not _ignored(key)}


def written(value: Any) -> str:
    """Format a value as the command line expects it: `[1,2]`, `null`, `true`."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(written(inner) for inner in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _target(run: Run, component: str) -> str:
    return str(run.config[component].get("_target_", "")).rpartition(".")[2]


def _ignored(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in IGNORED)
