"""FedCP: a policy network splits features between a private and a global head."""

from copy import deepcopy
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import gumbel_softmax, normalize

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import maximum_mean_discrepancy
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.params import HEAD, Selector, second_names


class FedCP(ClientModule):
    """Minimises CE(h_i(r⊙z) + h(s⊙z), y) + λ·MMD(z, z') over body, h_i and policy (Zhang et al., KDD 2023).

    (r, s) is the softmax, over the pair of each feature, of ReLU(LayerNorm(W·(z⊙v) + b)) in R^{2D}. v is the sum of the
    rows of the private head's weight at the start of the round, scaled to length 1. The global head h is fixed during
    the round, and z' are the features of the received body. Body and policy are shared, and the next h is the mean of
    the clients' (h_i + h)/2. Reported model: personal, as received.

    Args:
        net: body and h_i.
        training: the run's local training settings.
        lam: λ ≥ 0; the authors: 5 for a CNN on MNIST.
        gumbel: whether training adds Gumbel noise to the policy's outputs before the softmax. Predictions have none.

    Notes:
        If a head has several linear layers, v is computed from the product of their weights.
    """

    shared = Selector(("net.body", "policy", "global_head"))
    equal_start = HEAD
    reported_phase = "received"
    context: Tensor

    def __init__(self, net: Net, training: Training, *, lam: NonNegative = 5.0, gumbel: bool = False):
        super().__init__(net, training)
        self.lam, self.gumbel, self.lockstep = lam, gumbel, not gumbel
        width, first = net.feature_width, next((m for m in net.head.modules() if isinstance(m, nn.Linear)), None)
        if first is None or first.in_features != width:
            raise SettingsError("method=fedcp needs a head that begins with a linear layer, of which v is computed")
        self.policy = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())
        self.global_head = deepcopy(net.head).requires_grad_(False)
        self.received = Anchor()
        self.register_buffer("context", torch.zeros(width))

    def schedule(self) -> Schedule:
        """Return one phase that trains body, private head and policy."""
        return (Phase(trainable=Selector(("net", "policy"))),)

    def receive(self, downlink: Message) -> None:
        """Load body, policy and global head, keep a copy of the body for the round, and compute v."""
        super().receive(downlink)
        body, again = self.net.body.state_dict(), second_names(self.net.body)
        self.received.store({name: value for name, value in body.items() if name not in again})
        layers = [part.weight.detach() for part in self.net.head.modules() if isinstance(part, nn.Linear)]
        rows = reduce(torch.matmul, reversed(layers), layers[-1].new_ones(len(layers[-1])))
        self.context.copy_(normalize(rows, dim=0, eps=1e-12))

    def objective(self, batch: Batch) -> Terms:
        """Return the loss of both heads together, and the distance of the features to those of the received body."""
        inputs, targets = batch
        features = self.net.body(inputs)
        terms = {self.loss_name: self.task_loss(self.decide(features, self.gumbel), targets)}
        if self.lam:
            with torch.no_grad():
                fixed = functional_call(self.net.body, self.received.tensors, (inputs,))
            terms["mmd"] = self.lam * maximum_mean_discrepancy(features.flatten(1), fixed.flatten(1))
        return terms

    def decide(self, features: Tensor, noise: bool = False) -> Tensor:
        """Return h_i(r⊙z) + h(s⊙z), [B, C], of features [B, *feature_shape]."""
        scores = self.policy(features.flatten(1) * self.context).unflatten(1, (2, -1))  # [B, 2, D]
        shares = gumbel_softmax(scores, dim=1) if noise else scores.softmax(1)
        personal, common = (share.view_as(features) * features for share in shares.unbind(1))
        return self.net.head(personal) + self.global_head(common)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the scores of both heads together."""
        return self.decide(self.net.body(inputs))

    def reply(self, shard: Shard) -> Uplink:
        """Return body and policy, and the mean of private and global head in the place of the global head."""
        uplink, own = super().reply(shard), self.net.head.state_dict()
        sent, name = uplink.weights, "global_head."
        merged = {k: (v + own[k.removeprefix(name)].cpu()) / 2 for k, v in sent.items() if k.startswith(name)}
        return replace(uplink, weights={**sent, **merged})
