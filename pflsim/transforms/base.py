"""The base class of transforms of uplinks: what a client sends of the change of its weights, and how large it is."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from pflsim.seeding import torch_generator
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a transformed message.

    Args:
        values: how many values are sent.
        bits: of each value.
        overhead: further bytes, such as those of positions and scales.
    """

    values: int
    bits: int = 32
    overhead: int = 0

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.ceil(self.values * self.bits / 8) + self.overhead


@dataclass(frozen=True, slots=True)
class Sender:
    """The client that sends a message, and the round."""

    seed: int
    client: int
    round_number: int

    def generator(self, purpose: str) -> torch.Generator:
        """Return a random stream of (seed, purpose, client, round)."""
        return torch_generator(self.seed, purpose, self.client, self.round_number)


class Transform:
    """Base class of transforms of uplinks. A subclass overrides `encode`.

    Args:
        feedback: add to the next change what was not sent of this one (error feedback).
    """

    def __init__(self, *, feedback: bool = True):
        self.feedback = feedback

    def memory(self, parameters: Tensors) -> Tensors:
        """Return what a client keeps between rounds, as it is before round 1, for these shared parameters."""
        return {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in parameters.items()} if self.feedback else {}

    def __call__(self, change: Tensors, memory: Tensors, sender: Sender) -> tuple[Tensors, Tensors, Size]:
        """Return what is sent, the new memory, and the size of the message.

        Args:
            change: of the shared parameters by local training, in float64, by state_dict key.
            memory: of the client.
            sender: for random numbers.
        """
        given = {name: value + memory[name] if self.feedback else value for name, value in change.items()}
        sent, size = self.encode(given, sender, Size(sum(value.numel() for value in given.values())))
        left = {name: value - sent[name] for name, value in given.items()} if self.feedback else {}
        return sent, {**memory, **left}, size

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        """Return the tensors that the server knows afterwards, of the same names and shapes, and the size.

        Default: everything. No attribute and no given tensor may change.
        """
        return change, size


class MakesTransform(Protocol):
    """Type of a transform with its settings bound."""

    def __call__(self) -> Transform:
        """Return the transform."""
        ...


def none() -> Transform:
    """Send the weights as they are."""
    return Transform(feedback=False)
