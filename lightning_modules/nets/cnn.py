"""Convolutional networks with a few stages."""

import math
from collections import OrderedDict
from typing import Literal

from torch import nn

from lightning_modules.nets.layers import Norm, Padding, conv_stages, image_size
from lightning_modules.nets.net import Net
from pflsim.config.validate import Width, Widths


class Cnn(Net):
    """Stages of convolution, ReLU and 2x2 max pooling, one fully connected layer, and the head.

    The defaults are the CNN of FedFCD (section 4.1.2: 5x5 convolutions with 32 and 64 filters, 512 neurons). It is also
    used for pFedCFR's CNN (section IV-A: 2 convolutional and 2 fully connected layers, no widths given). With
    `norm="batch"` it has the normalisation that pFedLA uses on CIFAR (section 4.1). With three 3x3 convolutions it has
    the depth of FedALP's MNIST-CNN and CIFAR10-CNN (section 3.1).

    Args:
        input_shape: [channels, height, width].
        num_classes: C.
        channels: filters of each convolution.
        kernel: side of the filters.
        padding: zeros added on each side before a convolution.
        hidden: width of the fully connected layer, which is the feature width D.
        norm: none, batch or group, between a convolution and its ReLU.

    Raises:
        SettingsError: the inputs are no images or too small, or a setting is out of range.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        channels: Widths = (32, 64),
        kernel: Width = 5,
        padding: Padding = 0,
        hidden: Width = 512,
        norm: Norm = "none",
    ):
        stages, maps = conv_stages("cnn", input_shape, channels, kernel=kernel, padding=padding, norm=norm)
        layers = OrderedDict(
            **stages,
            flatten=nn.Flatten(),
            fc=nn.Linear(math.prod(maps), hidden),
            relu=nn.ReLU(inplace=True),
        )
        super().__init__(nn.Sequential(layers), nn.Linear(hidden, num_classes), (hidden,), num_classes)


class MapCnn(Net):
    """A body of two convolutional stages, whose features are maps, and a head of two fully connected layers.

    This is the network of pFedPM for MNIST and FEMNIST (section V): the body is the feature extraction module and the
    head is the decision module.

    Args:
        input_shape: [channels, height, width].
        num_classes: C.
        hidden_channels: filters of the first convolution; 18, 20 or 22 in pFedPM-mh.
        channels: filters of the second convolution; equal for all clients, so that features have one shape.
        kernel: side of the filters.
        padding: zeros added on each side before a convolution.
        strides: of the two convolutions; (1, 2) and (2, 1) give maps of the same size if the image halves evenly.
        hidden: width of the first fully connected layer.
        features: the "maps" of the second convolution, or the "hidden" layer, which then is part of the body.

    Raises:
        SettingsError: the inputs are no images or too small, or a setting is out of range.

    Notes:
        The only widths in the paper are 18, 20 and 22, "the output channel numbers of the convolutional layers". Only
        the first convolution may differ, since features need one shape. The other widths follow FedProto's network for
        MNIST, without its dropout: 5x5 convolutions, 20 output channels, a fully connected layer of 50.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        hidden_channels: Width = 20,
        channels: Width = 20,
        kernel: Width = 5,
        padding: Padding = 0,
        strides: Widths = (1, 1),
        hidden: Width = 50,
        features: Literal["maps", "hidden"] = "maps",
    ):
        widths, numbers = [hidden_channels, channels], {"kernel": kernel, "padding": padding}
        stages, maps = conv_stages("pfedpm_cnn", input_shape, widths, **numbers, norm="none", strides=strides)
        hidden_layer: OrderedDict[str, nn.Module] = OrderedDict(
            flatten=nn.Flatten(), fc1=nn.Linear(math.prod(maps), hidden), relu=nn.ReLU(inplace=True)
        )
        last = nn.Linear(hidden, num_classes)
        if features == "hidden":
            body = nn.Sequential(OrderedDict(**stages, **hidden_layer))
            super().__init__(body, last, (hidden,), num_classes)
        else:
            head = nn.Sequential(OrderedDict(**hidden_layer, fc2=last))
            super().__init__(nn.Sequential(OrderedDict(stages)), head, maps, num_classes)


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
        channels: Widths = (16, 32),
        kernel: Width = 5,
        padding: Padding = 0,
        hidden: Widths = (120, 84),
        norm: Norm = "none",
    ):
        stages, maps = conv_stages("lenet", input_shape, channels, kernel=kernel, padding=padding, norm=norm)
        layers: OrderedDict[str, nn.Module] = OrderedDict(**stages, flatten=nn.Flatten())
        width = math.prod(maps)
        for number, outputs in enumerate(hidden, start=1):
            layers[f"fc{number}"] = nn.Linear(width, outputs)
            layers[f"relu{len(channels) + number}"] = nn.ReLU(inplace=True)
            width = outputs
        super().__init__(nn.Sequential(layers), nn.Linear(width, num_classes), (width,), num_classes)


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

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden: Width = 1024):
        inputs, height, width = image_size("alexnet", input_shape, at_least=16)
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
