"""The LeNet of pFedHN and pFedLA."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from lightning_modules.nets.layers import Norm, conv_stages, image_size
from lightning_modules.nets.net import Net
from pflsim.config.validate import layer_widths


class LeNet(Net):
    """Stages of convolution, ReLU and 2x2 max pooling, several fully connected layers with ReLU, and the head.

    The defaults are the network of pFedHN's experiments (Shamsian et al. 2021). pFedLA uses it too (section 4.1), with
    BatchNorm after the convolutions on CIFAR (`norm="batch"`).

    Args:
        input_shape: [channels, height, width].
        num_classes: C.
        channels: filters of each convolution.
        kernel: side of the filters.
        padding: zeros added on each side before a convolution.
        hidden: widths of the fully connected layers, the last of which is the feature width D.
        norm: none, batch or group, between a convolution and its ReLU.

    Raises:
        SettingsError: the inputs are no images or too small, or a setting is out of range.

    Notes:
        pFedLA gives no widths, but the savings in its Table 3 match this network to the digit: 10.58% (conv2), 79.26%
        (fc1) and 0.70% (head) on CIFAR-10, and 71.73% and 0.99% on EMNIST.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        channels: Sequence[int] = (16, 32),
        kernel: int = 5,
        padding: int = 0,
        hidden: Sequence[int] = (120, 84),
        norm: Norm = "none",
    ):
        image = image_size("lenet", input_shape)
        stages, maps = conv_stages("lenet", image, channels, kernel=kernel, padding=padding, norm=norm)
        layers: OrderedDict[str, nn.Module] = OrderedDict(**stages, flatten=nn.Flatten())
        width = math.prod(maps)
        for number, outputs in enumerate(layer_widths("model.hidden", hidden), start=1):
            layers[f"fc{number}"] = nn.Linear(width, outputs)
            layers[f"relu{len(channels) + number}"] = nn.ReLU(inplace=True)
            width = outputs
        super().__init__(nn.Sequential(layers), nn.Linear(width, num_classes), (width,), num_classes)
