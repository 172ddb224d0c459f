"""What differential privacy costs: ε of rounds with the sampled Gaussian mechanism, and the noise for a budget.

Neighbours differ in one unit (a client, or an example) that is added or removed; sampling is Poisson. The package
dp-accounting composes privacy loss distributions.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from pflsim.errors import SettingsError
from pflsim.progress import counted, doing

STEP = 1e-3
"""Resolution of privacy losses, and of calibrated noise."""
LEAST, MOST = 0.1, 1e4
"""Noise multipliers that are tried."""


@lru_cache(2**16)
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


def each_epsilon(cases: Sequence[tuple[float, float, float, int]]) -> list[float]:
    """Return `epsilon` of these arguments, and say how many are done: every different one takes 0.2 s."""
    before = doing("")
    try:
        found = {case: epsilon(*case) for case in counted("computing ε of the clients", [*dict.fromkeys(cases)])}
    finally:
        doing(before)
    return [found[case] for case in cases]


def noise_for(budget: float, sampling: float, delta: float, steps: int) -> float:
    """Return the least noise multiplier, in steps of 0.001, with which so many steps spend at most ε = `budget`.

    Raises:
        SettingsError: no noise is enough, or dp-accounting is not installed.
    """
    low, high = round(LEAST / STEP), round(MOST / STEP)

    def spent(number: int) -> float:
        return epsilon(sampling, round(number * STEP, 3), delta, steps)  # the value that is returned, so it is cached

    if spent(high) > budget:
        raise SettingsError(f"privacy.epsilon={budget}: no noise keeps {steps} steps within it")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if spent(middle) <= budget else (middle, high)
    return round(high * STEP, 3)
