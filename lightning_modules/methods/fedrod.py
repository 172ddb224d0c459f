"""FedRoD: a generic head trained by the balanced softmax, and a personal head on top of it."""

from copy import deepcopy

import torch
from torch import Tensor

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.params import Selector


class FedRoD(ClientModule):
    """Trains body and generic head ψ by the balanced softmax, and a personal head φ_i on both (Chen and Chao 2022).

    With features z and the client's class counts n_c, the losses are CE(ψ(z) + log n, y) for the body and ψ, and
    CE(ψ(z) + φ_i(z), y) for φ_i alone. Body and ψ are shared. Reported model: personal, ψ(z) + φ_i(z), after local
    training; the global model is ψ(z).

    Args:
        net: body and ψ.
        training: the run's local training settings.

    Raises:
        SettingsError: the head is frozen.

    Notes:
        - Both losses are computed from the same values, and one step minimises both.
        - The generic loss gives probability 0 to a class that the client does not have, so ψ's weights of this class
          get no gradient.
        - φ_i is a head like ψ and starts with its values. The paper also has a variant in which a hypernetwork makes
          φ_i.
    """

    lockstep = True
    needs_classes = True

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self.personal = deepcopy(net.head)
        if not [*self.personal.parameters()]:
            raise SettingsError("method=fedrod: φ_i would not train, because the model's head is frozen; freeze less")
        self.prior = Anchor()

    def schedule(self) -> Schedule:
        """Return one phase that trains the net and φ_i."""
        return (Phase(trainable=Selector(("net", "personal"))),)

    def before_training(self, shard: Shard) -> None:
        """Store the logarithms of the client's class counts; −∞ for a class that it does not have."""
        counts = torch.bincount(shard.train.y, minlength=self.net.num_classes)
        self.prior.store({"log_counts": counts.to(next(self.net.parameters()).dtype).log()})

    def objective(self, batch: Batch) -> Terms:
        """Return the balanced softmax loss of ψ, and the cross-entropy of φ_i on fixed features and logits of ψ."""
        inputs, labels = batch
        features = self.net.body(inputs)
        generic, personal = self.net.head(features), self.personal(features.detach())
        return {
            "generic": self.task_loss(generic + self.prior.tensors["log_counts"], labels),
            "personal": self.task_loss(generic.detach() + personal, labels),
        }

    def predict(self, inputs: Tensor) -> Tensor:
        """Return ψ(z) + φ_i(z), [B, C]."""
        features = self.net.body(inputs)
        return self.net.head(features) + self.personal(features)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return ψ(z), [B, C]."""
        return self.net(inputs)
