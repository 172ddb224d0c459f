"""The client actor: a process that a host moves into. It keeps no state of a client beyond a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.engine.execution import EvalRequest
from pflsim.messages import Message
from pflsim.types import EvalRow, TrainReport
from ray_actors.executor.fingerprint import RuntimeFingerprint, runtime_fingerprint
from ray_actors.executor.zero_copy import ZeroCopyMessage
from ray_actors.hosts.client_errors import in_words
from ray_actors.hosts.client_factory import ClientFactory
from ray_actors.hosts.client_host import ClientHost
from ray_actors.hosts.retries import Attempts, Failure, Reply

Units = Sequence[tuple[int, ...]]


class RemoteHost:
    """Starts empty; is settled for a run, and can be settled anew for the next.

    Every call brings the private states that it starts from, None for a client's first, and takes the new ones away:
    so that nothing is lost with the process, and any other can make the same call again. `brought` are the messages,
    each once, with a state for every client behind them.
    """

    def settle(
        self, factory: ClientFactory, dataset: Dataset, partition: Partition, clients: Sequence[int]
    ) -> RuntimeFingerprint:
        """Build the host of these clients in place of any that was here; returns where that is."""
        try:
            self.host = ClientHost(factory, dataset, partition, clients)
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(in_words(error)) from error
        return runtime_fingerprint()

    def pid(self) -> int:
        """The process id."""
        return runtime_fingerprint().pid

    def train(
        self, units: Units, positions: Sequence[int], round_number: int, work: Mapping[int, float], *brought: Any
    ) -> tuple[Any, ...]:
        """As `ClientHost.train`: what is said of every client, the uplinks in a parcel, the new states."""
        with self._brought(units, positions, brought) as messages:
            return _parcels(Attempts(self.host, units).train(round_number, messages, work))

    def finetune(
        self, units: Units, positions: Sequence[int], round_number: int, epochs: int, *brought: Any
    ) -> tuple[Any, ...]:
        """As `ClientHost.finetune`: what is said of every client (None where all went well), the new states."""
        with self._brought(units, positions, brought) as messages:
            found = Attempts(self.host, units).finetune(round_number, epochs, messages)
        said = {client: result if isinstance(result, Failure) else None for client, result in found.items()}
        return said, *(ZeroCopyMessage(found[client]) if said[client] is None else None for client in found)

    def open(self, units: Units, positions: Sequence[int], *brought: Any) -> tuple[Any, ...]:
        """As `ClientHost.open`: what is said of every client, and the uplinks in a parcel."""
        with self._brought(units, positions, brought):
            return _parcels(Attempts(self.host, units).open())[:2]

    def evaluate(
        self, units: Units, positions: Sequence[int], request: EvalRequest, *brought: Any
    ) -> dict[int, list[EvalRow] | Failure]:
        """As `ClientHost.evaluate`."""
        with self._brought(units, positions, brought) as messages:
            return Attempts(self.host, units).evaluate(request, messages)

    @contextmanager
    def _brought(self, units: Units, positions: Sequence[int], brought: Sequence[Any]) -> Iterator[dict[int, Message]]:
        """The clients have the states that they brought inside the block; gives the messages by client."""
        clients = [client for unit in units for client in unit]
        messages, states = brought[: -len(clients)], brought[-len(clients) :]
        self.host.states.update((c, state) for c, state in zip(clients, states, strict=True) if state is not None)
        try:
            yield {c: messages[at] for c, at in zip(clients, positions, strict=True)} if positions else {}
        finally:
            for client in clients:
                self.host.states.pop(client, None)


def _parcels(found: Mapping[int, Reply | Failure]) -> tuple[Any, ...]:
    """What is said of every client (its report with what is not finite, or its failure), uplinks, states."""
    said: dict[int, tuple[TrainReport, str] | Failure] = {}
    states: list[ZeroCopyMessage | None] = []
    for client, result in found.items():
        said[client] = result if isinstance(result, Failure) else (result.report, result.nonfinite)
        states.append(None if isinstance(result, Failure) else ZeroCopyMessage(result.state))
    return said, ZeroCopyMessage([r.uplink for r in found.values() if isinstance(r, Reply)]), *states
