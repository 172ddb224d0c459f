"""The size of a message, from the message itself."""

from __future__ import annotations

from torch import Tensor

from pflsim.messages import Message, Prototypes


def payload_bytes(message: Message) -> int:
    """Count the bytes of every section of a message; an empty message costs nothing.

    Weights and extra tensors count by their element size, prototypes by the classes that are present
    (`classes · (D · element + 4)`: a mean and a 4-byte count each), numbers 8 bytes each.
    """
    tensors = sum(_bytes(t) for t in message.weights.values()) + sum(_bytes(t) for t in message.extra.values())
    return tensors + _prototype_bytes(message.prototypes) + 8 * len(message.numbers)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _prototype_bytes(prototypes: Prototypes | None) -> int:
    if prototypes is None:
        return 0
    present = int((prototypes.counts > 0).sum())
    return present * (prototypes.means.shape[1] * prototypes.means.element_size() + 4)
