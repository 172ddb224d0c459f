"""pFedMe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy, proximal
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.config.validate import at_least_one, positive, stable_pull
from pflsim.data.federated import Shard
from pflsim.messages import Message
from pflsim.params import load


class PFedMe(ClientModule):
    """A personal model θ near a common one w, by Moreau envelopes (T Dinh et al. 2020, eq. 7, Algorithm 1).

    On every mini-batch D, K times θ ← θ − η_p·∇_θ[F(θ; D) + λ/2·‖θ − w‖²] (eq. 7, minimised approximately), then
    w ← w − η·λ·(w − θ) (Algorithm 1, line 8). η is the run's learning rate. w travels, θ is the client's own. Judged
    by θ after local training; the global figure is w's.

    Args:
        net: body and head; its parameters are w.
        training: the run's local training settings.
        lam: λ > 0, with η_p·λ ≤ 2; large: θ stays near w.
        inner_steps: K ≥ 1.
        personal_lr: η_p > 0, the same in all rounds; at most 2/λ, beyond which the pull throws θ ever farther from w.

    Notes:
        θ starts every round from the received w, and every mini-batch from where the last one left it, as in the
        authors' experiments; the paper leaves the start open. Momentum and weight decay of the run act on w alone.
        Running statistics of normalisation layers are those of θ's forward passes and belong to θ and w alike. The loss
        terms logged are those before the last of the K steps.
    """

    def __init__(
        self, net: Net, training: Training, *, lam: float = 15.0, inner_steps: int = 5, personal_lr: float = 0.09
    ):
        super().__init__(net, training)
        self.lam, self.personal_lr = positive("method.lam", lam), positive("method.personal_lr", personal_lr)
        stable_pull("method.lam", lam, personal_lr, rate="method.personal_lr")
        self.inner_steps = at_least_one("method.inner_steps", inner_steps)
        self.theta = nn.ParameterDict({name: nn.Parameter(w.detach().clone()) for name, w in _dotless(net).items()})

    def personal(self) -> dict[str, Tensor]:
        """θ by the names, and in the order, of the net's parameters."""
        names = (name for name, _ in self.net.named_parameters())
        return {name: self.theta[key] for name, key in zip(names, _dotless(self.net), strict=True)}

    def receive(self, downlink: Message) -> None:
        """Start w and θ from the server's model."""
        super().receive(downlink)
        load(self.theta, _dotless(self.net))

    def objective(self, batch: Batch) -> Terms:
        """Cross-entropy of θ and its pull towards w (eq. 7)."""
        (inputs, labels), theta = batch, self.personal()
        scores = functional_call(self.net, theta, (inputs,))
        pairs = zip(theta.values(), self.net.parameters(), strict=True)
        return {"ce": cross_entropy(scores, labels), "prox": proximal(pairs, self.lam)}

    def gradients(self, batch: Batch, phase: Phase, parameters: Sequence[nn.Parameter]) -> Terms:
        """K steps of θ; then λ·(w − θ) as the gradient of w, that of its Moreau envelope (Algorithm 1, line 8)."""
        theta, terms = list(self.personal().values()), {}
        for _ in range(self.inner_steps):
            terms: Terms = getattr(self, phase.objective)(batch)
            found = torch.autograd.grad(torch.stack(list(terms.values())).sum(), theta)
            with torch.no_grad():
                for value, gradient in zip(theta, found, strict=True):
                    value.sub_(gradient, alpha=self.personal_lr)
        for w, value in zip(parameters, theta, strict=True):
            w.grad = self.lam * (w.detach() - value.detach())
        return {name: value.detach() for name, value in terms.items()}

    def before_evaluation(self, shard: Shard) -> None:
        """Put θ in the place of w: the personal model is θ."""
        del shard
        load(self.net, self.personal())


def _dotless(net: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters in their order, by names that a ParameterDict takes."""
    return {name.replace(".", "/"): value for name, value in net.named_parameters()}
