"""FedPer."""

from __future__ import annotations

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.params import NET, Selector, resolve_threshold, units


class FedPer(ClientModule):
    """Base layers are averaged, the personalisation layers above them are private (Arivazhagan et al. 2019).

    All layers train together by plain SGD (Algorithm 1). Judged after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        base: K_B, how many layers (modules with parameters) are base layers, from the input on; a count, a fraction of
            them, or "body": all before the classifier (K_P = 1). All of them is FedAvg, none is Local.
    """

    lockstep = True

    def __init__(self, net: Net, training: Training, *, base: int | float | str = "body"):
        super().__init__(net, training)
        layers = units(self, NET.parameters(self), NET.buffers(self), "module")
        chosen = layers[: resolve_threshold(base, layers, name="method.base")]
        self.shared = Selector(tuple(key for layer in chosen for key in layer.keys))
