"""The settings and metrics of a run for TensorBoard's HPARAMS tab."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pflsim.config.components import COMPONENTS, TARGET, settings_of
from pflsim.config.names import written
from pflsim.config.settings import Settings, dotted
from pflsim.errors import SettingsError
from pflsim.records.metrics import Scope
from pflsim.records.tracking.scalars import BEST

SHOWN = (
    *("method", "data", "shift", "partition", "split", "model", "clients", "rounds", "fraction", "seed"),
    *("batch_size", "local_epochs", "local_steps", "lr", "lr_decay", "momentum", "weight_decay"),
    *("precision", "init", "buffers"),
)
"""The settings, and groups of settings, to show; a table of all settings would be too wide."""
ALWAYS = ("lr", "seed")
"""Settings that are shown also if they have their default."""


def hyperparameters(settings: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, float | str]:
    """Return the settings to show: those that vary in the sweep of the run, else those that differ from their default.

    Args:
        settings: by dotted key.
        names: names of the components by group, and under "sweep" the keys that vary.
    """
    varying = names.get("sweep", "").split(",")
    components = {group: name for group, name in names.items() if group not in ("placement", "sweep")}
    if "sweep" in names:
        components = {group: name for group, name in components.items() if group in varying}
        settings = {key: value for key, value in settings.items() if key in varying}
    default = dotted(asdict(Settings())) | _component_defaults(settings)
    always = varying if "sweep" in names else ALWAYS
    shown = {
        key: value
        for key, value in settings.items()
        if _is_shown(key) and value is not None and (key in always or written(value) != written(default.get(key)))
    }
    numbers = {k: v for k, v in shown.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return components | {key: numbers.get(key, written(value)) for key, value in shown.items()}


def _is_shown(key: str) -> bool:
    group = key.partition(".")[0]
    return group in SHOWN and not key.endswith(TARGET) and key not in ("data.root", "data.path", "data.download")


def _component_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for component in COMPONENTS:
        targets = {key: value for key, value in settings.items() if key.startswith(f"{component}.") and TARGET in key}
        with suppress(SettingsError):  # the code of an own component has moved
            found |= {f"{component}.{name}": each.default for name, each in settings_of(targets, component).items()}
    return found


def begin(writer: Any, values: Mapping[str, float | str], reported: Scope) -> None:
    """Write the hyperparameters. Unlike torch's `add_hparams`, this does not create another folder.

    The metrics are curves, whose last values the tab shows. `reported` is the scope that the method reports.
    """
    for summary in _summaries(values, "/".join(("accuracy", *reported)))[:2]:
        writer.file_writer.add_summary(summary)


def end(writer: Any) -> None:
    """Write that the run is complete."""
    writer.file_writer.add_summary(_summaries({})[2])


def _summaries(values: Mapping[str, float | str], *accuracy: str) -> tuple[Any, Any, Any]:
    """Return TensorBoard's summaries of the experiment, and of the start and the end of its session."""
    from torch.utils.tensorboard.summary import hparams

    best = f"{BEST}/mean", f"{BEST}/worst_decile"
    metrics = (*best, *accuracy, "traffic/up_bytes_total", "traffic/down_bytes_total")
    return hparams(dict(values), dict.fromkeys(metrics, 0.0))
