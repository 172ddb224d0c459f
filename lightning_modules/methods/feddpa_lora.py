"""FedDPA-LoRA: a common adapter and a private one, whose outputs are mixed."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.adjust import adapter_matrices
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.fusion.adapters import rank_axis
from pflsim.params import Selector


class FedDPALoRA(ClientModule):
    """Trains a private adapter in a mixture with the common one, then the common one alone (Yang et al., NeurIPS 2024).

        private: A_l and B_l of W₀x + α/r·((1 − a)·B_gA_g + a·B_lA_l)x, from the run's round 2 on
        common: A_g, B_g and the head of W₀x + α/r·B_gA_gx

    The common adapter and the head are shared. B_l starts at 0. Reported model: the mixture, as received; the global
    model has the common adapter alone.

    Args:
        net: body and head; the body has adapters.
        training: the run's local training settings; its length is that of each phase.
        share: a in [0, 1]; with 0 the method is FedAvg.

    Raises:
        SettingsError: the model has no adapters.

    Notes:
        The gradient of A_l and B_l is exact. The authors' program leaves out what passes through the output of the
        common adapter. A_l is drawn as PEFT draws A by default (Kaiming-uniform, a = √5).
    """

    lockstep = True
    token_targets = True
    reported_phase = "received"

    def __init__(self, net: Net, training: Training, *, share: Probability = 0.5):
        super().__init__(net, training)
        self.share, self.private = share, nn.ParameterDict()
        for name in (*adapter_matrices(self, "A"), *adapter_matrices(self, "B")):
            if (axis := rank_axis(name)) is not None:
                own = torch.zeros_like(self.get_parameter(name))
                self.private[name.removeprefix("net.").replace(".", "/")] = own
                if axis == 0:
                    nn.init.kaiming_uniform_(own, a=math.sqrt(5))

    def schedule(self) -> Schedule:
        """Return the phases `private` and `common`; in round 1 the second one alone."""
        return tuple(self.kept_phases()[-1 if self.round_number == 1 else 0 :])

    def kept_phases(self) -> list[Phase]:
        """Return both phases; with share=0 the second one alone."""
        private = Phase("private", objective="mixed_objective", trainable=Selector(("private",)))
        return [*([private] if self.share else []), Phase("common")]

    def mixture(self) -> dict[str, Tensor]:
        """Return the matrices of one adapter of twice the rank, [A_g; A_l] and [(1 − a)·B_g, a·B_l]."""
        common, found = dict(self.net.named_parameters()), dict[str, Tensor]()
        for key, own in self.private.items():
            name = key.replace("/", ".")
            axis = rank_axis(name) or 0
            parts = ((1 - self.share) * common[name], self.share * own) if axis else (common[name], own)
            found[name] = torch.cat(parts, axis)
        return found

    def mixed_objective(self, batch: Batch) -> Terms:
        """Return the task's loss of the mixture."""
        inputs, targets = batch
        return {self.loss_name: self.task_loss(self.predict(inputs), targets)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of the mixture."""
        return functional_call(self.net, self.mixture(), (inputs,)) if self.share else self.net(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores with the common adapter alone."""
        return self.net(inputs)
