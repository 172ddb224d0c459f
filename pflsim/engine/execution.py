"""The Executor protocol, through which the round loop uses the hosts of clients and server, and its tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.errors import RunError
from pflsim.messages import Message, Uplink
from pflsim.types import EvalPhase, EvalRow, Fault, ModelKind, Split, Tensors, TrainReport


class FaultRecorder:
    """Counts replaced actors, and records the clients that fail until a round takes them into its record.

    Attributes:
        restarts: the number of actors that were replaced so far.
        on_restart: called with this number whenever it grows.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.on_restart: Callable[[int], None] = lambda restarts: None
        self._faults: dict[int, Fault] = {}

    def count_restart(self) -> None:
        """Count one replaced actor."""
        self.restarts += 1
        self.on_restart(self.restarts)

    def add(self, clients: Iterable[int], kind: Fault) -> None:
        """Record that these clients failed."""
        self._faults.update(dict.fromkeys(clients, kind))

    def take(self) -> dict[int, Fault]:
        """Return the faults since the last call, by client."""
        taken, self._faults = self._faults, {}
        return taken


Handle = TypeVar("Handle")
"""A reference to messages: a Ray object reference, or the messages themselves with the inline executor."""


class NodeLost(RunError):
    """Actors or objects are lost because their node left the cluster. `Executor.recover` continues on other nodes."""


class StatesLost(RunError):
    """States of clients or of the server are lost with a node: the run can only continue from a checkpoint."""


@dataclass(frozen=True, slots=True)
class Sent(Generic[Handle]):
    """Downlinks: a handle and the size in bytes for every client. A handle is None if the task needs no message."""

    downlinks: Mapping[int, Handle | None]
    down_bytes: Mapping[int, int]

    @classmethod
    def nothing(cls, clients: Iterable[int]) -> Sent[Handle]:
        """Return no message for each of these clients."""
        return cls(dict.fromkeys(clients), {})

    def without(self, clients: Collection[int]) -> Sent[Handle]:
        """Return the downlinks of all other clients; `down_bytes` still counts everyone."""
        return Sent({c: handle for c, handle in self.downlinks.items() if c not in clients}, self.down_bytes)


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Receive the downlink, train and reply.

    Args:
        round_number: from 1.
        work: the share of their mini-batches, in (0, 1], that stragglers train on; all others train on all of them.
    """

    name: ClassVar[str] = "local training"
    changes_state: ClassVar[bool] = True
    round_number: int
    work: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplyTask:
    """Reply outside of local training: with the initial state in round 0, or to the survey before a later round."""

    name: ClassVar[str] = "reply"
    changes_state: ClassVar[bool] = False
    round_number: int = 0


@dataclass(frozen=True, slots=True)
class FinetuneTask:
    """Receive the first downlink of a newcomer and train at `lr`, without schedule; nothing is sent to the server.

    Args:
        round_number: decides the random numbers.
        epochs: how often the module's schedule runs, from 0. A phase without a length of its own lasts one epoch.
        rows: the number of training rows, the first ones of `pflsim.seeding.newcomer_rows`; None: all.
    """

    name: ClassVar[str] = "fine-tuning"
    changes_state: ClassVar[bool] = True
    round_number: int
    epochs: int
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Evaluate a model of some clients on some splits; changes no state.

    Args:
        model, phase: as in `EvalRow`; a global model is always "received".
        clients: their ids.
        splits: of their data.
        round_number: the round that has just finished.
        joining: the downlink is the first one of newcomers.
        confusion: also count test examples by class and predicted class.
        pooled: splits of which scores are also returned, for records, thresholds and metrics over all clients.
        rows: the number of training rows that the client has, as in `FinetuneTask`.
        recalibrate: add the constant to the outputs that fits them best to these rows, see `Criterion.correction`.
    """

    name: ClassVar[str] = "evaluation"
    changes_state: ClassVar[bool] = False
    model: ModelKind
    phase: EvalPhase
    clients: tuple[int, ...]
    splits: tuple[Split, ...]
    round_number: int = 1
    joining: bool = False
    confusion: bool = False
    pooled: tuple[Split, ...] = ()
    rows: int | None = None
    recalibrate: bool = False


@dataclass(frozen=True, slots=True)
class AdaptTask:
    """Adapt a model to the client's examples as for an evaluation, and return the tensors that this changes.

    Args:
        request: which model.
    """

    name: ClassVar[str] = "adaptation"
    changes_state: ClassVar[bool] = True
    request: EvalRequest

    @property
    def round_number(self) -> int:
        """Return the round that has just finished."""
        return self.request.round_number


ClientTask = TrainTask | ReplyTask | FinetuneTask | AdaptTask
"""What `Executor.run` has clients do."""


def trained_round(task: ClientTask) -> int:
    """Return the round of a `TrainTask`; 0 for others."""
    return task.round_number if isinstance(task, TrainTask) else 0


@dataclass(frozen=True, slots=True)
class Trained(Generic[Handle]):
    """The results of a task. They take effect with `Executor.fuse` or `Executor.store`.

    Args:
        uplinks: each handle stands for the uplinks of some clients.
        reports: of the clients that succeeded, by ascending client id.
        states: new private states by client, in a form that the executor knows.
        round_number: of a `TrainTask`; 0 for others.
    """

    uplinks: Sequence[Handle]
    reports: tuple[TrainReport, ...]
    states: Mapping[int, object] = field(default_factory=dict)
    round_number: int = 0


class Executor(Protocol[Handle]):
    """Runs the clients and the server, in this process or on Ray actors. Client ids are passed in ascending order.

    An executor holds the server's state and every client's private state. Only `fuse`, `store`, `rollback` and
    `restore` change them, and each either changes all of them or fails without an effect, so that a call that was
    interrupted can be repeated. Every call may raise `NodeLost`.

    Attributes:
        clients_done: called with the number of clients that have finished, during `run` and `evaluate`.
        group_starts: called with the round, the task and the clients of each group that starts in this process.
        faults: counts replaced actors and records the clients that failed.
    """

    clients_done: Callable[[int], None]
    group_starts: Callable[[str], object]
    faults: FaultRecorder

    def start(self) -> None:
        """Build the server and the hosts, and wait until they are ready."""

    def recover(self) -> None:
        """Continue after `NodeLost`, when the actors of the lost node run on another one.

        Raises:
            RunError: the other nodes have no room; `StatesLost` if some states are lost.
        """

    def send(self, clients: Sequence[int], joining: bool = False) -> Sent[Handle]:
        """Have the server make the downlinks of these clients, or their first ones if they are `joining`."""
        ...

    def run(self, task: ClientTask, sent: Sent[Handle]) -> Trained[Handle]:
        """Have the clients in `sent` do a task."""
        ...

    def fuse(self, trained: Trained[Handle], matrices: bool = False) -> RoundDiagnostics:
        """Have the server fuse the uplinks, in the order of the client ids, and store the clients' new states.

        Args:
            trained: the results of a task.
            matrices: also compute the matrices of the diagnostics.
        """
        ...

    def store(self, trained: Trained[Handle]) -> None:
        """Store the clients' new states without a fusion."""

    def rollback(self) -> None:
        """Restore the states before the first `fuse` or `store` that was not committed."""

    def commit(self) -> None:
        """Drop the states to which `rollback` returns."""

    def evaluate(self, request: EvalRequest, sent: Sent[Handle] | None = None) -> list[EvalRow]:
        """Evaluate a model; returns no rows if the method has no global model and the request asks for it.

        Args:
            request: what to evaluate.
            sent: downlinks for personal models as received; None: the server makes new ones.
        """
        ...

    def downlink(self, handle: Handle) -> Message:
        """Fetch a downlink, for the trace."""
        ...

    def uplinks(self, handle: Handle) -> Sequence[Uplink]:
        """Fetch the uplinks behind one handle, for the trace."""
        ...

    def server_numbers(self) -> Tensors:
        """Return the server rule's own numbers after the last fusion."""
        ...

    def server_state(self) -> object:
        """Return the server rule's state, for a checkpoint."""
        ...

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Yield every client's id and private state, for a checkpoint."""
        ...

    def adapted_states(self, request: EvalRequest) -> Iterator[tuple[int, Tensors]]:
        """Adapt a model to its clients' examples; yields the tensors that differ from the private states."""
        ...

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Load the states of a checkpoint.

        Args:
            server: the server rule's state as `server_state` returns it.
            clients: as `client_states` yields them.

        Raises:
            ValueError: the server's state does not fit the server rule.
        """
