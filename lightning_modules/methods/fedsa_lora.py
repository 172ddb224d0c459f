"""FedSA-LoRA: shared matrices A of low-rank adapters, private matrices B."""

from lightning_modules.base import ClientModule
from lightning_modules.nets.adjust import adapter_matrices
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.params import Selector


class FedSALoRA(ClientModule):
    """Trains A and B of y = W₀x + α/r·B(Ax) and the head, and shares A (Guo et al., ICLR 2025, section 4).

    W₀ is frozen. All B, which start at 0, and the head are private. Reported model: personal, after local training.

    Args:
        net: body and head; the body has adapters.
        training: the run's local training settings.

    Raises:
        SettingsError: the model has no adapters.

    Notes:
        The paper speaks of A and B only. The head is private, as in the authors' settings for GLUE.
    """

    lockstep = True
    token_targets = True
    private_steps = True

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self.shared = Selector(adapter_matrices(self, "A"))
