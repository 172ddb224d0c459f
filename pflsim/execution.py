"""What the round loop needs of whatever runs the clients: the Executor protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from pflsim.messages import Message, Uplink
from pflsim.types import EvalRow, Split, Tensors, TrainReport

Handle = TypeVar("Handle")
"""Stands for messages that live elsewhere: an object reference under Ray, the messages themselves inline."""


@dataclass(frozen=True, slots=True)
class Sent(Generic[Handle]):
    """The downlinks of a round: a handle and its size in bytes for every client."""

    downlinks: Mapping[int, Handle]
    down_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Trained(Generic[Handle]):
    """The uplinks of a round (each handle stands for those of one host) and what the hosts say of the training."""

    uplinks: Sequence[Handle]
    reports: tuple[TrainReport, ...]


@dataclass(frozen=True, slots=True)
class Judge:
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


class Executor(Protocol[Handle]):
    """Runs clients and server; inline or on Ray actors. Client ids come and go in ascending order."""

    def start(self) -> None:
        """Bring up server and hosts."""
        ...

    def send(self, clients: Sequence[int]) -> Sent[Handle]:
        """Have the server make the downlinks for these clients."""
        ...

    def train(self, round_number: int, sent: Sent[Handle]) -> Trained[Handle]:
        """Have those clients receive, train and reply."""
        ...

    def open(self, clients: Sequence[int]) -> Trained[Handle]:
        """Have clients reply as they are, before the first round."""
        ...

    def fuse(self, trained: Trained[Handle]) -> None:
        """Have the server fuse the replies, in the order of the client ids."""
        ...

    def evaluate(self, judge: Judge, sent: Sent[Handle] | None = None) -> list[EvalRow]:
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
        """Every client's private state, host by host, for a checkpoint."""
        ...
