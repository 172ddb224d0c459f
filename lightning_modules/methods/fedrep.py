"""FedRep: a shared body, and private heads that are trained first."""

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Count
from pflsim.params import BODY, HEAD


class FedRep(ClientModule):
    """Trains the private head h on the received body φ, then the body under the new head (Collins et al. 2021, Alg. 1).

    Reported model: personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        head_epochs: τ, local epochs of the head.
        body_epochs: local epochs of the body; None: the run's local_epochs or local_steps.

    Notes:
        The body is in evaluation mode while the head trains, so its running statistics do not change.
    """

    lockstep = True
    private_steps = True
    shared = BODY

    def __init__(self, net: Net, training: Training, *, head_epochs: Count = 10, body_epochs: Count | None = None):
        super().__init__(net, training)
        self.head_epochs, self.body_epochs = head_epochs, body_epochs

    def schedule(self) -> Schedule:
        """Return the phases `head` and `body`."""
        head = Phase("head", objective="head_objective", trainable=HEAD, epochs=self.head_epochs)
        return (head, Phase("body", trainable=BODY, epochs=self.body_epochs))
