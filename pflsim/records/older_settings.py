"""Settings that are newer than a saved run: the values that they had before they existed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pflsim.config.components import TARGET

BEFORE: dict[str, dict[str, Any]] = {
    **{f"pflsim.data.splits.{name}": {"stratify": True} for name in ("merged", "counts")},
    "pflsim.data.sources.table.load": dict.fromkeys(("group", "exclude", "missing")),
    "pflsim.data.sources.text.load": dict.fromkeys(("group", "missing")),
    "pflsim.data.sources.image_folder.load": {"background": "white"},
}
"""The values that settings of components had, by target, before the settings existed."""
HELD = "holdout_clients"
"""If clients are held out, `eval.fit` was all."""


def with_older(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved settings of a component or section, or of a run by dotted key, with those that are newer."""
    targets = {key.removesuffix(TARGET): BEFORE.get(str(value), {}) for key, value in values.items() if TARGET in key}
    older = {f"{prefix}{name}": value for prefix, more in targets.items() for name, value in more.items()}
    held = [key for key, value in values.items() if key.split(".")[-1] == HELD and value]
    older |= {f"{key.removesuffix(HELD)}fit": "all" for key in held}
    return {**values, **{key: value for key, value in older.items() if key not in values}}


def saved_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.yaml, with settings that are newer than it."""
    import yaml

    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: with_older(node) if isinstance(node, Mapping) else node for key, node in dict(config).items()}
