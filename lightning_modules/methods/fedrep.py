"""FedRep."""

from __future__ import annotations

import torch

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy
from lightning_modules.modes import evaluating
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.validate import at_least_one
from pflsim.errors import SettingsError
from pflsim.params import BODY, HEAD


class FedRep(ClientModule):
    """First the private head h on the received body φ, then the body under the new head (Collins et al. 2021, Alg. 1).

    Judged after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        head_epochs: τ, local epochs of the head.
        body_epochs: local epochs of the body; None: the run's local_epochs or local_steps.

    Notes:
        While the head trains, the body is φ and nothing else: in evaluation mode, so that neither its running
        statistics nor its parameters move.
    """

    lockstep = True
    shared = BODY

    def __init__(self, net: Net, training: Training, *, head_epochs: int = 10, body_epochs: int | None = None):
        super().__init__(net, training)
        self.head_epochs = at_least_one("method.head_epochs", head_epochs)
        self.body_epochs = None if body_epochs is None else at_least_one("method.body_epochs", body_epochs)
        if not BODY.parameters(self):
            raise SettingsError(
                "fedrep trains the body apart from the head, and this model's body has no parameters: take another, "
                "for example with more in model.hidden"
            )

    def schedule(self) -> Schedule:
        """The head, then the body."""
        head = Phase("head", objective="head_objective", trainable=HEAD, epochs=self.head_epochs)
        return (head, Phase("body", trainable=BODY, epochs=self.body_epochs))

    def head_objective(self, batch: Batch) -> Terms:
        """Cross-entropy on features of the fixed body."""
        inputs, labels = batch
        with torch.no_grad(), evaluating(self.net.body):
            features = self.net.body(inputs)
        return {"ce": cross_entropy(self.net.head(features), labels)}
