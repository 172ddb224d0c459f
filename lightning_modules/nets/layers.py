"""Building blocks of networks, with checks of their settings."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le
from torch import nn

from pflsim.errors import SettingsError

Norm = Literal["none", "batch", "group"]
Padding = Annotated[int, Ge(0), Le(100)]


def image_size(model: str, input_shape: Sequence[int], *, at_least: int = 1) -> tuple[int, int, int]:
    """Return channels, height and width of the input images of a convolutional network.

    Raises:
        SettingsError: the inputs are not images [channels, height, width], or are too small.
    """
    if len(input_shape) != 3:
        shape = list(input_shape)
        raise SettingsError(f"model {model} needs images [channels, height, width], got shape {shape}: take model=mlp")
    channels, height, width = input_shape
    if min(height, width) < at_least:
        needed = f"model {model} needs images of at least {at_least}x{at_least} pixels, got {height}x{width}"
        raise SettingsError(f"{needed}: take larger images or model=mlp")
    return channels, height, width


def norm2d(kind: Norm, channels: int) -> nn.Module:
    """Return a normalisation layer for feature maps; for "none" the identity.

    The number of groups for "group" is the greatest common divisor of 32 and the channels. It is halved if each group
    would be a single channel, whose variance is 0 on maps of one pixel.
    """
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = math.gcd(32, channels)
    return nn.GroupNorm(max(groups // 2, 1) if groups == channels else groups, channels)


def conv_stages(
    model: str,
    input_shape: Sequence[int],
    channels: Sequence[int],
    *,
    kernel: int,
    padding: int,
    norm: Norm,
    strides: Sequence[int] = (),
) -> tuple[dict[str, nn.Module], tuple[int, int, int]]:
    """Return stages of convolution, normalisation, ReLU and 2x2 max pooling as named layers.

    Args:
        model: the network's name, for errors.
        input_shape: [channels, height, width] of the images.
        channels: output channels of each stage.
        kernel: side of the convolutions' filters.
        padding: zeros added on each side before a convolution.
        norm: none, batch or group.
        strides: of each stage's convolution; empty: all 1.

    Returns:
        The layers in order (conv1, norm1, relu1, pool1, conv2, ...), and the shape of one example's feature maps.

    Raises:
        SettingsError: the inputs are no images, or shrink to nothing, or strides and convolutions differ in number.
    """
    inputs, height, width = image = image_size(model, input_shape)
    strides = strides or [1] * len(channels)
    if len(strides) != len(channels):
        raise SettingsError(f"model {model}: strides={[*strides]} must be {len(channels)} numbers, one per convolution")
    layers: dict[str, nn.Module] = {}
    for stage, (outputs, stride) in enumerate(zip(channels, strides, strict=True), start=1):
        height, width = (((side + 2 * padding - kernel) // stride + 1) // 2 for side in (height, width))
        if min(height, width) < 1:
            raise SettingsError(
                f"model {model}: images of {image[1]}x{image[2]} pixels shrink to nothing at convolution {stage} "
                f"(kernel={kernel}, padding={padding}, each followed by 2x2 pooling); take larger images, a smaller "
                f"model.kernel, model.padding={kernel // 2} (which keeps the size until the pooling), or model=mlp"
            )
        layers[f"conv{stage}"] = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding)
        layers[f"norm{stage}"] = norm2d(norm, outputs)
        layers[f"relu{stage}"] = nn.ReLU(inplace=True)
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
        inputs = outputs
    return layers, (inputs, height, width)
