"""SCAFFOLD: control variates correct the drift of the clients."""

from dataclasses import replace

from lightning_modules.anchor import Anchor, Memory
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import inner_product
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import snapshot


class Scaffold(ClientModule):
    """Takes steps y ← y − η·(∇F(y) − c_i + c) from the received x (Karimireddy et al. 2020, Algorithm 1).

    After K steps c_i⁺ = c_i − c + (x − y)/(K·η) (option II). c is received beside x. The client sends y and
    Δc = c_i⁺ − c_i. Reported model: global.

    Args:
        net: body and head.
        training: the run's local training settings, without momentum and weight decay.

    Notes:
        - The correction is the gradient of the loss term ⟨c − c_i, y⟩, which is logged as `control`.
        - A client sends y instead of y − x: the server knows x, and the number of bytes is the same.
        - Running statistics of normalisation layers have no control variates. c_i stays if a client takes no step.
    """

    lockstep = True
    token_targets = True
    reported_model = "global"

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        training.require_plain_sgd("scaffold")
        self.control = Memory(self, self.shared_parameters())
        self.received, self.correction = Anchor(self.shared_parameters()), Anchor()

    def receive(self, downlink: Message) -> None:
        """Load x, and store c − c_i for the round."""
        super().receive(downlink)
        self.correction.store({name: downlink.extra[name] - own for name, own in self.control.tensors.items()})

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy and the term whose gradient is c − c_i."""
        return {**super().objective(batch), "control": inner_product(self.correction.pairs(self))}

    def reply(self, shard: Shard) -> Uplink:
        """Update c_i, and return y and Δc."""
        own, correction = self.control.tensors, self.correction.tensors
        length = self.steps_taken * self.learning_rate(Phase())
        new = dict(own)
        if length:
            moved = {name: x - self.get_parameter(name).detach() for name, x in self.received.tensors.items()}
            new = {name: value / length - correction[name] for name, value in moved.items()}
        changes = snapshot({name: new[name] - value for name, value in own.items()})
        self.control.update(new)
        return replace(super().reply(shard), extra=changes)
