"""FedPer: shared base layers, private personalisation layers; with private parts by name, FedSim."""

from collections.abc import Sequence

from lightning_modules.base import ClientModule
from lightning_modules.nets.frozen import named
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.errors import SettingsError
from pflsim.params import NET, Selector, Threshold, resolve_threshold, units


class FedPer(ClientModule):
    """Shares the base layers and keeps the personalisation layers private (Arivazhagan et al. 2019).

    All layers train together by plain SGD (Algorithm 1). Reported model: personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        base: K_B, the number of base layers (modules with parameters) counted from the input: a count, a fraction, or
            "body" for all layers before the classifier (K_P = 1). All layers is FedAvg, none is Local.
        private: the private parameters by name, instead of `base`, see `parts`; FedSim (Pillutla et al., ICML 2022).

    Raises:
        SettingsError: a name of `private` is none of the model's, or `base` is given too.
    """

    lockstep = True
    token_targets = True
    private_steps = True

    def __init__(self, net: Net, training: Training, *, base: Threshold = "body", private: Sequence[str] = ()):
        super().__init__(net, training)
        if private:
            if base != "body":
                raise SettingsError(f"method.base={base} and method.private: give one of them")
            _, self.shared = parts(self, private)
            return
        layers = units(self, NET.parameters(self), NET.buffers(self), "module")
        chosen = layers[: resolve_threshold(base, layers, name="method.base")]
        self.shared = Selector(tuple(key for layer in chosen for key in layer.keys))


def parts(module: ClientModule, private: Sequence[str]) -> tuple[Selector, Selector]:
    """Return the private part of a client's net, and all the rest, which is shared.

    Args:
        module: the client's module.
        private: patterns of parameters, buffers or modules, as for `lightning_modules.nets.frozen.freeze`.

    Raises:
        SettingsError: a pattern names nothing.
    """
    net = module.net
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    # by tensor, since a parameter that is used twice has two names
    own = {tensors[name] for name in named(net, private, tensors, "method.private")}
    keys = [(f"net.{name}", value) for found in (net.named_parameters(), net.named_buffers()) for name, value in found]
    return (
        Selector(tuple(key for key, value in keys if value in own)),
        Selector(tuple(key for key, value in keys if value not in own)),
    )
