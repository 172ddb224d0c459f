"""FedDecomp: every weight is the sum of a shared matrix and a private one of low rank."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import CountOrZero
from pflsim.config.validate import Portion
from pflsim.data.federated import Examples
from pflsim.params import Selector
from pflsim.types import ModelKind


class FedDecomp(ClientModule):
    """Trains τ_i = c·B_iA_i, then σ, where σ + τ_i are the weights of linear and convolutional layers (Wu et al. 2024).

    σ is the net, biases and normalisation layers included, and is shared; A_i and B_i are private. B_i starts at 0.
    A weight [O, I] has A [r, I] and B [O, r]; a kernel [O, I, k, ...] is the matrix [O·k, size/(O·k)] of its entries in
    order, with r·k in place of r. Reported model: σ + τ_i, as received; the global model is σ.

    Args:
        net: body and head of σ.
        training: the run's local training settings; its length is that of σ's phase.
        personal_epochs: E_p, local epochs of τ_i; with 0 the method is FedAvg.
        shared_epochs: local epochs of σ; None: the run's local_epochs or local_steps. With 0, σ stays as it is.
        linear_rank: R_l, r = max(1, ⌊R_l·min(O, I)⌋) in linear layers; in (0, 1].
        conv_rank: R_c, the same in convolutions.
        rank_from: "min", as above, or "out", r = max(1, ⌊R_c·O⌋) in convolutions, as in the authors' program.
        scale: "program", c = 1/r in linear layers and 1/max(1, ⌊R_c·O⌋) in convolutions; or "one", as in the paper.

    Notes:
        A starts as weights do in torch (Kaiming-uniform, a = √5), as in the authors' program. Of the paper's E epochs,
        E_p train τ_i and E − E_p train σ; here the run's length is that of σ's phase alone, as in FedRep. Parameters of
        other layers, such as embeddings, have no τ_i. Running statistics change in both phases.
    """

    lockstep = True
    reported_phase = "received"

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        personal_epochs: CountOrZero = 2,
        shared_epochs: CountOrZero | None = None,
        linear_rank: Portion = 0.4,
        conv_rank: Portion = 0.6,
        rank_from: Literal["min", "out"] = "min",
        scale: Literal["program", "one"] = "program",
    ):
        super().__init__(net, training)
        self.personal_epochs, self.shared_epochs = personal_epochs, shared_epochs
        self.a, self.b, self.scales = nn.ParameterDict(), nn.ParameterDict(), dict[str, float]()
        own = dict(net.named_parameters())  # not frozen, and by their first names
        for name, layer in net.named_modules():
            if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) and f"{name}.weight" in own:
                outputs, inputs, *kernel = layer.weight.shape
                share, side = (conv_rank, kernel[0]) if kernel else (linear_rank, 1)
                rank, wide = (max(1, int(share * width)) for width in (min(outputs, inputs), outputs))
                rank = wide if kernel and rank_from == "out" else rank
                key, rows = f"{name}.weight".replace(".", "/"), outputs * side
                self.a[key] = torch.empty(rank * side, layer.weight.numel() // rows)
                self.b[key] = torch.zeros(rows, rank * side)
                self.scales[key] = 1.0 if scale == "one" else 1 / (wide if kernel else rank)
                nn.init.kaiming_uniform_(self.a[key], a=math.sqrt(5))

    def schedule(self) -> Schedule:
        """Return the phases `personal` and `shared`, without those of no epochs."""
        personal = Phase("personal", trainable=Selector(("a", "b")), epochs=self.personal_epochs)
        return tuple(p for p in (personal, Phase("shared", epochs=self.shared_epochs)) if p.epochs != 0)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters of the net, with σ + c·BA for those that have a private part."""
        found: dict[str, Tensor] = dict(self.net.named_parameters())
        for key, scale in self.scales.items():
            shared = found[name := key.replace("/", ".")]
            private = (scale * (self.b[key] @ self.a[key])).reshape(shared.shape)
            found[name] = torch.empty_like(shared).copy_(private).add_(shared)  # with the strides of σ
        return found

    def objective(self, batch: Batch) -> Terms:
        """Return the task's loss of σ + τ_i."""
        inputs, targets = batch
        return {self.loss_name: self.task_loss(self.predict(inputs), targets)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of σ + τ_i."""
        return functional_call(self.net, self.weights(), (inputs,))

    def recalibrate(self, examples: Examples, model: ModelKind = "personal", batch_size: int = 256) -> None:
        """With `buffers=recalibrate`, measure the running statistics of σ + τ_i, or of σ for the global model."""
        shared, weights = dict(self.net.named_parameters()), self.weights() if model == "personal" else {}
        kept = {name: shared[name].data for name in weights}
        for name, value in weights.items():
            shared[name].data = value.detach()
        super().recalibrate(examples, model, batch_size)
        for name, value in kept.items():
            shared[name].data = value

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of σ."""
        return self.net(inputs)
