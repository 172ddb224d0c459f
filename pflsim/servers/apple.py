"""The server of APPLE: the newest core model of each client, which all clients receive."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.fusion.layerwise import stack
from pflsim.messages import Message, Uplink, packed
from pflsim.params import snapshot
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors

CORE, START = "core/", "p_0"
"""Key prefix in downlinks, core/<j>/<key>, and the key of p_0."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        cores: w_j of each client.
        start: p_0 [N], n_j/n.
    """

    cores: tuple[Tensors, ...]
    start: Tensor


class APPLE(ServerRule[State]):
    """Keeps the core models and sends all of them to every client (Luo and Wu, IJCAI 2022).

    Notes:
        All core models start with the run's initial values. That of an absent client stays.
    """

    def init(self, federation: Federation) -> State:
        """Return the state with equal core models."""
        sizes = torch.tensor([client.num_examples for client in federation.clients], dtype=torch.float64)
        cores = (dict(federation.initial),) * len(sizes)
        return State(cores, (sizes / sizes.sum()).to(federation.dtype))

    def downlink(self, state: State, client: int) -> Message:
        """Send the core models as `core/<j>/<key>`, and p_0."""
        return Message(extra={**packed(dict(enumerate(state.cores)), CORE), START: state.start})

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Send the same message to all clients."""
        return dict.fromkeys(clients, self.downlink(state, -1))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Replace the core models of the clients of the round."""
        new = {uplink.client: snapshot(uplink.weights) for uplink in uplinks}
        return replace(state, cores=tuple(new.get(client, core) for client, core in enumerate(state.cores)))

    def numbers(self, state: State) -> Tensors:
        """Return `p_0` [N] and the core models `core/<key>` [N, *shape]."""
        return {START: state.start} | {f"core/{key}": stack(state.cores, key) for key in state.cores[0]}
