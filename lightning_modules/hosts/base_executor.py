"""A prepared run, and what the inline executor and the Ray executor have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.hosts.failures import FailurePolicy
from pflsim.config.settings import OnError, Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import AdaptTask, EvalRequest, Executor, FaultRecorder, Handle, Sent, Trained
from pflsim.engine.plan import RunPlan
from pflsim.records.summary import RunMeta
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import EvalRow, Tensors


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start.

    Args:
        settings: as given.
        dataset: the examples.
        partition: the examples of each client.
        factory: builds clients, for the hosts.
        rule, federation: for the server.
        plan: for the round loop.
        meta: describes the run in its records.
        batches_per_round: mini-batches per round of each client, for the placement.
        warnings: what the user should know about the data and the model.
    """

    settings: Settings
    dataset: Dataset
    partition: Partition
    factory: ClientFactory
    rule: ServerRule[Any]
    federation: Federation
    plan: RunPlan
    meta: RunMeta
    batches_per_round: tuple[int, ...]
    warnings: tuple[str, ...] = ()


class BaseExecutor(Executor[Handle], ABC):
    """Implements the parts of `Executor` that do not depend on where the hosts run.

    Args:
        prepared: has what the hosts are built from.

    Attributes:
        server: the server, whose attribute `state` is the state after the last fusion.
        states: the private states of all clients whose state is not the initial one.
    """

    server: Any
    states: dict[int, Any]

    def __init__(self, prepared: PreparedRun):
        settings, self.factory = prepared.settings, prepared.factory
        self.on_error = OnError.of(settings.on_client_error)
        self.data = replace(prepared.dataset, encoder=None), prepared.partition
        device = "cuda" if settings.placement.server_device == "cuda" else "cpu"
        self.server_arguments = prepared.rule, prepared.federation, self.factory.threads, device
        self.faults = FaultRecorder()
        names, remedy = prepared.partition.names, prepared.meta.remedy
        self.failure_policy = FailurePolicy(self.on_error, self.factory.on_nonfinite, self.faults, names, remedy)
        self.clients_done: Callable[[int], None] = lambda clients: None
        self.group_starts: Callable[[str], object] = lambda step: None
        self._before: tuple[Any, dict[int, Any]] | None = None

    @abstractmethod
    def _fetched(self, states: Mapping[int, Any]) -> Iterator[tuple[int, Tensors]]:
        """Yield each client's id and state."""

    @abstractmethod
    def _fuse(self, trained: Trained[Handle], matrices: bool) -> RoundDiagnostics:
        """Change the server's state, and nothing else."""

    @abstractmethod
    def _global_message(self) -> Handle | None:
        """Return the global model, or None if the method has none."""

    @abstractmethod
    def _results(self, task: EvalRequest, messages: Mapping[int, Handle | None]) -> dict[int, list[EvalRow]]:
        """Evaluate clients with these messages; returns the rows of those that succeed, by client."""

    def fuse(self, trained: Trained[Handle], matrices: bool = False) -> RoundDiagnostics:
        """Have the server fuse the uplinks, and store the clients' new states."""
        before = self._before or (self.server.state, dict(self.states))
        diagnostics = self._fuse(trained, matrices)
        self.store(trained)
        self._before = before
        return diagnostics

    def store(self, trained: Trained[Handle]) -> None:
        """Store the clients' new states without a fusion."""
        self._before = self._before or (self.server.state, dict(self.states))
        self.states.update(trained.states)

    def rollback(self) -> None:
        """Restore the states before the first `fuse` or `store` that was not committed."""
        if self._before is not None:
            self.server.state, states = self._before
            self.states.clear()
            self.states.update(states)
            self._before = None

    def commit(self) -> None:
        """Drop the states to which `rollback` returns."""
        self._before = None

    def evaluate(self, request: EvalRequest, sent: Sent[Handle] | None = None) -> list[EvalRow]:
        """Evaluate a model; rows are in the order of the client ids."""
        rows = self._results(request, self._messages(request, sent))
        return [row for client in sorted(rows) for row in rows[client]]

    def _messages(self, request: EvalRequest, sent: Sent[Handle] | None = None) -> Mapping[int, Handle | None]:
        """Return the message of each client for an evaluation; no clients if there is no global model to evaluate."""
        if request.model == "global":
            message = self._global_message()
            return {} if message is None else dict.fromkeys(request.clients, message)
        if request.phase == "received":
            return (self.send(request.clients) if sent is None else sent).downlinks
        return dict.fromkeys(request.clients)

    def adapted_states(self, request: EvalRequest) -> Iterator[tuple[int, Tensors]]:
        """Adapt a model to its clients' examples; yields the tensors that differ from the private states."""
        return self._fetched(self.run(AdaptTask(request), Sent(self._messages(request), {})).states)
