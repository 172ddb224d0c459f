"""FedRep: a shared body, and private heads that are trained first; with private parts by name, FedAlt."""

from collections.abc import Sequence

from lightning_modules.base import ClientModule
from lightning_modules.methods.fedper import parts
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
        head_epochs: τ, local epochs of the head, or of the private parameters.
        body_epochs: local epochs of the body, or of the shared parameters; None: the run's local_epochs or local_steps.
        private: the private parameters by name, instead of the head, see `lightning_modules.methods.fedper.parts`;
            FedAlt (Pillutla et al., ICML 2022). A part without parameters has no phase.

    Raises:
        SettingsError: a name of `private` is none of the model's.

    Notes:
        The body is in evaluation mode while the head trains, so its running statistics do not change. With `private`,
        the whole net is in training mode in both phases.
    """

    lockstep = True
    token_targets = True
    private_steps = True
    shared = BODY

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        head_epochs: Count = 10,
        body_epochs: Count | None = None,
        private: Sequence[str] = (),
    ):
        super().__init__(net, training)
        phases = [
            Phase("head", objective="head_objective", trainable=HEAD, epochs=head_epochs),
            Phase("body", trainable=BODY, epochs=body_epochs),
        ]
        if private:
            own, self.shared = parts(self, private)
            named = ("private", own, head_epochs), ("shared", self.shared, body_epochs)
            phases = [Phase(name, trainable=t, epochs=epochs) for name, t, epochs in named if t.parameters(self)]
        self.phases = tuple(phases)

    def schedule(self) -> Schedule:
        """Return the phases `head` and `body`, or `private` and `shared`."""
        return self.phases
