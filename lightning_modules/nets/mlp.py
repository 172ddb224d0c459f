"""Fully connected networks."""

import math
from collections import OrderedDict

from torch import nn

from lightning_modules.nets.net import Net
from pflsim.config.validate import Widths


class Mlp(Net):
    """Fully connected layers with ReLU; inputs of any shape are flattened.

    With matching widths this is the MLP 784-100-10 of FedFCD (section 4.1.2), the DNN of 2 fully connected layers of
    pFedCFR (section IV-A) and the MNIST-NN of FedALP (section 3.1).

    Args:
        input_shape: shape of one example.
        num_classes: C.
        hidden: widths of the hidden layers; empty for softmax regression.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden: Widths = (100,)):
        width = math.prod(input_shape)
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for number, outputs in enumerate(hidden, start=1):
            layers[f"fc{number}"] = nn.Linear(width, outputs)
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
            width = outputs
        super().__init__(nn.Sequential(layers), nn.Linear(width, num_classes), (width,), num_classes)
