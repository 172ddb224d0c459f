"""The server of FD: the newest table of each client, and the mean of the others'."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.messages import Message, Prototypes, Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The mean outputs that clients have sent last.

    Args:
        tables: [N, C, C], by client and label; 0 where there are none.
        held: [N, C], whether the client has ever sent some for the label.
    """

    tables: Tensor
    held: Tensor


class FD(ServerRule[State]):
    """T_i[c] = the mean over the clients j ≠ i that have sent mean outputs for label c, with equal weights.

    Notes:
        Each client counts with what it has sent last, also if it was absent since. A newcomer gets the mean of all.
    """

    def init(self, federation: Federation) -> State:
        """Return the state without tables."""
        size, classes = len(federation.clients), federation.num_classes
        tables = torch.zeros(size, classes, classes, dtype=federation.dtype)
        return State(tables, torch.zeros(size, classes, dtype=torch.bool))

    def downlink(self, state: State, client: int) -> Message:
        """Send the means of the others [C, C] with the number of clients behind each [C]."""
        others = torch.arange(len(state.held)) != client  # all, if the client is unknown
        counts = state.held[others].sum(0)
        means = state.tables[others].double().sum(0) / counts.clamp(min=1)[:, None]
        return Message(prototypes=Prototypes(means.to(state.tables.dtype), counts))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Replace what the clients of the round have sent before; labels that they lack keep their row."""
        tables, held = state.tables.clone(), state.held.clone()
        for uplink in uplinks:
            if uplink.prototypes is None:
                raise ValueError(f"client {uplink.client} sent no mean outputs")
            sent = uplink.prototypes.counts > 0
            tables[uplink.client, sent] = uplink.prototypes.means[sent]
            held[uplink.client] |= sent
        return State(tables, held)

    def numbers(self, state: State) -> Tensors:
        """Return `outputs` [N, C, C] and `held` [N, C]."""
        return {"outputs": state.tables, "held": state.held}
