"""What differential privacy costs: ε of rounds with the sampled Gaussian mechanism, and the noise for a budget.

Neighbours differ in one unit (a client, or an example) that is added or removed; sampling is Poisson. The package
dp-accounting composes privacy loss distributions.
"""

import math
from functools import lru_cache

from pflsim.errors import SettingsError

STEP = 1e-3
"""Resolution of privacy losses, and of calibrated noise."""
LEAST, MOST = 0.1, 1e4
"""Noise multipliers that are tried."""


@lru_cache(4096)
def epsilon(sampling: float, noise: float, delta: float, steps: int) -> float:
    """Return ε after so many steps; 0 without steps, and infinite without noise, or with less than is worth computing.

    Args:
        sampling: q, the probability that a unit takes part in a step.
        noise: z, the standard deviation of the noise divided by the clip norm.
        delta: δ.
        steps: T.

    Raises:
        SettingsError: dp-accounting is not installed.
    """
    if steps == 0 or sampling == 0:
        return 0.0
    if noise < LEAST:
        return math.inf
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise SettingsError("privacy needs dp-accounting: pip install 'pflsim[privacy]'") from error
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=STEP)
    accountant.compose(PoissonSampledDpEvent(sampling, GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(delta))


def noise_for(budget: float, sampling: float, delta: float, steps: int) -> float:
    """Return the least noise multiplier, in steps of 0.001, with which so many steps spend at most ε = `budget`.

    Raises:
        SettingsError: no noise is enough, or dp-accounting is not installed.
    """
    low, high = round(LEAST / STEP), round(MOST / STEP)
    if epsilon(sampling, high * STEP, delta, steps) > budget:
        raise SettingsError(f"privacy.epsilon={budget}: no noise keeps {steps} steps within it")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if epsilon(sampling, middle * STEP, delta, steps) <= budget else (middle, high)
    return round(high * STEP, 3)
