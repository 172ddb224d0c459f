"""A network with one hidden layer and its gradients in NumPy float64, for tests of a method's equations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support import World, exact, softmax

from lightning_modules.hosts.inline import InlineExecutor
from pflsim.engine.execution import EvalRequest
from pflsim.messages import Uplink
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
        module = make.factory.build()
        federation = replace(make.federation, initial=module.shared_tensors(), head=module.net.head)
        yield replace(make, dataset=exact(make.dataset), federation=federation).inline()
    finally:
        torch.set_default_dtype(before)


def values(tensors: Mapping[str, torch.Tensor], net: str = "net") -> Arrays:
    """Copies of a network's values from a state or a message, which may lack some."""
    return [tensors[f"{net}.{n}"].double().numpy().copy() for n in NAMES if f"{net}.{n}" in tensors]


def examples(executor: InlineExecutor, client: int, split: Any = "train") -> tuple[np.ndarray, np.ndarray]:
    """A client's inputs [n, 16] and labels [n]."""
    own = executor.host.shards[client].split(split)
    return own.x.double().numpy().reshape(len(own), -1), own.y.numpy()


def batches(
    executor: InlineExecutor, client: int, t: int, size: int = 4, epochs: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A client's mini-batches in the local epochs of round t: inputs [B, 16] and labels [B]."""
    x, y = examples(executor, client)
    generator = torch_generator(0, "batches", client, t)
    for _ in range(epochs):
        order = torch.randperm(len(y), generator=generator).numpy()
        for start in range(0, len(y), size):
            rows = order[start : start + size]
            yield x[rows], y[rows]


def sgd(executor: InlineExecutor, client: int, t: int, w: Arrays, lr: float) -> Arrays:
    """A client's model after an epoch of SGD on the cross-entropy."""
    for x, y in batches(executor, client, t):
        w = plus(w, -lr, gradient(w, x, y))
    return w


def features(w: Arrays, x: np.ndarray) -> np.ndarray:
    """ReLU features [B, D]."""
    return np.maximum(x @ w[0].T + w[1], 0)


def scores(w: Arrays, x: np.ndarray) -> np.ndarray:
    """Logits [B, C]."""
    return features(w, x) @ w[2].T + w[3]


def losses(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cross-entropy of each example, [B]."""
    return -np.log(softmax(logits)[np.arange(len(y)), y])


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


def head_steps(
    w: np.ndarray,
    b: np.ndarray,
    pairs: Sequence[tuple[np.ndarray, int]],
    orders: Iterable[np.ndarray],
    lr: float,
    size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A linear classifier after SGD on (mean, label) pairs, in mini-batches of each order in turn."""
    z, y = np.stack([mean for mean, _ in pairs]), np.array([label for _, label in pairs])
    for order in orders:
        for start in range(0, len(y), size):
            rows = order[start : start + size]
            error = slope(z[rows] @ w.T + b, y[rows])
            w, b = w - lr * error.T @ z[rows], b - lr * error.sum(0)
    return w, b


def differences(loss: Callable[[], float], array: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a loss by each number of an array."""
    found = np.zeros_like(array)
    for at in np.ndindex(array.shape):
        value, ends = array[at], []
        for h in (step, -step):
            array[at] = value + h
            ends.append(loss())
        array[at] = value
        found[at] = (ends[0] - ends[1]) / (2 * step)
    return found


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


def evaluates(
    executor: InlineExecutor,
    t: int,
    logits: Callable[[int, np.ndarray], np.ndarray],
    kind: str = "personal trained",
    split: Any = "test",
) -> None:
    """A model of each client has the losses of these logits, which are given for a client and inputs."""
    rows = executor.evaluate(EvalRequest(*kind.split(), (0, 1, 2, 3), (split,), t))  # type: ignore[arg-type]
    assert len(rows) == 4
    for row in rows:
        x, y = examples(executor, row.client, split)
        found = logits(row.client, x)
        np.testing.assert_allclose(row.loss, losses(found, y).sum(), rtol=1e-6)
        assert row.correct == (found.argmax(1) == y).sum()


def anchored(state: Mapping[str, Any], name: str) -> Arrays:
    """What an anchor of this name holds in a client's state."""
    return values({k.removeprefix(f"{name}.").replace("/", "."): v for k, v in state.items() if k.startswith(name)})


def uplinks(sent: Mapping[int, Mapping[str, np.ndarray]], sizes: Sequence[int]) -> list[Uplink]:
    """Arrays by client and name, as clients send them."""
    weights = {i: {k: torch.from_numpy(v.copy()) for k, v in own.items()} for i, own in sent.items()}
    return [Uplink(own, client=i, num_examples=sizes[i]) for i, own in weights.items()]
