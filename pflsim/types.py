"""Names that every part shares.

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

Split = Literal["train", "val", "test"]
Buffers = Literal["aggregate", "local", "recalibrate"]
Fault = Literal["dropout", "straggler", "error", "nonfinite"]
"""What may befall a client in a round: absent or slow, as `faults` simulates it; left out, since it raised an error or
its actor died; values that are not finite."""


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """What the server may know of a client: its id and how many training examples it holds."""

    id: int
    num_examples: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A fusion unit ("layer"): the state_dict keys that are fused with the same weights.

    `parameters` decide distances; `buffers` (floating point only, e.g. running mean and variance) ride along.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the unit, parameters first."""
        return self.parameters + self.buffers


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a host says about one client's local training in one round."""

    client: int
    num_examples: int
    steps: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean over the steps of every named loss term."""
    up_bytes: int = 0
    seconds: float = 0.0
    gpu_bytes: int = 0
    """The most that its process has had allocated on a GPU so far; 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class EvalRow:
    """How one model did on one client's split: counts, from which rates are derived.

    `model` is "personal" (the client's own) or "global" (the server's); `phase` is "received" (as the server sent or
    would send it) or "trained" (after the client's local training). `loss` is the summed cross-entropy in nats.
    """

    client: int
    split: Split
    model: Literal["personal", "global"]
    phase: Literal["received", "trained"]
    correct: int
    total: int
    loss: float
    confusion: tuple[tuple[int, int, int], ...] = ()
    """Where it was asked for: (class, predicted class, how many), where there are any, ascending; −1: no class, for a
    prediction that is not finite."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What the rows or columns of a matrix are, e.g. "receiver", and their names; without names they are numbered."""

    label: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One matrix to look at.

    Args:
        name: what it is called, e.g. "alpha/conv1"; what is before the first slash is drawn together.
        title: what it shows, in words.
        rows, columns: what they are.
        values: [rows, columns] float32; NaN where there is nothing.
        bounds: the values of the scale's ends; None: the least and the greatest there is.
    """

    name: str
    title: str
    rows: Axis
    columns: Axis
    values: np.ndarray
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class NewcomerRecord:
    """What the clients that were kept out of training came to when they joined after it.

    Args:
        round: the last round, after which they joined.
        down_bytes: the size of what the server sent each of them.
        received: how their personal models did as sent.
        trained: how they did after the newcomers' own fine-tuning.
    """

    round: int
    down_bytes: Mapping[int, int]
    received: tuple[EvalRow, ...]
    trained: tuple[EvalRow, ...]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Everything that one round leaves for the tracker. `round` counts from 1."""

    round: int
    cohort: tuple[int, ...]
    reports: tuple[TrainReport, ...]
    down_bytes: Mapping[int, int]
    evaluations: tuple[EvalRow, ...]
    seconds: Mapping[str, float]
    """Wall seconds by part of the round: downlink, train, fuse, evaluate, ..."""
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """What befell which client of the cohort; most have nothing here."""
    drift: Mapping[int, float] = field(default_factory=dict)
    """‖w_i − w̄‖ of the clients that sent weights, w̄ their mean."""
    diagnostics: tuple[Matrix, ...] = ()
    """Matrices to look at, in the rounds that have any."""
