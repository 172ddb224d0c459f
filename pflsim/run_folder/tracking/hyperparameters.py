"""A run in TensorBoard's table of runs (HPARAMS): its settings and what it came to, within its own event file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pflsim.run_folder.summary import Summary

ACCURACY, WORST, BYTES, SECONDS = "final/accuracy", "final/worst_decile", "final/traffic_bytes", "seconds/run"
"""Test accuracy of the judged model in the round that is best by validation, or else the last one: its mean and worst
decile over clients; bytes both ways of all clients; wall seconds."""

SHOWN = (
    *("method", "data", "partition", "split", "model", "clients", "rounds", "fraction", "seed"),
    *("batch_size", "local_epochs", "local_steps", "lr", "lr_decay", "momentum", "weight_decay", "init", "buffers"),
)
"""Settings, and groups of them, that tell runs apart; with all there are the table could not be read."""


def hyperparameters(settings: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, bool | float | str]:
    """What a table of runs shows of the settings.

    Args:
        settings: by dotted key.
        names: what the parts are called, by group.
    """
    parts = {group: name for group, name in names.items() if group != "placement"}
    values = {key: value for key, value in settings.items() if _tells(key) and value is not None}
    return parts | {
        key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values.items()
    }


def _tells(key: str) -> bool:
    group = key.partition(".")[0]
    return group in SHOWN and not key.endswith("_target_") and key not in ("data.root", "data.path", "data.download")


def begin(writer: Any, values: Mapping[str, bool | float | str]) -> None:
    """Write the settings; torch's `add_hparams` would make a run folder of its own for them."""
    for part in _summaries(values)[:2]:
        writer.file_writer.add_summary(part)


def end(writer: Any, summary: Summary) -> None:
    """Write what the run came to."""
    figures = summary.accuracy[summary.meta.reported_model]
    figure = figures.best_val or figures.last
    if figure is not None:
        writer.add_scalar(ACCURACY, figure.stats.mean, summary.rounds)
        writer.add_scalar(WORST, figure.stats.worst_decile, summary.rounds)
    writer.add_scalar(BYTES, summary.traffic.up_bytes + summary.traffic.down_bytes, summary.rounds)
    writer.add_scalar(SECONDS, summary.seconds, summary.rounds)
    if summary.complete:
        writer.file_writer.add_summary(_summaries({})[2])


def _summaries(values: Mapping[str, bool | float | str]) -> tuple[Any, Any, Any]:
    """The experiment, the beginning and the end of its session."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(dict(values), dict.fromkeys((ACCURACY, WORST, BYTES, SECONDS), 0.0))
