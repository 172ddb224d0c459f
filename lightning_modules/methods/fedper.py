"""FedPer: shared base layers, private personalisation layers."""

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.params import NET, Selector, Threshold, resolve_threshold, units


class FedPer(ClientModule):
    """Shares the base layers and keeps the personalisation layers private (Arivazhagan et al. 2019).

    All layers train together by plain SGD (Algorithm 1). Reported model: personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        base: K_B, the number of base layers (modules with parameters) counted from the input: a count, a fraction, or
            "body" for all layers before the classifier (K_P = 1). All layers is FedAvg, none is Local.
    """

    lockstep = True
    private_steps = True

    def __init__(self, net: Net, training: Training, *, base: Threshold = "body"):
        super().__init__(net, training)
        layers = units(self, NET.parameters(self), NET.buffers(self), "module")
        chosen = layers[: resolve_threshold(base, layers, name="method.base")]
        self.shared = Selector(tuple(key for layer in chosen for key in layer.keys))
