"""The server of FedFomo: sends clients the models of other clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.config.settings import Count, Probability
from pflsim.config.validate import NonNegative
from pflsim.messages import Message, Uplink, packed, unpacked
from pflsim.params import snapshot
from pflsim.seeding import numpy_generator
from pflsim.servers.base import Federation, ServerRule, between_clients
from pflsim.types import Matrix, Tensors

CANDIDATE, USEFULNESS = "candidate/", "usefulness/"
"""Key prefixes: candidate/<client>/<key> in downlinks, and usefulness/<n> for u_n in uplinks."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        table: the last model of each client that has reported, by id.
        affinity: P [N, N] float64, receivers as rows.
        rounds: the rounds so far, including those without uplinks.
        seed: the run's seed.
    """

    table: Mapping[int, Tensors]
    affinity: Tensor
    rounds: int
    seed: int


class FedFomo(ServerRule[State]):
    """Sends each client up to M models of others, chosen by its row of P with ε-greedy exploration (Zhang et al. 2021).

    Each of the M candidates is drawn at random with probability ε_t, else it is the one with the highest P_in.
    ε_t = max(0, ε − d·t) after t rounds. P_in grows by u_n, which client i reports for candidate n (section 3).

    Args:
        models: M ≥ 1, the maximum number of models sent to a client; the paper: 5.
        epsilon: ε in [0, 1]; the authors: 0.3.
        epsilon_decay: d ≥ 0, subtracted from ε after each round; the authors: 0.05.

    Notes:
        Candidates are the last models of all other clients that have reported in any round. The row of P of a client
        that does not report is unchanged; ε decays in every round. Ties in P_in are broken at random. P starts as the
        identity; its diagonal is not used.
    """

    def __init__(self, *, models: Count = 5, epsilon: Probability = 0.3, epsilon_decay: NonNegative = 0.05):
        self.models, self.epsilon, self.epsilon_decay = models, epsilon, epsilon_decay

    def init(self, federation: Federation) -> State:
        """Return the state without models."""
        return State({}, torch.eye(len(federation.clients), dtype=torch.float64), 0, federation.seed)

    def downlink(self, state: State, client: int) -> Message:
        """Send the candidates as `candidate/<client>/<key>`, ordered by id."""
        return Message(extra=packed({n: state.table[n] for n in self.choose(state, client)}, CANDIDATE))

    def choose(self, state: State, client: int) -> list[int]:
        """Return the ids of a client's candidates, ascending. The result is a function of the state."""
        generator = numpy_generator(state.seed, "candidates", client, state.rounds)
        left = [int(n) for n in generator.permutation([n for n in state.table if n != client])]
        chosen: list[int] = []
        known = client < len(state.affinity)
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * state.rounds) if known else 1.0
        while left and len(chosen) < self.models:
            at_random = generator.random() < epsilon
            best = left[0] if at_random else max(left, key=lambda n: float(state.affinity[client, n]))
            left.remove(best)
            chosen.append(best)
        return sorted(chosen)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Store the new models, and add the reported usefulness of candidates to P."""
        table = dict(sorted({**state.table, **{u.client: snapshot(u.weights) for u in uplinks}}.items()))
        affinity = state.affinity.clone()
        for up in uplinks:
            for name, value in up.numbers.items():
                affinity[up.client, int(name.removeprefix(USEFULNESS))] += value
        return State(table, affinity, state.rounds + 1, state.seed)

    def numbers(self, state: State) -> Tensors:
        """Return `affinity` [N, N]."""
        return {"affinity": state.affinity}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return P."""
        return between_clients(self.numbers(state), "affinity", "Affinities P")


def candidates(message: Message) -> dict[int, dict[str, Tensor]]:
    """Return the candidates of a message by client and key."""
    return unpacked(message, CANDIDATE)
