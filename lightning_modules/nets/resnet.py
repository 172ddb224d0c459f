"""ResNet-18 for small images."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from lightning_modules.nets.layers import image_size, norm2d
from lightning_modules.nets.net import Net
from pflsim.config.validate import Width, Widths
from pflsim.errors import SettingsError

Norms = Callable[[int], nn.Module]


class ResNet18(Net):
    """ResNet-18 (He et al. 2016) with a stem for small images: a 3x3 convolution of stride 1 and no max pooling.

    pFedCFR (Table III), FedFCD (section 4.1.2) and pFedPM (section V) use it for CIFAR. Layers and names after the stem
    are torchvision's, except that its `fc` is the head here. It has 62 parameter tensors.

    Args:
        input_shape: [channels, height, width], at least 8x8 pixels.
        num_classes: C.
        width: channels of the stem and the first stage; the others have 2, 4 and 8 times as many, D = 8 · width.
        norm: batch or group.
        strides: of the four stages. Features are averaged over the image, so their shape does not depend on strides
            (pFedPM-mh).

    Raises:
        SettingsError: the inputs are no images or too small, or a setting is out of range.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        width: Width = 64,
        norm: Literal["batch", "group"] = "batch",
        strides: Widths = (1, 2, 2, 2),
    ):
        channels, _, _ = image_size("resnet18", input_shape, at_least=8)
        if len(strides) != 4:
            raise SettingsError(f"model resnet18: strides={list(strides)} must be 4 numbers, one per stage")
        norms = partial(norm2d, norm)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(channels, width, 3, padding=1, bias=False),
            bn1=norms(width),
            relu=nn.ReLU(inplace=True),
        )
        inputs = width
        for stage, stride in enumerate(strides, start=1):
            outputs = width * 2 ** (stage - 1)
            layers[f"layer{stage}"] = _stage(inputs, outputs, stride=stride, norms=norms)
            inputs = outputs
        layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(layers), nn.Linear(inputs, num_classes), (inputs,), num_classes)
        for module in self.body.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _stage(inputs: int, outputs: int, *, stride: int, norms: Norms) -> nn.Sequential:
    """Return two basic blocks, the first of which changes size and channels."""
    from torchvision.models.resnet import BasicBlock  # slow to import, and only used here

    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), norms(outputs))
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride, downsample, norm_layer=norms),
        BasicBlock(outputs, outputs, norm_layer=norms),
    )
