"""A network with one hidden layer and its gradients in NumPy float64, for tests of a method's equations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from support import World, softmax

from lightning_modules.hosts.inline import InlineExecutor
from pflsim.seeding import torch_generator

SIZES = (12, 7, 20, 9)
"""Training examples of the clients of `support.world`."""
NAMES = ("body.fc1.weight", "body.fc1.bias", "head.weight", "head.bias")
Arrays = list[np.ndarray]
"""Values of the parameters in the order of `NAMES`."""


@contextmanager
def started(make: World) -> Iterator[InlineExecutor]:
    """Run clients in float64 inside the block, so that only the order of additions differs from NumPy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        data = make.dataset
        module = make.factory.build()
        yield replace(
            make,
            dataset=replace(data, x=data.x.astype(np.float64) / data.scale),
            federation=replace(make.federation, initial=module.shared_tensors()),
        ).inline()
    finally:
        torch.set_default_dtype(before)


def values(tensors: Mapping[str, torch.Tensor], net: str = "net") -> Arrays:
    """Copies of a network's values from a state or a message."""
    return [tensors[f"{net}.{name}"].double().numpy().copy() for name in NAMES]


def batches(executor: InlineExecutor, client: int, t: int, size: int = 4) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A client's mini-batches in one local epoch of round t: inputs [B, 16] and labels [B]."""
    own = executor.host.shards[client].train
    order = torch.randperm(len(own), generator=torch_generator(0, "batches", client, t)).numpy()
    x, y = own.x.double().numpy().reshape(len(own), -1), own.y.numpy()
    for start in range(0, len(own), size):
        rows = order[start : start + size]
        yield x[rows], y[rows]


def features(w: Arrays, x: np.ndarray) -> np.ndarray:
    """ReLU features [B, D]."""
    return np.maximum(x @ w[0].T + w[1], 0)


def scores(w: Arrays, x: np.ndarray) -> np.ndarray:
    """Logits [B, C]."""
    return features(w, x) @ w[2].T + w[3]


def slope(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of the mean cross-entropy by the logits, [B, C]."""
    p = softmax(logits)
    p[np.arange(len(y)), y] -= 1
    return p / len(y)


def backward(w: Arrays, x: np.ndarray, by_scores: np.ndarray, by_features: np.ndarray | float = 0.0) -> Arrays:
    """Gradient by the parameters, from those by the logits [B, C] and, besides, by the features [B, D]."""
    z = features(w, x)
    back = (by_scores @ w[2] + by_features) * (z > 0)
    return [back.T @ x, back.sum(0), by_scores.T @ z, by_scores.sum(0)]


def gradient(w: Arrays, x: np.ndarray, y: np.ndarray, offset: np.ndarray | float = 0.0) -> Arrays:
    """Gradient of the mean cross-entropy of the logits plus an offset."""
    return backward(w, x, slope(scores(w, x) + offset, y))


def plus(w: Arrays, step: float, direction: Arrays) -> Arrays:
    """w + step·direction."""
    return [a + step * b for a, b in zip(w, direction, strict=True)]


def mean(models: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Mean of models, weighted."""
    shares = np.array(weights, float) / np.sum(weights)
    return [np.einsum("k,k...->...", shares, np.stack(column)) for column in zip(*models, strict=True)]


def close(found: Arrays, expected: Arrays, tolerance: float = 1e-10) -> None:
    """Equal up to rounding."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
