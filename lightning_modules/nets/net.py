"""What every network here is: a body that makes features and a head that makes logits of them."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Net(nn.Module):
    """A body and a head, registered in the order of the forward pass (fusion units are taken in that order).

    A network's class takes `(input_shape, num_classes)` and, by keyword, its own settings. It draws its weights from
    torch's global generator, as torch.nn does; nothing else here draws.

    Args:
        body: [B, *input_shape] → features [B, *feature_shape].
        head: features [B, *feature_shape] → logits [B, C].
        feature_shape: shape of one example's features.
        num_classes: C.
    """

    def __init__(self, body: nn.Module, head: nn.Module, feature_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        self.body = body
        self.head = head
        self.feature_shape = feature_shape
        self.num_classes = num_classes

    @property
    def feature_width(self) -> int:
        """D, the width of flattened features."""
        return math.prod(self.feature_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [B, *input_shape] → logits [B, C]."""
        return self.head(self.body(x))
