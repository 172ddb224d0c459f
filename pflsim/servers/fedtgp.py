"""The server of FedTGP: trains global prototypes on the clients' class means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot, relu

from pflsim.config.settings import Count
from pflsim.config.validate import NonNegative, Positive
from pflsim.fusion.prototypes import descend, fuse_prototypes, keep_missing, labelled, passes
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.params import snapshot
from pflsim.seeding import seeded_global, torch_generator
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        net: the parameters that generate the prototypes, see `generated`.
        prototypes: P̂ [C, D] and counts [C]; the count of a class is 0 until a client reports it.
        margin: δ of the last fusion, a scalar.
        fusions: the number of fusions so far, including those without uplinks, and so the next one's round (from 0).
        seed: the run's seed.
    """

    net: Tensors
    prototypes: Prototypes
    margin: Tensor
    fusions: int
    seed: int


class FedTGP(ServerRule[State]):
    """Trains global prototypes with an adaptive margin (Zhang et al. 2024, Algorithm 1).

        minimise −log softmax_j(−d_j − δ·1[j = y])_y over the uploaded pairs (P, y), with d_j = ‖P − P̂_j‖₂

    P̂_j is a network's output for the learnt embedding of class j: linear, ReLU, linear. δ is the largest distance of a
    class to the nearest other class, between the means of the round's uploads, and at most τ.

    Args:
        max_margin: τ ≥ 0.
        server_lr: learning rate of the network and the embeddings; the authors: that of the clients, 0.01.
        server_epochs: passes over the pairs per round; the authors: 100.
        server_batch: pairs per step; the authors: 10.
        server_hidden: width of the hidden layer; None: D, as the authors'.

    Notes:
        - The softmax is over all classes. Only prototypes of classes that a client has reported are sent.
        - In a round with a single class δ is τ, as in the authors' program.
        - The means of a class over clients are uniform; every pair counts the same. A client that does not report has
          no pairs in the round. A round without uplinks changes nothing.
        - The seed determines the initial network and the order of the pairs.
    """

    def __init__(
        self,
        *,
        max_margin: NonNegative = 100.0,
        server_lr: Positive = 0.01,
        server_epochs: Count = 100,
        server_batch: Count = 10,
        server_hidden: Count | None = None,
    ):
        self.max_margin, self.lr, self.epochs = max_margin, server_lr, server_epochs
        self.batch, self.hidden = server_batch, server_hidden

    def init(self, federation: Federation) -> State:
        """Return the state with a new network and no prototypes."""
        classes, width = federation.num_classes, federation.feature_width
        hidden = self.hidden or width
        with seeded_global(federation.seed, "global_prototypes"):
            layers = {"in": nn.Linear(width, hidden), "out": nn.Linear(hidden, width)}
            net = nn.ModuleDict({"embeddings": nn.Embedding(classes, width), **layers}).to(federation.dtype)
        none = Prototypes(torch.zeros(classes, width, dtype=federation.dtype), torch.zeros(classes, dtype=torch.int64))
        return State(snapshot(dict(net.named_parameters())), none, torch.zeros(()), 0, federation.seed)

    def downlink(self, state: State, client: int) -> Message:
        """Send the global prototypes."""
        return Message(prototypes=state.prototypes)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Train the network on the received class means and generate the prototypes."""
        updated = replace(state, fusions=state.fusions + 1)
        sent = [u.prototypes for u in uplinks if u.prototypes is not None]
        if not sent:
            return updated
        points, labels = labelled(sent)
        margin = adaptive_margin(fuse_prototypes(sent, "uniform"), self.max_margin)
        orders = passes(len(labels), self.epochs, torch_generator(state.seed, "global_prototypes", -1, state.fusions))

        def loss(net: Tensors, index: Tensor) -> Tensor:
            return margin_loss(points[index], labels[index], generated(net), margin)

        net = descend(state.net, loss, lr=self.lr, orders=orders, batch_size=self.batch)
        counts = keep_missing(fuse_prototypes(sent), state.prototypes).counts
        return replace(updated, net=net, prototypes=Prototypes(generated(net), counts), margin=margin)

    def numbers(self, state: State) -> Tensors:
        """Return `gfr` [C, D] and `gfr_counts` [C], the prototypes, and `margin`."""
        return {"gfr": state.prototypes.means, "gfr_counts": state.prototypes.counts, "margin": state.margin}


def generated(net: Tensors) -> Float[Tensor, "C D"]:
    """Return the prototypes of all classes: out(ReLU(in(embeddings)))."""
    hidden = relu(linear(net["embeddings.weight"], net["in.weight"], net["in.bias"]))
    return linear(hidden, net["out.weight"], net["out.bias"])


def margin_loss(
    points: Float[Tensor, "B D"],
    labels: Int[Tensor, " B"],
    prototypes: Float[Tensor, "C D"],
    margin: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """Return the mean of −log softmax_j(−‖P − P̂_j‖ − δ·1[j = y])_y."""
    # matrix multiplication loses small distances to rounding
    distances = torch.cdist(points, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    return cross_entropy(-distances - margin * one_hot(labels, len(prototypes)), labels)


def adaptive_margin(means: Prototypes, most: float) -> Float[Tensor, ""]:
    """Return δ = min(τ, max_c min_{c' ≠ c} ‖Q_c − Q_c'‖₂) over the classes that have a mean Q; τ for a single class."""
    held = means.means[means.counts > 0]
    distances = torch.cdist(held, held, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    return distances.amin(1).max().clamp(max=most)
