"""FedAvg: one model, averaged over the clients."""

from lightning_modules.base import ClientModule


class FedAvg(ClientModule):
    """Trains the server's model by plain SGD (McMahan et al. 2017, Algorithm 1).

    Reported model: global.
    """

    lockstep = True
    token_targets = True
    private_steps = True
    reported_model = "global"
