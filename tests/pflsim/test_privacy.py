"""ε and noise, against figures of dp-accounting and the closed form of unsampled Gaussian noise."""

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from pflsim.privacy import each_epsilon, epsilon, noise_for
from pflsim.progress import doing

pytest.importorskip("dp_accounting")


@pytest.mark.parametrize(
    ("sampling", "noise", "steps", "delta", "expected"),
    [
        (0.05, 1, 200, 1e-3, 3.1621), (0.1, 1, 100, 1e-3, 4.7844), (0.3, 2, 200, 1e-3, 8.9149),
        (0.01, 1.1, 10_000, 1e-5, 5.1963), (0.1, 1, 1, 1e-3, 0.6499), (0.1, 1, 2, 1e-3, 0.8449),
        (0.1, 1, 0, 1e-3, 0), (0.1, 0, 5, 1e-3, math.inf),
    ],
)  # fmt: skip
def test_sampled(sampling: float, noise: float, steps: int, delta: float, expected: float) -> None:
    assert epsilon(sampling, noise, delta, steps) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("noise", "expected"), [(10.0, 4.3772), (4.0, 13.2067)])
def test_without_sampling_as_the_closed_form(noise: float, expected: float) -> None:
    """δ = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2), where μ = √T/z."""
    mu = math.sqrt(100) / noise

    def excess(e: float) -> float:
        return norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2) - 1e-5

    assert epsilon(1.0, noise, 1e-5, 100) == pytest.approx(brentq(excess, 0, 50), abs=2e-3)
    assert brentq(excess, 0, 50) == pytest.approx(expected, abs=1e-4)


def test_equal_clients_are_computed_once() -> None:
    """The noise for a budget has been tried with the same number, so its ε is known."""
    noise = noise_for(3.3, 0.5, 1e-3, 7)
    before, said = epsilon.cache_info().misses, doing("what was done before")
    found = each_epsilon([(0.5, noise, 1e-3, 7), (0.5, 1.77, 1e-3, 7), (0.5, 1.77, 1e-3, 7), (0.5, 1.77, 1e-3, 0)])
    assert epsilon.cache_info().misses == before + 2 and doing(said) == "what was done before"
    assert found == [epsilon(0.5, noise, 1e-3, 7), *[epsilon(0.5, 1.77, 1e-3, 7)] * 2, 0]


@pytest.mark.parametrize(
    ("budget", "sampling", "delta", "steps", "expected"), [(8, 0.1, 1e-3, 100, 0.779), (1, 0.3, 1e-4, 200, 13.602)]
)
def test_the_least_noise_for_a_budget(
    budget: float, sampling: float, delta: float, steps: int, expected: float
) -> None:
    found = noise_for(budget, sampling, delta, steps)
    assert found == expected
    assert epsilon(sampling, found, delta, steps) <= budget < epsilon(sampling, found - 0.001, delta, steps)
