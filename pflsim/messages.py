"""The messages between server and clients, and their size in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class Prototypes:
    """Class means with their counts. A class with count 0 is missing: its row is undefined and is not sent.

    Args:
        means: [C, D] float, the mean feature of each class.
        counts: [C] integer, the examples behind each mean.
    """

    means: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Message:
    """A downlink, or the content of an uplink. Receivers must not modify its tensors.

    Args:
        weights: model parameters and floating point buffers by state_dict key.
        prototypes: class means, or None.
        extra: other tensors by name.
        numbers: scalars by name (8 bytes each).
        size: bytes of the tensors as they are sent, if a transform packs them more densely.
    """

    weights: Tensors = field(default_factory=dict)
    prototypes: Prototypes | None = None
    extra: Tensors = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    size: int | None = field(default=None, kw_only=True)

    def to(self, device: torch.device, extra: bool = True) -> Self:
        """Return the message with its tensors on `device`; `extra` says whether the extra tensors move too."""
        if device.type == "cpu":
            return self
        own = self.prototypes
        prototypes = own and Prototypes(own.means.to(device), own.counts.to(device))
        weights = {name: tensor.to(device) for name, tensor in self.weights.items()}
        extras = {name: tensor.to(device) for name, tensor in self.extra.items()} if extra else self.extra
        return replace(self, weights=weights, prototypes=prototypes, extra=extras)


@dataclass(frozen=True, slots=True)
class Uplink(Message):
    """The message that a client sends.

    `client` and `num_examples` are its header. The server knows them before the run, so they do not count as traffic.
    """

    client: int = -1
    num_examples: int = 0


def packed(models: Mapping[int, Tensors], prefix: str) -> dict[str, Tensor]:
    """Pack several models into the extra tensors of a message, named `<prefix><number>/<key>`."""
    return {f"{prefix}{number}/{key}": value for number, model in models.items() for key, value in model.items()}


def unpacked(message: Message, prefix: str) -> dict[int, dict[str, Tensor]]:
    """Return the models that `packed` put into a message, by number and key."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in message.extra.items():
        if name.startswith(prefix):
            number, _, key = name.removeprefix(prefix).partition("/")
            found.setdefault(int(number), {})[key] = value
    return found


def payload_bytes(message: Message) -> int:
    """Return the size of a message in bytes; an empty message has 0.

    Weights and extra tensors count by their element size, prototypes by the classes that are present
    (`classes · (D · element + 4)`: a mean and a 4-byte count each), numbers 8 bytes each.
    """
    tensors = sum(tensor.nbytes for tensor in (*message.weights.values(), *message.extra.values()))
    if message.prototypes is not None:
        means, present = message.prototypes.means, int((message.prototypes.counts > 0).sum())
        tensors += present * (means.shape[1] * means.element_size() + 4)
    return (tensors if message.size is None else message.size) + 8 * len(message.numbers)
