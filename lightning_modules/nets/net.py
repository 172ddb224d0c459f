"""Base class of all networks: a body that computes features and a head that computes logits."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
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
    stackable: ClassVar[bool] = True
    """Whether its layers can be stacked for several clients, by `torch.vmap`."""
    channels_last: bool = True
    """Whether its layers take maps that are stored channels last; False if one needs `view` of maps."""

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


def choose_memory_format(module: nn.Module) -> None:
    """Store the tensors of a module on a CPU channels last, where convolutions are faster, if that is safe.

    It is not safe with a convolution of kernel 1, a stride and few channels: oneDNN writes past its workspace when it
    computes the gradient of the weights (issue 6035 of oneapi-src/oneDNN), if there are fewer input channels than a
    block has, which are 8 with AVX2 and 16 with AVX-512. The choice does not depend on the processor.

    Args:
        module: contains nets, all of which decide.
    """
    parts = [*module.modules()]
    convolutions = (part for part in parts if isinstance(part, nn.Conv2d))
    overflows = any(
        conv.kernel_size == (1, 1) and max(conv.stride) > 1 and conv.in_channels // conv.groups < 16
        for conv in convolutions
    )
    if all(part.channels_last for part in parts if isinstance(part, Net)) and not overflows:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block; its former mode is restored afterwards."""
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)
