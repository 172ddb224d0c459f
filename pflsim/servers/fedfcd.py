"""The server of FedFCD."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pflsim.config.validate import positive
from pflsim.errors import SettingsError
from pflsim.fusion.head import labelled, passes, train_head
from pflsim.fusion.prototypes import Weighting, fuse_prototypes, keep_missing
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.seeding import torch_generator
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        head: φ_g, by the names it has on a client; empty without decision fusion.
        means: the global means C̄ with their counts, None before the first fusion and without feature alignment.
        fusions: how many there were, those of nothing too; the number of the next one's round, as the opening is
            round 0.
        seed: the run's seed.
        orders: in which order the head was trained on the class means of the last round, [passes, P]; client by client
            and class by class as they were sent, they have the numbers 0 to P−1.
    """

    head: Tensors
    means: Prototypes | None
    fusions: int
    seed: int
    orders: Tensor


class FedFCD(ServerRule[State]):
    """Trains φ_g on the clients' class means (eq. 4) and averages them class by class (eq. 5) (Li et al. 2024).

    Args:
        server_lr: η of eq. 4; the paper: 0.01.
        server_epochs: passes over the means a round.
        server_batch: means per step.
        prototype_weighting: clients' means count by their examples (eq. 5), or all the same.
        feature_alignment: whether global means are sent.
        decision_fusion: whether there is a global head.

    Notes:
        Eq. 5 as printed divides by the number of clients as well, which shrinks every prototype; here it is a mean.
        Passes and batch size are not in the paper. All clients reply before round 1 ("before training commences"), and
        the first fusion is of these replies. A client that did not report does not count, nor do its former means. A
        class that no client of a round has keeps its global mean, and without any report the head stays as it is. What
        an ablation has no use for is not sent, either way. The head takes flat features: class means have no other
        shape.
    """

    prefix: ClassVar[str] = "global_head."
    """Where the global head is in a client's module."""

    def __init__(
        self,
        *,
        server_lr: float = 0.01,
        server_epochs: int = 1,
        server_batch: int = 10,
        prototype_weighting: Weighting = "samples",
        feature_alignment: bool,
        decision_fusion: bool,
    ):
        self.lr = positive("method.server_lr", server_lr)
        self.epochs = int(positive("method.server_epochs", server_epochs))
        self.batch = int(positive("method.server_batch", server_batch))
        self.weighting: Weighting = prototype_weighting
        self.feature_alignment, self.decision_fusion = feature_alignment, decision_fusion
        self.initial_round = feature_alignment or decision_fusion
        self.architecture: nn.Module | None = None

    def init(self, federation: Federation) -> State:
        """The initial head, and no global means yet."""
        head = {key: value for key, value in federation.initial.items() if key.startswith(self.prefix)}
        if self.decision_fusion:
            self.architecture = deepcopy(federation.head)
            check_head(self.architecture, federation.feature_width, federation.num_classes)
        return State(head, None, 0, federation.seed, torch.zeros(self.epochs, 0, dtype=torch.int64))

    def downlink(self, state: State, client: int) -> Message:
        """φ_g and the global means, the same for everyone."""
        del client
        return Message(weights=state.head, prototypes=state.means if self.feature_alignment else None)

    def join(self, state: State, client: int) -> Message:
        """φ_g and the global means, as everyone is sent them."""
        return self.downlink(state, client)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """One training of the head, and the global means where they are sent."""
        after = replace(state, fusions=state.fusions + 1, orders=state.orders.new_empty(self.epochs, 0))
        sent = [up.prototypes for up in uplinks if up.prototypes is not None]
        count = sum(int((p.counts > 0).sum()) for p in sent)
        if not count:
            return after
        means = keep_missing(fuse_prototypes(sent, self.weighting), state.means) if self.feature_alignment else None
        if self.architecture is None:
            return replace(after, means=means)
        generator = torch_generator(state.seed, "global_head", round_number=state.fusions)
        orders = passes(count, self.epochs, generator)
        return replace(
            after, head=self._trained(self.architecture, state.head, sent, orders), means=means, orders=orders
        )

    def numbers(self, state: State) -> Tensors:
        """φ_g as `head/<name>` with the `order` [passes, P] it was trained in, `gfr` [C, D] with `gfr_counts` [C]: what
        there is of them.
        """
        found: dict[str, Tensor] = {f"head/{key.removeprefix(self.prefix)}": value for key, value in state.head.items()}
        if state.orders.numel():
            found["order"] = state.orders
        if state.means is not None:
            found |= {"gfr": state.means.means, "gfr_counts": state.means.counts}
        return found

    def _trained(self, net: nn.Module, head: Tensors, sent: Sequence[Prototypes], orders: Tensor) -> Tensors:
        own = {key.removeprefix(self.prefix): value for key, value in head.items()}
        trained = train_head(net, own, *labelled(sent), lr=self.lr, orders=orders, batch_size=self.batch)
        return {self.prefix + name: value for name, value in trained.items()}


def check_head(head: nn.Module | None, width: int, classes: int) -> None:
    """Hold a head to what a server that trains it on class means needs.

    Raises:
        SettingsError: it does not turn flat features [n, width] into scores [n, classes].
    """
    if head is None:
        raise SettingsError("the server trains a head of its own, but it was given none")
    head.eval()
    try:
        shape = tuple(functional_call(head, dict(head.named_parameters()), (torch.zeros(2, width),)).shape)
    except RuntimeError as error:
        shape = str(error).partition("\n")[0]
    if shape != (2, classes):
        raise SettingsError(
            f"the server trains the head on class means, which are flat: [n, {width}] should give scores "
            f"[n, {classes}], but gives {shape}; choose a model whose head flattens its features itself"
        )
