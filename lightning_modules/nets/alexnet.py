"""AlexNet for small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from lightning_modules.nets.layers import image_size
from lightning_modules.nets.net import Net
from pflsim.config.validate import layer_widths


class AlexNet(Net):
    """Five convolutions and three fully connected layers, for images of 28x28 or 32x32 pixels.

    The AlexNet "accustomed to the CIFAR-10 dataset" of FedALP (section 3.1).

    Args:
        input_shape: [channels, height, width], at least 16x16 pixels.
        num_classes: C.
        hidden: width of the two fully connected layers before the head, which is the feature width D.

    Raises:
        SettingsError: the inputs are no images or too small, or a setting is out of range.

    Notes:
        The paper gives depths only. The numbers of filters are those of the original (64, 192, 384, 256, 256). All
        filters are 3x3, the first convolution has stride 2, and max pooling is 2x2. The fully connected layers have
        1,024 instead of 4,096 neurons (4.4 instead of 23 million parameters), and there is no dropout.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden: int = 1024):
        inputs, height, width = image_size("alexnet", input_shape, at_least=16)
        layer_widths("model.hidden", [hidden])
        height, width = ((side + 1) // 16 for side in (height, width))  # stride 2 rounds up, then three poolings
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number, outputs in enumerate((64, 192, 384, 256, 256), start=1):
            layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, stride=2 if number == 1 else 1, padding=1)
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
            if number in (1, 2, 5):
                layers[f"pool{number}"] = nn.MaxPool2d(2)
            inputs = outputs
        layers["flatten"] = nn.Flatten()
        for number, outputs in enumerate((hidden, hidden), start=1):
            layers[f"fc{number}"] = nn.Linear(inputs * height * width if number == 1 else hidden, outputs)
            layers[f"fc{number}_relu"] = nn.ReLU(inplace=True)
        super().__init__(nn.Sequential(layers), nn.Linear(hidden, num_classes), (hidden,), num_classes)
