"""CFL: one model per cluster of clients whose updates point the same way."""

from lightning_modules.methods.fesem import FeSEM


class CFL(FeSEM):
    """Trains the model of the client's cluster, as FedAvg does (Sattler, Müller, Samek 2021).

    Reported model: as received, the cluster's model.

    Notes:
        The client sends the trained weights instead of their change. The server knows what it sent, and the number of
        bytes is the same. A newcomer chooses among the models as in FeSEM.
    """
