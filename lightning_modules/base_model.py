"""The base model: what the clients of a language model start from."""

from lightning_modules.base import ClientModule
from lightning_modules.phases import Schedule
from pflsim.params import NOTHING


class BaseModel(ClientModule):
    """Trains nothing and sends nothing; see `pflsim baselines`."""

    token_targets = True
    shared = NOTHING
    reported_phase = "received"

    def schedule(self) -> Schedule:
        """Return no phases."""
        return ()
