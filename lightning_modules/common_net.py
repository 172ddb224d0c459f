"""Clients that train a common net beside a net of their own."""

from torch import Tensor, nn

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.messages import Message
from pflsim.params import COMMON, load
from pflsim.types import ModelKind


class CommonNet(ClientModule):
    """Base class of methods whose clients share a net g and keep a net f, whose architecture may differ.

    g alone is sent, and it is the global model. A newcomer starts with f = g if both have the same tensors.

    Args:
        net: f.
        training: the run's local training settings.
        common: g, of the architecture `model.common`; the simulator makes it. Its initial values depend on the seed
            only, and differ from those of f. `pretrained`, `lora` and `freeze` do not change it.
    """

    common_net = True
    needs_classes = True
    shared = COMMON

    def __init__(self, net: Net, training: Training, *, common: Net):
        super().__init__(net, training)
        self.common, self._copied = common, False

    def join(self, downlink: Message) -> None:
        """Receive g, and copy it to f if both have the same tensors."""
        super().join(downlink)
        own, common = self.net.state_dict(), self.common.state_dict()
        if {key: value.shape for key, value in own.items()} == {key: value.shape for key, value in common.items()}:
            load(self.net, common)
            self._copied = True

    def replaces_body(self, downlink: Message) -> bool:
        """Return whether the message has replaced f, which is the case for a newcomer."""
        copied, self._copied = self._copied, False
        return copied

    def measured(self, model: ModelKind) -> tuple[nn.Module, ...]:
        """Return f and g, or g alone as the global model."""
        return (self.common,) if model == "global" else (self.net, self.common)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return g(x), [B, C]."""
        return self.common(inputs)
