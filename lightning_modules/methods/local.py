"""Local: every client trains alone."""

from lightning_modules.base import ClientModule
from pflsim.params import NOTHING


class Local(ClientModule):
    """Trains by plain SGD on the client's own data; nothing is sent or received."""

    lockstep = True
    token_targets = True
    private_steps = True
    shared = NOTHING
