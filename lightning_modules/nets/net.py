"""Base class of all networks: a body that computes features and a head that computes logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor, nn

from pflsim.data.dataset import Kind


class Net(nn.Module):
    """A body and a head, registered in the order of the forward pass, which is also the order of fusion units.

    Subclasses take `(input_shape, num_classes)` and their own settings as keywords. Initial weights are drawn from
    torch's global generator, as in torch.nn; nothing else draws random numbers.

    Args:
        body: [B, *input_shape] → features [B, *feature_shape].
        head: features [B, *feature_shape] → logits [B, C].
        feature_shape: shape of one example's features.
        num_classes: C.
    """

    inputs: ClassVar[tuple[Kind, ...]] = ("images", "tables")
    """Kinds of data that it takes. A net for token sequences has the keyword `vocabulary`."""
    notes: tuple[str, ...] = ()
    """What the user should know about the net; a run warns of it."""
    channels_last: bool = True
    """Whether clients on a CPU store its tensors channels last, which is faster; False if it needs `view` of maps."""

    def __init__(self, body: nn.Module, head: nn.Module, feature_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        self.body = body
        self.head = head
        self.feature_shape = feature_shape
        self.num_classes = num_classes

    @property
    def feature_width(self) -> int:
        """Width D of flattened features."""
        return math.prod(self.feature_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs [B, *input_shape] to logits [B, C]."""
        return self.head(self.body(x))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block; its former mode is restored afterwards."""
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)
