"""The server of FedFCD."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pflsim.config.settings import Count
from pflsim.config.validate import Positive
from pflsim.errors import SettingsError
from pflsim.fusion.prototypes import Weighting, fuse_prototypes, keep_missing, labelled, passes, train_head
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.seeding import torch_generator
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        head: φ_g by the names of the client's module; empty without decision fusion.
        means: the global class means C̄ with their counts; None before the first fusion and without feature alignment.
        fusions: the number of fusions so far, including those without uplinks, and so the next one's round (from 0).
        seed: the run's seed.
        orders: [passes, P] the order of class means in the last training of the head. Means are numbered 0 to P−1 by
            client, then by class.
    """

    head: Tensors
    means: Prototypes | None
    fusions: int
    seed: int
    orders: Tensor


class FedFCD(ServerRule[State]):
    """Trains φ_g on the clients' class means (eq. 4) and averages them per class (eq. 5) (Li et al. 2024).

    Args:
        server_lr: η of eq. 4; the paper: 0.01.
        server_epochs: passes over the class means per round.
        server_batch: class means per step.
        prototype_weighting: weights of the clients' means: samples (eq. 5), uniform, or eq. 5 as printed.
        feature_alignment: whether to send global class means.
        decision_fusion: whether to train a global head.

    Notes:
        Eq. 5 as printed also divides by the number of clients, which shrinks each prototype; this computes a mean.
        The paper states no passes and no batch size. All clients reply before round 1 ("before training commences"),
        and the first fusion uses these replies. A client that does not report does not count, nor do its previous
        means. A class that no client of a round has keeps its global mean. Without uplinks the head is unchanged. An
        ablation transfers only what it uses. The head must accept flat features, since class means are flat.
    """

    prefix: ClassVar[str] = "global_head."
    """Prefix of the global head's keys in a client's module."""

    def __init__(
        self,
        *,
        server_lr: Positive = 0.01,
        server_epochs: Count = 1,
        server_batch: Count = 10,
        prototype_weighting: Weighting = "samples",
        feature_alignment: bool,
        decision_fusion: bool,
    ):
        self.lr, self.epochs, self.batch = server_lr, server_epochs, server_batch
        self.weighting: Weighting = prototype_weighting
        self.feature_alignment, self.decision_fusion = feature_alignment, decision_fusion
        self.initial_round = feature_alignment or decision_fusion
        self.architecture: nn.Module | None = None

    def init(self, federation: Federation) -> State:
        """Return the state with the initial head and no global means."""
        head = {key: value for key, value in federation.initial.items() if key.startswith(self.prefix)}
        if self.decision_fusion:
            self.architecture = deepcopy(federation.head).eval()
            scores = (2, federation.num_classes)
            flat = torch.zeros(2, federation.feature_width, dtype=federation.dtype)
            try:
                found = tuple(self.architecture(flat).shape)
            except RuntimeError as error:
                found = error
            if found != scores:
                raise SettingsError(
                    f"FedFCD trains the head on flat class means [n, {federation.feature_width}]: expected scores "
                    f"{scores}, got {found}; choose a model whose head flattens its features itself"
                )
        return State(head, None, 0, federation.seed, torch.zeros(self.epochs, 0, dtype=torch.int64))

    def downlink(self, state: State, client: int) -> Message:
        """Send φ_g and the global class means."""
        return Message(weights=state.head, prototypes=state.means if self.feature_alignment else None)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Train the head on the received class means, and fuse the means if feature alignment is on."""
        updated = replace(state, fusions=state.fusions + 1, orders=state.orders.new_empty(self.epochs, 0))
        sent = [up.prototypes for up in uplinks if up.prototypes is not None]
        count = sum(int((p.counts > 0).sum()) for p in sent)
        if not count:
            return updated
        means = keep_missing(fuse_prototypes(sent, self.weighting), state.means) if self.feature_alignment else None
        if self.architecture is None:
            return replace(updated, means=means)
        generator = torch_generator(state.seed, "global_head", round_number=state.fusions)
        orders = passes(count, self.epochs, generator)
        own = {key.removeprefix(self.prefix): value for key, value in state.head.items()}
        trained = train_head(self.architecture, own, *labelled(sent), lr=self.lr, orders=orders, batch_size=self.batch)
        head = {self.prefix + name: value for name, value in trained.items()}
        return replace(updated, head=head, means=means, orders=orders)

    def numbers(self, state: State) -> Tensors:
        """Return φ_g as `head/<name>`, its training `order` [passes, P], `gfr` [C, D] and `gfr_counts` [C], if any."""
        found: dict[str, Tensor] = {f"head/{key.removeprefix(self.prefix)}": value for key, value in state.head.items()}
        if state.orders.numel():
            found["order"] = state.orders
        if state.means is not None:
            found |= {"gfr": state.means.means, "gfr_counts": state.means.counts}
        return found
