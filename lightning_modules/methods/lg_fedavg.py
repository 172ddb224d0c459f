"""LG-FedAvg: private bodies, a shared head."""

from lightning_modules.base import ClientModule
from pflsim.params import HEAD


class LGFedAvg(ClientModule):
    """Keeps the body private and shares the head; both train together by plain SGD (Liang et al. 2020, Algorithm 1).

    Reported model: as received, the client's body with the averaged head, as in the authors' program.
    """

    lockstep = True
    private_steps = True
    reported_phase = "received"
    shared = HEAD
