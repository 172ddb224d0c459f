"""The server of FedFomo: passes clients' models on to clients that have a use for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.config.validate import at_least_one, non_negative
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink, packed, unpacked
from pflsim.params import snapshot
from pflsim.seeding import numpy_generator
from pflsim.servers.base import Federation, ServerRule, between_clients
from pflsim.types import Matrix, Tensors

CANDIDATE, USEFULNESS = "candidate/", "usefulness/"
"""Tensors of a candidate in a downlink are candidate/<client>/<key>, u_n in an uplink is usefulness/<n>."""


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        table: the last model of every client that has reported, by id.
        affinity: P [N, N] float64, row: the receiver.
        rounds: so far, those without any uplink too.
        seed: the run's seed.
    """

    table: Mapping[int, Tensors]
    affinity: Tensor
    rounds: int
    seed: int


class FedFomo(ServerRule[State]):
    """Sends every client up to M models of others, by its row of P with ε-greedy exploration (Zhang et al. 2021).

    For each of the M places: with probability ε_t one of the others at random, else the one with the highest P_in;
    ε_t = max(0, ε − d·t) after t rounds. P_in grows by u_n, which client i reports of candidate n (section 3).

    Args:
        models: M ≥ 1, the most models that a client is sent; the paper: 5.
        epsilon: ε in [0, 1]; the authors: 0.3.
        epsilon_decay: d ≥ 0, taken off ε after every round; the authors: 0.05.

    Notes:
        A client is sent the last models of any who have reported, not only those of the last round; never its own. A
        client that did not report is offered with its former model, or not at all if it never has, and its row of P
        stays; ε goes by the rounds, those without uplinks too.
        Of equal P_in one is chosen at random. P starts as the identity; its diagonal is not used.
    """

    def __init__(self, *, models: int = 5, epsilon: float = 0.3, epsilon_decay: float = 0.05):
        if not 0 <= epsilon <= 1:
            raise SettingsError(f"method.epsilon={epsilon} must be in [0, 1]: it is a probability")
        self.models, self.epsilon = at_least_one("method.models", models), epsilon
        self.epsilon_decay = non_negative("method.epsilon_decay", epsilon_decay)

    def init(self, federation: Federation) -> State:
        """No models yet."""
        return State({}, torch.eye(len(federation.clients), dtype=torch.float64), 0, federation.seed)

    def downlink(self, state: State, client: int) -> Message:
        """The candidates as `candidate/<client>/<key>`, in the order of the ids."""
        return _message(state, self.choose(state, client))

    def join(self, state: State, client: int) -> Message:
        """M candidates at random: nothing is known of a newcomer."""
        return _message(state, self.choose(state, client))

    def models_sent(self, joining: bool = False) -> int:
        """M."""
        del joining
        return self.models

    def choose(self, state: State, client: int) -> list[int]:
        """Whose models a client is sent, ascending; the same for a state, however often it is asked."""
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
        """The new models into the table, what clients say of their candidates into P."""
        table = dict(sorted({**state.table, **{u.client: snapshot(u.weights) for u in uplinks}}.items()))
        affinity = state.affinity.clone()
        for up in uplinks:
            for name, value in up.numbers.items():
                affinity[up.client, int(name.removeprefix(USEFULNESS))] += value
        return State(table, affinity, state.rounds + 1, state.seed)

    def numbers(self, state: State) -> Tensors:
        """`affinity` [N, N]."""
        return {"affinity": state.affinity}

    def diagnostics(self, state: State) -> list[Matrix]:
        """The same weights, to look at."""
        return between_clients(self.numbers(state), "affinity", "Affinities P")


def _message(state: State, chosen: Sequence[int]) -> Message:
    return Message(extra=packed({n: state.table[n] for n in chosen}, CANDIDATE))


def candidates(message: Message) -> dict[int, dict[str, Tensor]]:
    """The candidates of a message, by client and key."""
    return unpacked(message, CANDIDATE)
