"""Server optimisers by NumPy, five steps of every rule."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.fusion import ServerOptimizer
from pflsim.fusion.server_optimizers import server_step

CHANGES = np.random.default_rng(0).normal(0, 0.1, (5, 3, 2))
CHANGES[1:3, 0] = 0


def steps(**settings: Any) -> tuple[np.ndarray, dict[str, Tensor]]:
    """The steps for the changes, and the moments at the end."""
    moments, found = dict[str, Tensor](), []
    for number, change in enumerate(CHANGES, 1):
        step, moments = server_step(ServerOptimizer(**settings), torch.from_numpy(change), moments, number)
        found.append(step.numpy())
    return np.stack(found), moments


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("lr", "beta"), [(None, None), (0.3, 0.7)])
def test_fedavgm(lr: float | None, beta: float | None, nesterov: bool) -> None:
    """Nesterov's form is that of torch's SGD on −Δ."""
    u, eta, b = np.zeros((3, 2)), lr or 1.0, 0.9 if beta is None else beta
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([x], lr=eta, momentum=b, nesterov=nesterov)
    found, moments = steps(name="fedavgm", lr=lr, beta1=beta, nesterov=nesterov)
    for change, step in zip(CHANGES, found, strict=True):
        u = b * u + change
        np.testing.assert_allclose(step, eta * (change + b * u if nesterov else u), rtol=1e-12)
        before, x.grad = x.detach().clone(), torch.from_numpy(-change)
        sgd.step()
        np.testing.assert_allclose(step, (x.detach() - before).numpy(), rtol=1e-12)
    np.testing.assert_allclose(moments["u"], u, rtol=1e-12)


@pytest.mark.parametrize("v0", [0.0, 1e-6])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("given", [{}, {"lr": 0.2, "beta1": 0.5, "beta2": 0.8, "tau": 0.01}])
@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_fedopt(name: str, given: dict[str, float], corrected: bool, v0: float) -> None:
    first = {"lr": 0.01, "beta1": 0.0 if name == "fedadagrad" else 0.9, "beta2": 0.99, "tau": 0.001, **given}
    lr, b1, b2, tau = (first[key] for key in ("lr", "beta1", "beta2", "tau"))
    m, v = np.zeros((3, 2)), np.full((3, 2), v0)
    found, moments = steps(name=name, v0=v0, bias_correction=corrected, **given)
    for t, (change, step) in enumerate(zip(CHANGES, found, strict=True), 1):
        m, square = b1 * m + (1 - b1) * change, change * change
        if name == "fedadagrad":
            v = v + square
        elif name == "fedadam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * np.sign(v - square)
        factor = np.sqrt(1 - b2**t) / (1 - b1**t) if corrected and name != "fedadagrad" else 1.0
        np.testing.assert_allclose(step, lr * factor * m / (np.sqrt(v) + tau), rtol=1e-9)
        assert (v >= 0).all()
    np.testing.assert_allclose(moments["m"], m, rtol=1e-9)
    np.testing.assert_allclose(moments["v"], v, rtol=1e-9)
