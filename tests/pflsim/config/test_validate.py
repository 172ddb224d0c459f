"""How hard a proximal term may pull."""

from __future__ import annotations

import math

import pytest

from pflsim.config.validate import stable_pull
from pflsim.errors import SettingsError


def distance(pull: float, lr: float, momentum: float, steps: int = 2000) -> float:
    """|w − a| after SGD on c/2·(w − a)², from 1."""
    gap, velocity = 1.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + pull * gap
        gap -= lr * velocity
    return abs(gap)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_the_bound_is_where_training_diverges(lr: float, momentum: float) -> None:
    bound = 2 * (1 + momentum) / lr
    assert stable_pull("method.mu", 0.99 * bound, lr, momentum) == 0.99 * bound
    assert distance(0.99 * bound, lr, momentum) < 1
    with pytest.raises(SettingsError, match=r"method\.mu=.*lr\*method\.mu = .* is above .*; at lr=.* at most"):
        stable_pull("method.mu", 1.01 * bound, lr, momentum)
    assert distance(1.01 * bound, lr, momentum) > 1e6


def test_what_is_off_is_never_refused() -> None:
    assert stable_pull("method.mu", 0.0, math.inf) == 0
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(SettingsError, match=r"method\.mu"):
            stable_pull("method.mu", value, 0.1)
