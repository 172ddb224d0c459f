"""FFA-LoRA: low-rank adapters whose matrices A stay as they are initialised."""

from typing import Literal

from lightning_modules.base import ClientModule
from lightning_modules.nets.adjust import adapter_matrices
from lightning_modules.nets.frozen import freeze
from lightning_modules.nets.net import Net
from lightning_modules.training import Training


class FFALoRA(ClientModule):
    """Trains and shares B of y = W₀x + α/r·B(A₀x) and the head (Sun et al., ICLR 2024, section 4).

    W₀ and the common initial A₀ are frozen, so the mean of the products BA₀ is the product of the mean of B and A₀. B
    starts at 0. Reported model: global.

    Args:
        net: body and head; the body has adapters.
        training: the run's local training settings.
        head: whether the head is trained and averaged ("shared") or stays as it is initialised ("frozen").

    Raises:
        SettingsError: the model has no adapters.

    Notes:
        A₀ does not travel: all clients draw it from the run's seed, or have it from the user's model.
    """

    lockstep = True
    token_targets = True
    private_steps = True
    reported_model = "global"

    def __init__(self, net: Net, training: Training, *, head: Literal["shared", "frozen"] = "shared"):
        super().__init__(net, training)
        constant = [name.removeprefix("net.") for name in adapter_matrices(self, "A")]
        freeze(net, [*constant, *(["head"] if head == "frozen" else [])])
