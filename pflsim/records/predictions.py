"""predictions.npz: scores of every test row in the last evaluated round, and in the best one by validation."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from pflsim.errors import reading
from pflsim.records.files import FORM, write_atomically
from pflsim.types import EvalRow, TaskName

if TYPE_CHECKING:
    from pandas import DataFrame

PREDICTIONS = "predictions.npz"
Columns = Mapping[str, np.ndarray]
"""Columns [n], or several with one name [n, k]."""
Predictions = Mapping[Literal["last", "best"], Columns]


def probabilities(task: TaskName, scores: Tensor) -> Tensor:
    """Return the probabilities of classes or labels, or values as they are, in float64."""
    scores = scores.double()
    if task == "classification":
        return scores.softmax(1)
    return scores.sigmoid() if task == "multilabel" else scores


def updated(
    before: Predictions,
    round_number: int,
    evaluations: Sequence[EvalRow],
    numbers: Sequence[np.ndarray],
    task: TaskName,
    best: bool,
) -> Predictions:
    """Return the predictions after a round.

    Args:
        before: those before it.
        round_number: the round.
        evaluations: its evaluations, with outcomes.
        numbers: see `pflsim.data.record.recorded_rows`.
        task: of the run.
        best: whether the round is the best one by validation so far.
    """
    rows = [row for row in evaluations if row.split == "test" and row.outcomes]
    if not rows or not numbers:
        return before
    scores, targets = map(torch.cat, zip(*(row.outcomes for row in rows if row.outcomes), strict=True))
    sizes = [row.total for row in rows]
    found = {
        "round": np.full(len(targets), round_number),
        **{key: np.repeat([getattr(row, key) for row in rows], sizes) for key in ("model", "phase", "client")},
        "row": np.concatenate([numbers[row.client] for row in rows]),
        "target": targets.squeeze(1).numpy() if targets.shape[1:] == (1,) else targets.numpy(),
        "value" if task == "regression" else "score": probabilities(task, scores).float().numpy(),
    }
    return {**before, "last": found, **({"best": found} if best else {})}


def to_bytes(predictions: Predictions) -> bytes:
    """Return the content of the file; nothing if there are no predictions."""
    file = io.BytesIO()
    arrays = {f"{when}/{name}": column for when, own in predictions.items() for name, column in own.items()}
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue() if arrays else b""


def from_bytes(content: bytes) -> Predictions:
    """Return the predictions of a file."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, column in np.load(io.BytesIO(content)).items() if content else ():
        when, name = key.split("/")
        found.setdefault(when, {})[name] = column
    return found  # type: ignore[return-value]


def write_predictions(folder: Path, content: bytes) -> None:
    """Write the file to a run folder, or remove it if it has no content."""
    if content:
        write_atomically(folder / PREDICTIONS, content)
    else:
        (folder / PREDICTIONS).unlink(missing_ok=True)


def read_predictions(folder: Path) -> DataFrame | None:
    """Return a row for every test row and model that was scored in a run; None if nothing was recorded.

    Returns:
        Columns: `when` (last, or best by validation), round, model, phase, client, `row` (its number in the user's
        files, from 0), target, and `score_0`, … (the probability of each class or label) or `value_0`, … (in the unit
        of the target). Several targets are `target_0`, ….

    Raises:
        SettingsError: the file cannot be read.
    """
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    from pandas import DataFrame, concat

    parts = list[DataFrame]()
    with reading(path, FORM):
        for when, own in from_bytes(path.read_bytes()).items():
            columns: dict[str, object] = {"when": when}
            for name, values in own.items():
                columns |= {name: values} if values.ndim == 1 else {f"{name}_{k}": v for k, v in enumerate(values.T)}
            parts.append(DataFrame(columns))
    return concat(parts, ignore_index=True)
