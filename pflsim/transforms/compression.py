"""Compression of uplinks: fewer values, or fewer bits for each."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from pflsim.config.components import TARGET, bind, check_component
from pflsim.config.validate import Portion
from pflsim.errors import SettingsError
from pflsim.transforms.base import MakesTransform, Sender, Size, Transform
from pflsim.types import Tensors


class TopK(Transform):
    """Send the largest values over all tensors, and their positions as numbers or as a bit map.

    Args:
        share: fraction of the values that is sent, in (0, 1].
        feedback: add to the next change what was not sent of this one (error feedback).
    """

    def __init__(self, *, share: Portion = 0.01, feedback: bool = True):
        super().__init__(feedback=feedback)
        self.share = share

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        """Keep the k largest absolute values; of equal ones, the first."""
        values = _joined(change)
        k, sizes = _count(self.share, len(values)), values.abs()
        least = sizes.kthvalue(len(values) - k + 1).values
        ties = sizes == least
        kept = (sizes > least) | (ties & (ties.cumsum(0) <= k - (sizes > least).sum()))
        positions = min(4 * k, math.ceil(len(values) / 8))
        return _split(values.where(kept, 0.0), change), Size(k, size.bits, size.overhead + positions)


class RandomK(Transform):
    """Send random values, whose positions the server draws too.

    Args:
        share: fraction of the values that is sent, in (0, 1].
        feedback: add to the next change what was not sent of this one; without it, the values are divided by the share.
    """

    def __init__(self, *, share: Portion = 0.01, feedback: bool = True):
        super().__init__(feedback=feedback)
        self.share = share

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        """Keep k values."""
        values = _joined(change)
        k, sent = _count(self.share, len(values)), torch.zeros_like(values)
        chosen = torch.randperm(len(values), generator=sender.generator("random_k"))[:k]
        sent[chosen] = values[chosen] * (1.0 if self.feedback else len(values) / k)
        return _split(sent, change), Size(k, size.bits, size.overhead)


class Quantize(Transform):
    """Round the values of each tensor at random to multiples of a step, without bias (QSGD with the maximum norm).

    Args:
        bits: bits of a value; the largest absolute value of a tensor is 2^(bits−1) − 1 steps.
        feedback: add to the next change what was not sent of this one (error feedback).
    """

    def __init__(self, *, bits: Annotated[int, Ge(2), Le(16)] = 8, feedback: bool = False):
        super().__init__(feedback=feedback)
        self.bits = bits

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        """Round every tensor."""
        generator, levels = sender.generator("quantize"), 2 ** (self.bits - 1) - 1

        def rounded(value: Tensor) -> Tensor:
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
            step = value.abs().max() / levels
            return (value / step + noise).floor().clamp(-levels, levels) * step if step else value

        sent = {name: rounded(value) for name, value in change.items()}
        return sent, Size(size.values, self.bits, size.overhead + 4 * len(change))


class Sign(Transform):
    """Send the signs of the values, and the mean absolute value of each tensor.

    Args:
        feedback: add to the next change what was not sent of this one (error feedback).
    """

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        """Replace every tensor by its signs times the mean of its absolute values."""
        sent = {name: value.sign() * value.abs().mean() for name, value in change.items()}
        return sent, Size(size.values, 1, size.overhead + 4 * len(change))


def _joined(tensors: Tensors) -> Tensor:
    return torch.cat([value.reshape(-1) for value in tensors.values()])


def _split(values: Tensor, like: Tensors) -> Tensors:
    """Return joined values as tensors again."""
    parts = values.split([value.numel() for value in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def _count(share: float, values: int) -> int:
    """Return how many of the values are sent: their share, rounded up."""
    return max(1, math.ceil(share * values - 1e-9))  # 0.07 · 100 is above 7


PARTS: dict[str, type[Transform]] = {"topk": TopK, "random_k": RandomK, "quantize": Quantize, "sign": Sign}


class Chain(Transform):
    """Apply several transforms one after another.

    Args:
        parts: names of transforms, or dotted names, with their settings.
        feedback: add to the next change what was not sent of this one (error feedback).
    """

    def __init__(self, *, parts: Sequence[dict[str, dict[str, Any]]], feedback: bool = True):
        super().__init__(feedback=feedback)
        self.parts = [self._part(name, own) for part in parts for name, own in part.items()]
        if not self.parts:
            raise SettingsError("uplink.parts: expected at least one transform")
        for part in self.parts[1:]:
            if isinstance(part, TopK | RandomK | Sign):  # it would choose among zeros, or average them
                name = next(name for name, kind in PARTS.items() if type(part) is kind)
                raise SettingsError(f"uplink.parts: {name} must be the first of them")

    def _part(self, name: str, settings: dict[str, Any]) -> Transform:
        if name not in PARTS and "." not in name or "feedback" in settings:
            expected = f"expected {', '.join(PARTS)} or a dotted name, without feedback, which the chain has"
            raise SettingsError(f"uplink.parts: found {name} {settings}; {expected}")
        target = f"{__name__}.{PARTS[name].__name__}" if name in PARTS else name
        node = check_component({TARGET: target, **settings}, "uplink.parts")
        part = bind(node, "uplink.parts", MakesTransform)()
        part.feedback = self.feedback
        return part

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        """Apply every part to what the one before it sends."""
        for part in self.parts:
            change, size = part.encode(change, sender, size)
        return change, size
