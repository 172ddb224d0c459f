"""Differential privacy of clients: the server clips their changes, and adds noise to the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from pflsim.config.validate import NonNegative, Positive
from pflsim.errors import SettingsError
from pflsim.privacy import epsilon, noise_for
from pflsim.seeding import torch_generator
from pflsim.types import Tensors

TINY = torch.finfo(torch.float64).tiny


class Privacy:
    """Base class of kinds of privacy. It is itself `privacy=none`."""


class MakesPrivacy(Protocol):
    """Type of a kind of privacy with its settings bound."""

    def __call__(self) -> Privacy:
        """Return it."""
        ...


def none() -> Privacy:
    """Do without differential privacy."""
    return Privacy()


class ClientPrivacy(Privacy):
    """Hide whether a client takes part: clip the clients' changes, and add noise to their mean (McMahan et al. 2018).

    Args:
        delta: δ of (ε, δ)-differential privacy, below 1/N.
        clip: norm S to which a change is clipped, over all shared parameters; the first one with `adapt`.
        noise: noise multiplier z, the noise's standard deviation divided by S; null: the least for `epsilon`.
        epsilon: budget of the planned rounds; null: there is none.
        adapt: move S towards the median of the norms of the clients' changes (Andrew et al. 2021).
    """

    def __init__(
        self, *, delta: Annotated[float, Gt(0), Lt(1)], clip: Positive = 1.0, noise: NonNegative | None = None,
        epsilon: Positive | None = None, adapt: bool = False,
    ):  # fmt: skip
        self.delta, self.clip, self.noise, self.epsilon, self.adapt = delta, clip, noise, epsilon, adapt

    def calibrated(self, sampling: float, rounds: int) -> float:
        """Return the noise multiplier of a run.

        Raises:
            SettingsError: neither noise nor a budget is given, or the noise spends more than the budget.
        """
        if self.noise is None:
            if self.epsilon is None:
                raise SettingsError("privacy=client needs privacy.noise, or a budget privacy.epsilon")
            return noise_for(self.epsilon, sampling, self.delta, rounds)
        if self.epsilon is not None:
            spent = epsilon(sampling, self.noise, self.delta, rounds)
            if spent > self.epsilon:
                what = f"privacy.noise={self.noise:g} spends ε = {spent:.4g} in {rounds} rounds"
                raise SettingsError(f"{what}, above privacy.epsilon={self.epsilon:g}")
        return float(self.noise)


@dataclass(frozen=True)
class Release:
    """Makes the change of the server's model from the changes of a round's clients.

    Args:
        clip: S; the first one with `adapt`.
        noise: z.
        delta: δ.
        sampling: q, the probability with which a client takes part in a round.
        expected: m, the expected number of clients of a round.
        seed: of the run.
        adapt: see `ClientPrivacy`.
    """

    clip: float
    noise: float
    delta: float
    sampling: float
    expected: float
    seed: int
    adapt: bool = False

    @property
    def about(self) -> dict[str, float | str]:
        """What determines ε, besides the number of rounds."""
        return {"unit": "client", **{name: getattr(self, name) for name in ("delta", "noise", "clip", "sampling")}}

    @property
    def count_noise(self) -> float:
        """The deviation σ_b of the noise of the number of clients whose norm is below S."""
        return max(self.expected / 20, 1.2 * self.noise)

    @property
    def change_noise(self) -> float:
        """The multiplier z′ of the noise of the changes: with that of the number, both spend as much as z alone."""
        if not self.adapt or not self.noise:
            return self.noise
        return (self.noise**-2 - (2 * self.count_noise) ** -2) ** -0.5

    def __call__(
        self, changes: Sequence[Tensors], shapes: Mapping[str, torch.Size], memory: Tensors, round_number: int
    ) -> tuple[Tensors, Tensors]:
        """Return (Σ clipped changes + noise)/m, and the clip norm of the next round; without changes, noise alone.

        Args:
            changes: of the round's clients, in float64.
            shapes: of the shared tensors, in the order of the message.
            memory: with the clip norm as `clip`; {} before round 1.
            round_number: the round.
        """
        generator = torch_generator(self.seed, "privacy", round_number=round_number)
        clip = memory.get("clip", torch.tensor(self.clip, dtype=torch.float64))
        norms = [torch.stack([value.norm() for value in change.values()]).norm() for change in changes]
        scales = [(clip / norm.clamp_min(TINY)).clamp_max(1) for norm in norms]

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

        released = {}
        for name, shape in shapes.items():
            total = self.change_noise * clip * normal(shape)
            for change, scale in zip(changes, scales, strict=True):
                total = total + scale * change[name]
            released[name] = total / self.expected
        if not self.adapt:
            return released, {}
        # a client changes this sum by a half: the number of small norms by one, half the number of clients by a half
        excess = sum(bool(norm <= clip) - 0.5 for norm in norms) + self.count_noise * bool(self.noise) * normal(())
        return released, {"clip": clip * torch.exp(-0.2 * excess / self.expected)}
