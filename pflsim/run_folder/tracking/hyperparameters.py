"""The hyperparameters and final metrics of a run for TensorBoard's HPARAMS tab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pflsim.run_folder.summary import Summary

ACCURACY, WORST, BYTES, SECONDS = "final/accuracy", "final/worst_decile", "final/traffic_bytes", "seconds/run"
"""The metrics: mean and worst decile of the reported model's test accuracy in the round with the best validation
accuracy (without validation: the last round), the traffic in both directions, and wall seconds."""

SHOWN = (
    *("method", "data", "partition", "split", "model", "clients", "rounds", "fraction", "seed"),
    *("batch_size", "local_epochs", "local_steps", "lr", "lr_decay", "momentum", "weight_decay", "init", "buffers"),
)
"""The settings, and groups of settings, to show; a table of all settings would be too wide."""


def hyperparameters(settings: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, bool | float | str]:
    """Return the settings to show: those that vary in the sweep of the run, if it is part of one.

    Args:
        settings: by dotted key.
        names: names of the components by group, and under "sweep" the keys that vary.
    """
    varying = names.get("sweep", "").split(",")
    components = {group: name for group, name in names.items() if group not in ("placement", "sweep")}
    if "sweep" in names:
        components = {group: name for group, name in components.items() if group in varying}
        settings = {key: value for key, value in settings.items() if key in varying}
    shown = {key: value for key, value in settings.items() if _is_shown(key) and value is not None}
    return components | {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in shown.items()}


def _is_shown(key: str) -> bool:
    group = key.partition(".")[0]
    return group in SHOWN and not key.endswith("_target_") and key not in ("data.root", "data.path", "data.download")


def begin(writer: Any, values: Mapping[str, bool | float | str]) -> None:
    """Write the hyperparameters. Unlike torch's `add_hparams`, this does not create another folder."""
    for summary in _summaries(values)[:2]:
        writer.file_writer.add_summary(summary)


def end(writer: Any, summary: Summary) -> None:
    """Write the final metrics."""
    figures = summary.figures(summary.meta.reported_model)
    figure = figures["best_val"] or figures["last"]
    if figure is not None:
        writer.add_scalar(ACCURACY, figure.stats.mean, summary.rounds)
        writer.add_scalar(WORST, figure.stats.worst_decile, summary.rounds)
    writer.add_scalar(BYTES, summary.traffic.up_bytes + summary.traffic.down_bytes, summary.rounds)
    writer.add_scalar(SECONDS, summary.seconds, summary.rounds)
    if summary.complete:
        writer.file_writer.add_summary(_summaries({})[2])


def _summaries(values: Mapping[str, bool | float | str]) -> tuple[Any, Any, Any]:
    """Return TensorBoard's summaries of the experiment, and of the start and the end of its session."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(dict(values), dict.fromkeys((ACCURACY, WORST, BYTES, SECONDS), 0.0))
