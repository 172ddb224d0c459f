"""Differential privacy of examples: how much noise the steps of local training need."""

import math
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Gt, Lt

from pflsim.config.validate import NonNegative, Positive
from pflsim.errors import SettingsError
from pflsim.privacy import each_epsilon, noise_for
from pflsim.progress import counted, doing
from pflsim.servers.privacy import Privacy


class ExamplePrivacy(Privacy):
    """Hide each training example: clip the gradients of examples, and add noise to every step (Abadi et al. 2016).

    Args:
        delta: δ of (ε, δ)-differential privacy, below 1/n for the n examples of every client.
        clip: norm C to which the gradient of an example is clipped, over all parameters of a step.
        noise: noise multiplier σ, the noise's standard deviation divided by C; null: each client's least for `epsilon`.
        epsilon: budget of each client in the planned rounds; null: there is none.
    """

    def __init__(
        self, *, delta: Annotated[float, Gt(0), Lt(1)], clip: Positive = 1.0,
        noise: NonNegative | Sequence[NonNegative] | None = None, epsilon: Positive | None = None,
    ):  # fmt: skip
        self.delta, self.clip, self.noise, self.epsilon = delta, clip, noise, epsilon

    def calibrated(self, sampling: Sequence[float], steps: Sequence[int]) -> list[float]:
        """Return the noise multiplier of each client.

        Args:
            sampling: q of each client, the probability of an example to be in a batch.
            steps: of each client in the whole run.

        Raises:
            SettingsError: neither noise nor a budget is given, or the noise spends more than the budget.
        """
        each = [*zip(sampling, steps, strict=True)]
        if self.noise is None:
            if self.epsilon is None:
                raise SettingsError("privacy=example needs privacy.noise, or a budget privacy.epsilon")
            before, pairs = doing(""), dict.fromkeys(each, 0.0)  # many clients have the same
            for q, number in counted("calibrating the noise of privacy=example", [*pairs]):
                pairs[q, number] = noise_for(self.epsilon, q, self.delta, number)
            doing(before)
            return [pairs[pair] for pair in each]
        noise = [*self.noise] if isinstance(self.noise, Sequence) else [float(self.noise)] * len(each)
        if len(noise) != len(each):
            raise SettingsError(f"privacy.noise: expected one number, or one for each of {len(each)} clients")
        if self.epsilon is not None:
            cases = [(q, own, self.delta, n) for own, (q, n) in zip(noise, each, strict=True)]
            spent, number = max(zip(each_epsilon(cases), steps, strict=True))
            if spent > self.epsilon:
                what = f"privacy.noise spends ε = {spent:.4g} at a client with {number} steps"
                raise SettingsError(f"{what}, above privacy.epsilon={self.epsilon:g}")
        return noise


def rounded_up(probability: float) -> float:
    """Return a probability rounded up to two digits, such as 0.0201 to 0.021, so that clients share calibrations."""
    unit = 10 ** (1 - math.floor(math.log10(probability)))
    return min(1.0, math.ceil(probability * unit - 1e-9) / unit)
