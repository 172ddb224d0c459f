"""The relation module: how well an example's features match a class's."""

import math
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from pflsim.errors import SettingsError


class RelationModule(nn.Module):
    """Scores all pairs of an example and a class in (0, 1): g(concat(z_s, c_j)) (pFedPM eq. 13, section V).

    Feature maps go through a 3x3 convolution over both maps, concatenated along channels, and two fully connected
    layers. Flat features go through three fully connected layers over both vectors. Batch normalisation and ReLU follow
    the first layer, as in the relation network (Sung et al. 2018), and a sigmoid follows the last one.

    Args:
        feature_shape: shape of one example's features, and of a class's: [channels, height, width] or [width].
        hidden: width of the fully connected layers.

    Raises:
        SettingsError: features of another shape, or a width that is not positive.

    Notes:
        - The paper gives no widths. The convolution has as many filters as the features have channels, and keeps their
          size.
        - Without normalisation, the module of some clients converges to 0 for every pair.
        - The first layer is linear, so it is applied to examples and classes separately, and the results are added for
          each pair. This equals the layer on the concatenation, without computing it B·C times.
    """

    def __init__(self, feature_shape: tuple[int, ...], *, hidden: int = 50):
        super().__init__()
        if len(feature_shape) == 3:
            channels = feature_shape[0]
            self.first: nn.Conv2d | nn.Linear = nn.Conv2d(2 * channels, channels, 3, padding=1, bias=False)
            self.norm: nn.Module = nn.BatchNorm2d(channels)
            width = math.prod(feature_shape)
        elif len(feature_shape) == 1:
            self.first = nn.Linear(2 * feature_shape[0], hidden, bias=False)
            self.norm = nn.BatchNorm1d(hidden)
            width = hidden
        else:
            raise SettingsError(f"expected features [width] or [channels, height, width], got {feature_shape}")
        self.rest = nn.Sequential(
            nn.ReLU(), nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid()
        )

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        """Map features of examples [B, *feature_shape] and of classes [C, *feature_shape] to scores [B, C]."""
        example_weight, class_weight = self.first.weight.chunk(2, dim=1)
        maps = isinstance(self.first, nn.Conv2d)
        apply = partial(functional.conv2d, padding=1) if maps else functional.linear
        examples, means = apply(features, example_weight), apply(classes, class_weight)
        pairs = (examples[:, None] + means[None]).flatten(0, 1)  # [B·C, ...]
        # not len(), which would fix the size of the batch in an exported program
        return self.rest(self.norm(pairs)).view(features.shape[0], classes.shape[0])
