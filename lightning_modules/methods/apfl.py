"""APFL: a personal mixture of a local model and the global one."""

from copy import deepcopy

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.data.federated import Shard
from pflsim.messages import Message
from pflsim.params import Selector, load


class APFL(ClientModule):
    """Trains FedAvg's w, and v on the loss of the mixture v̄ = α·v + (1 − α)·w (Deng et al. 2020, Algorithm 1).

    On each mini-batch v ← v − η·α·∇F(v̄) and w ← w − η·∇F(w), both from the values before. With `adaptive`, a round
    starts with α ← α − η·⟨v − w, ∇F(v̄)⟩, limited to [0, 1]. Only w is shared. Reported model: v̄.

    Args:
        net: body and head of w.
        training: the run's local training settings, for both.
        alpha: α in [0, 1], the first one if it is adaptive; fixed at 1 it is Local, at 0 FedAvg's w after
            local training.
        adaptive: whether each client learns its α.

    Notes:
        - The gradient by α is that of the whole training shard, with w as received. It is 0 in round 1 with
          `init=same`.
        - Running statistics of v̄ are measured in its own forward passes.
    """

    lockstep = True
    token_targets = True
    private_steps = True
    alpha: Tensor

    def __init__(self, net: Net, training: Training, *, alpha: Probability = 0.5, adaptive: bool = True):
        super().__init__(net, training)
        self.personal, self.adaptive = deepcopy(net), adaptive
        self.private_steps = not adaptive  # the gradient by α is that of all examples
        self.register_buffer("alpha", torch.tensor(float(alpha)))

    def schedule(self) -> Schedule:
        """Return one stage in which v and w step on the same mini-batches; v first, since its step needs the old w."""
        personal = Phase("personal", objective="personal_objective", trainable=Selector(("personal",)))
        return (Alternate((personal, Phase("global")), every="batch"),)

    def join(self, downlink: Message) -> None:
        """Initialise w and v of a newcomer with the server's model."""
        self.receive(downlink)
        load(self.personal, self.net.state_dict())

    def before_training(self, shard: Shard) -> None:
        """Take the step of α, if it is adaptive."""
        if not self.adaptive:
            return
        alpha, slope = self.alpha.clone().requires_grad_(), torch.zeros_like(self.alpha)
        with evaluating(self):
            for inputs, labels in shard.train.in_turn(256):
                share = len(labels) / shard.num_examples
                slope += share * torch.autograd.grad(self.task_loss(self.mix(inputs, alpha), labels), alpha)[0]
        self.alpha.sub_(self.learning_rate(Phase()) * slope).clamp_(0, 1)

    def mixture(self, alpha: Tensor) -> dict[str, Tensor]:
        """Return the parameters of v̄ by their names in the net."""
        pairs = zip(self.personal.named_parameters(), self.net.parameters(), strict=True)
        return {name: alpha * v + (1 - alpha) * w for (name, v), w in pairs}

    def mix(self, inputs: Tensor, alpha: Tensor) -> Tensor:
        """Return scores [B, C] of v̄."""
        return functional_call(self.personal, self.mixture(alpha), (inputs,))

    def personal_objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of v̄, whose gradient by v has the factor α."""
        inputs, labels = batch
        return {self.loss_name: self.task_loss(self.mix(inputs, self.alpha), labels)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of the mixture v̄."""
        return self.mix(inputs, self.alpha)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of the global model w."""
        return self.net(inputs)
