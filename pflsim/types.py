"""Types that all packages share.

One legend for shapes: N clients, K clients in a round, C classes, D feature width, B batch, L fusion units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Tensors by name; names are state_dict keys of the client's module."""

Split = str
"""train, val or test, or a test set of `eval.sets`."""
SPLITS: tuple[Split, ...] = ("train", "val", "test")
ModelKind = Literal["personal", "global"]
"""Whose model is evaluated: the client's own, or the server's."""
EvalPhase = Literal["received", "trained"]
"""When a model is evaluated: as the server sends it, or after the client's local training."""
TaskName = Literal["classification", "multilabel", "regression", "language_model"]
"""What is predicted: one class, any number of labels, numbers, or the next token at each position."""
Buffers = Literal["aggregate", "local", "recalibrate"]
Precision = Literal["ieee", "tf32", "bf16"]
Fault = Literal["dropout", "straggler", "error", "nonfinite"]
"""A client's fault in a round: absent or slow as `faults` simulates it, left out after an error, or values that are not
finite."""


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """What the server knows about a client: its id and its number of training examples."""

    id: int
    num_examples: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A fusion unit ("layer"): the state_dict keys that are fused with the same weights.

    Distances between clients use `parameters`. `buffers` (floating point only, e.g. running mean and variance) are
    mixed with the same weights.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Return all keys of the unit, parameters first."""
        return self.parameters + self.buffers


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The report of one client's local training in one round."""

    client: int
    num_examples: int
    steps: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean over the steps of every named loss term."""
    up_bytes: int = 0
    seconds: float = 0.0
    gpu_bytes: int = 0
    """Peak GPU memory of its process so far, in bytes; 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class EvalRow:
    """The evaluation of one model on one client's split, as counts.

    `correct` is None unless classes are predicted; `loss` is summed, of cross-entropy in nats.
    """

    client: int
    split: Split
    model: ModelKind
    phase: EvalPhase
    correct: int | None
    total: int
    loss: float
    confusion: tuple[tuple[int, int, int], ...] = ()
    """Nonzero entries (class, predicted class, count) of the confusion matrix, ascending; empty if not requested. The
    predicted class is −1 for predictions that are not finite."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by name, as `eval.metrics` lists them; without those that are undefined for the client."""
    outcomes: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    """Scores and targets, if the evaluation pools them over the clients."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The label of a matrix's rows or columns, e.g. "receiver", and their names; without names they are numbered."""

    label: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix for display, such as mixing weights between clients.

    Args:
        name: e.g. "alpha/conv1"; matrices with the same text before the first slash share a figure.
        title: the title of the figure.
        rows, columns: the axes.
        values: [rows, columns] float32; NaN marks missing entries.
        bounds: the ends of the colour scale; None: the minimum and maximum of the values.
    """

    name: str
    title: str
    rows: Axis
    columns: Axis
    values: np.ndarray
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class NewcomerRecord:
    """Results of the clients that joined after the last round.

    Args:
        round: the last round.
        down_bytes: the size of each newcomer's downlink.
        received: evaluations of their personal models as received.
        trained: evaluations after their fine-tuning.
        few: of the model as received on all of their rows, and after few training rows; their phases are received_all,
            trained_N and recalibrated_N.
    """

    round: int
    down_bytes: Mapping[int, int]
    received: tuple[EvalRow, ...]
    trained: tuple[EvalRow, ...]
    few: tuple[EvalRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent by clients (up) and to clients (down)."""

    up_bytes: int = 0
    down_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.up_bytes + other.up_bytes, self.down_bytes + other.down_bytes)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The results of one round. `round` counts from 1; 0 is the initial round."""

    round: int
    cohort: tuple[int, ...]
    reports: tuple[TrainReport, ...]
    down_bytes: Mapping[int, int]
    evaluations: tuple[EvalRow, ...]
    seconds: Mapping[str, float]
    """Wall seconds by phase of the round: downlink, train, fuse, evaluate, ..."""
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """Faults by client."""
    drift: Mapping[int, float] = field(default_factory=dict)
    """‖w_i − w̄‖ by client that sent weights, where w̄ is their mean."""
    diagnostics: tuple[Matrix, ...] = ()
    """Matrices, in the rounds that compute them."""
    pooled: Mapping[tuple[str, str, str], Mapping[str, float]] = field(default_factory=dict)
    """Metrics over the examples of all clients together, by model, split and phase."""
    surveyed: Mapping[int, Traffic] = field(default_factory=dict)
    """Bytes of a survey before the round, by client."""
    virtual_seconds: float | None = None
    """Seconds of the round by the virtual clock; None: there is none."""
