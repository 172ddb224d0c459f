"""What the round loop needs of whatever runs the clients: the Executor protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.errors import RunError
from pflsim.messages import Message, Uplink
from pflsim.types import EvalRow, Split, Tensors, TrainReport

Handle = TypeVar("Handle")
"""Stands for messages that live elsewhere: an object reference under Ray, the messages themselves inline."""


class NodeLost(RunError):
    """Part of what the executor stands on is gone, a node for example, and what was asked for with it. `recover` goes
    on with what is left.
    """


@dataclass(frozen=True, slots=True)
class Sent(Generic[Handle]):
    """The downlinks of a round: a handle and its size in bytes for every client."""

    downlinks: Mapping[int, Handle]
    down_bytes: Mapping[int, int]

    def without(self, clients: Collection[int]) -> Sent[Handle]:
        """The same for all but these clients, whose bytes still count."""
        return Sent({c: h for c, h in self.downlinks.items() if c not in clients}, self.down_bytes)


@dataclass(frozen=True, slots=True)
class Trained(Generic[Handle]):
    """What a round's training came to; nothing of it counts before it is fused.

    Args:
        uplinks: each handle stands for those of some clients.
        reports: what the hosts say, of those whose training came to something.
        states: the private states after it, in a form that the executor knows.
    """

    uplinks: Sequence[Handle]
    reports: tuple[TrainReport, ...]
    states: Mapping[int, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Which model to evaluate, on whom, on which splits.

    `model` and `phase` as in `EvalRow`; a global model is always "received".
    """

    model: Literal["personal", "global"]
    phase: Literal["received", "trained"]
    clients: tuple[int, ...]
    splits: tuple[Split, ...]
    round_number: int = 1
    """The round just finished."""
    joining: bool = False
    """Whether what is received is a newcomer's first message."""
    confusion: bool = False
    """Whether test examples are also counted by class and predicted class."""


class Executor(Protocol[Handle]):
    """Runs clients and server; inline or on Ray actors. Client ids come and go in ascending order.

    `heard` is called with the number of clients that are done, as they are, in the opening, training and evaluation.

    Between two calls its state is the server's and every client's; `fuse` and `finetune` alone change it, both of them
    wholly or not at all. So a call that was broken off can be made again. Every call may raise `Displaced`.
    """

    clients_done: Callable[[int], None]

    def start(self) -> None:
        """Bring up server and hosts."""
        ...

    def whereabouts(self) -> str:
        """Where the clients live, in words."""
        ...

    def refresh(self) -> None:
        """Between two rounds: make use of what has come, where that is asked for."""
        ...

    def recover(self) -> bool:
        """After `Displaced`: go on with what is left.

        Returns:
            Whether the state is what it was; else part of it was lost, and it is that of the beginning.

        Raises:
            RunError: there is not enough left.
        """
        ...

    def send(self, clients: Sequence[int]) -> Sent[Handle]:
        """Have the server make the downlinks for these clients."""
        ...

    def train(self, round_number: int, sent: Sent[Handle], work: Mapping[int, float] | None = None) -> Trained[Handle]:
        """Have those clients receive, train and reply; `work` is the share of their training that stragglers do."""
        ...

    def open(self, clients: Sequence[int]) -> Trained[Handle]:
        """Have clients reply as they are, before the first round."""
        ...

    def fuse(self, trained: Trained[Handle], matrices: bool = False) -> RoundDiagnostics:
        """Have the server fuse the replies, in the order of the client ids; the clients' states count from now on.

        Returns:
            What is seen of it, with matrices where they are asked for.
        """
        ...

    def go_back(self) -> None:
        """To the states before the last fusion, which are held until `confirm`; for saving them."""
        ...

    def confirm(self) -> None:
        """The last fusion is written down: what was before it may go."""
        ...

    def evaluate(self, request: EvalRequest, sent: Sent[Handle] | None = None) -> list[EvalRow]:
        """Judge a model; changes nothing. No rows where the method has no global model.

        A personal model as received is made of what is in `sent`, or else of the downlinks as they now are.
        """
        ...

    def join(self, clients: Sequence[int]) -> Sent[Handle]:
        """Have the server make what it sends to clients that are new to it."""
        ...

    def finetune(self, round_number: int, sent: Sent[Handle], epochs: int) -> None:
        """Have those clients receive and train for so many epochs; nothing comes back."""
        ...

    def downlink(self, handle: Handle) -> Message:
        """Bring a downlink to the driver, for the trace."""
        ...

    def uplinks(self, handle: Handle) -> Sequence[Uplink]:
        """Bring one host's uplinks to the driver, for the trace."""
        ...

    def server_numbers(self) -> Tensors:
        """The server rule's own numbers after the last fusion."""
        ...

    def server_state(self) -> object:
        """The server rule's state, for a checkpoint."""
        ...

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Every client's private state, for a checkpoint."""
        ...

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Take over the states of a checkpoint, the server's in plain form.

        Raises:
            ValueError: it is no state of this server.
        """
        ...
