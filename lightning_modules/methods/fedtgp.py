"""FedTGP: FedProto with global prototypes that the server trains."""

from lightning_modules.methods.fedproto import FedProto


class FedTGP(FedProto):
    """Minimises CE + λ/D·‖z − P̂_y‖² and predicts by the nearest P̂_j (Zhang et al. 2024, Algorithm 1).

    The client is FedProto's, with the same settings: it sends the class means of its features z, and receives the
    global prototypes P̂, which the server has trained. No weights are shared. Reported model: the trained net with the
    newest global prototypes.
    """
