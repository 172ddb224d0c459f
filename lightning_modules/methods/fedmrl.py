"""FedMRL: a common net and the client's own share a projection of their features, at two widths."""

import torch
from torch import Tensor, nn

from lightning_modules.base import Batch, Terms
from lightning_modules.common_net import CommonNet
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.errors import SettingsError
from pflsim.params import Selector
from pflsim.seeding import seeded_global


class FedMRL(CommonNet):
    """Minimises CE(h_f(r), y) + CE(h_g(r_{1..d₁}), y) with r = P[z_g; z_f] + b in R^{d₂} (Yi et al., NeurIPS 2024).

    z_f in R^{d₂} are the features of the client's own net f, z_g in R^{d₁} those of the common net g, with d₁ ≤ d₂; h_f
    and h_g are their heads. g alone is shared. Reported model: h_f(r), after local training; the global model is g.

    Args:
        net: f.
        training: the run's local training settings.
        common: g, see `CommonNet`.

    Raises:
        SettingsError: g has more features than f.

    Notes:
        P and b start as torch draws a linear layer, with equal values at all clients of the same widths.
    """

    lockstep = True

    def __init__(self, net: Net, training: Training, *, common: Net):
        super().__init__(net, training, common=common)
        width, least = net.feature_width, common.feature_width
        if least > width:
            raise SettingsError(
                f"method=fedmrl: the common net (model.common, by default model) has {least} features, more than the "
                f"{width} of model or of an entry of model.variants; set model.common with at most {width}"
            )
        with seeded_global(training.seed, "projection"):  # whatever the nets have drawn before
            self.projection = nn.Linear(least + width, width)

    def schedule(self) -> Schedule:
        """Return one phase that trains both nets and the projection."""
        return (Phase(trainable=Selector(("net", "common", "projection"))),)

    def joined(self, inputs: Tensor) -> Tensor:
        """Return r, [B, d₂]."""
        return self.projection(torch.cat([net.body(inputs).flatten(1) for net in (self.common, self.net)], 1))

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of both heads."""
        inputs, labels = batch
        r = self.joined(inputs)
        common = _head(self.common, r[:, : self.common.feature_width])
        return {
            self.loss_name: self.task_loss(_head(self.net, r), labels),
            f"common_{self.loss_name}": self.task_loss(common, labels),
        }

    def predict(self, inputs: Tensor) -> Tensor:
        """Return h_f(r), [B, C]."""
        return _head(self.net, self.joined(inputs))


def _head(net: Net, features: Tensor) -> Tensor:
    return net.head(features.reshape(-1, *net.feature_shape))
