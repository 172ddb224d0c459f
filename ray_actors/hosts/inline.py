"""The executor that runs everything in this process: for debugging, and for most tests."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pflsim.config.on_client_error import OnError
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import EvalRequest, Sent, Trained
from pflsim.errors import ServerError
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.run_folder.journal import Journal
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import EvalRow, Tensors
from ray_actors.hosts.client_factory import ClientFactory
from ray_actors.hosts.client_host import ClientHost
from ray_actors.hosts.failure_policy import FailurePolicy
from ray_actors.hosts.retries import Attempts, Failure, Reply
from ray_actors.hosts.server_host import ServerHost

Content = Message | Sequence[Uplink]


class InlineExecutor:
    """One host with all clients, beside the server; a handle is the message itself.

    Args:
        recipe, dataset, partition: for the host.
        rule, federation: for the server.
        on_error: what becomes of clients that fail.
        journal: hears of them.
    """

    def __init__(
        self,
        factory: ClientFactory,
        dataset: Dataset,
        partition: Partition,
        rule: ServerRule,
        federation: Federation,
        on_error: OnError | None = None,
        journal: Journal | None = None,
    ):
        self._parts = factory, dataset, partition, rule, federation
        self.journal = journal or Journal()
        self.failure_policy = FailurePolicy(on_error or OnError("abort"), factory.on_nonfinite, self.journal)
        self.clients_done: Callable[[int], None] = lambda done: None

    def start(self) -> None:
        """Build server and host."""
        factory, dataset, partition, rule, federation = self._parts
        self.server = ServerHost(rule, federation, factory.threads)
        self.host = ClientHost(factory, dataset, partition, range(partition.clients))
        self._counted: dict[int, Tensors] = {}
        self._before: tuple[Any, dict[int, Tensors]] | None = None

    def whereabouts(self) -> str:
        """Here."""
        return "all clients in this process"

    def refresh(self) -> None:
        """Nothing ever comes."""

    def recover(self) -> bool:
        """Nothing is ever lost."""
        return True

    def send(self, clients: Sequence[int]) -> Sent[Content]:
        """The server's messages."""
        with self._serving("send"):
            return _sent(self.server.downlinks(clients))

    def join(self, clients: Sequence[int]) -> Sent[Content]:
        """The server's messages to newcomers."""
        with self._serving("join"):
            return _sent(self.server.join(clients))

    def finetune(self, round_number: int, sent: Sent[Content], epochs: int) -> None:
        """Train newcomers, in turn."""
        down: Any = sent.downlinks
        found = self._settled([(client,) for client in down], lambda tries: tries.finetune(round_number, epochs, down))
        self._before = self.server.state, self._counted
        self._count(found)

    def train(
        self, round_number: int, sent: Sent[Content], work: Mapping[int, float] | None = None
    ) -> Trained[Content]:
        """Train the clients that were sent something, unit by unit."""
        down: Any = sent.downlinks
        units = self.host.factory.units(down)
        return self._trained(self._settled(units, lambda tries: tries.train(round_number, down, work or {})))

    def open(self, clients: Sequence[int]) -> Trained[Content]:
        """Reply, in turn."""
        return self._trained(self._settled([(client,) for client in clients], lambda tries: tries.open()))

    def fuse(self, trained: Trained[Content], matrices: bool = False) -> RoundDiagnostics:
        """Fuse."""
        before = self.server.state, self._counted
        with self._serving("fuse"):
            seen = self.server.fuse(*trained.uplinks, matrices=matrices)  # type: ignore[arg-type]
        self._before = before
        self._count(trained.states)  # type: ignore[arg-type]
        return seen

    def evaluate(self, request: EvalRequest, sent: Sent[Content] | None = None) -> list[EvalRow]:
        """Judge."""
        messages: Any = {}
        if request.model == "global":
            with self._serving("send_global"):
                message = self.server.global_message()
            if message is None:
                return []
            messages = dict.fromkeys(request.clients, message)
        elif request.phase == "received":
            messages = (self.send(request.clients) if sent is None else sent).downlinks
        units = [(client,) for client in (messages or request.clients)]
        found = self._settled(units, lambda tries: tries.evaluate(request, messages))
        return [row for client in sorted(found) for row in found[client]]

    def downlink(self, handle: Content) -> Message:
        """The message itself."""
        assert isinstance(handle, Message)
        return handle

    def uplinks(self, handle: Content) -> Sequence[Uplink]:
        """The messages themselves."""
        assert not isinstance(handle, Message)
        return handle

    def server_numbers(self) -> Tensors:
        """The rule's own numbers."""
        return self.server.numbers()

    def server_state(self) -> object:
        """The rule's state in plain form."""
        return self.server.saved_state()

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Every client's private state."""
        initial = self.host.states
        yield from ((c, self._counted[c] if c in self._counted else initial[c]) for c in self.host.clients)

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Take over saved states."""
        self.server.restore(server)
        self._count(dict(clients))

    def go_back(self) -> None:
        """The states before the last fusion, or fine-tuning."""
        if self._before is not None:
            for client in self._counted:
                self.host.states.pop(client, None)  # then it is what it was at the beginning
            self.server.state, self._counted = self._before
            self.host.states.update(self._counted)
            self._before = None

    def confirm(self) -> None:
        """What was before may go."""
        self._before = None

    def _count(self, states: Mapping[int, Tensors]) -> None:
        """These count from now on; what a host has in between, while it works, does not."""
        self._counted = {**self._counted, **states}
        self.host.states.update(states)

    @contextmanager
    def _serving(self, what: str) -> Iterator[None]:
        """An error of the server's inside the block is told once, and ends the run."""
        try:
            yield
        except Exception as error:
            text = f"the server failed in {what}: {type(error).__name__}: {error}"
            self.journal.failure(text, traceback.format_exc())
            raise ServerError(text) from error

    def _settled(
        self, units: Sequence[tuple[int, ...]], work: Callable[[Attempts], Mapping[int, Any]]
    ) -> dict[int, Any]:
        """The results of those that came to something, however often it had to be tried."""
        found: dict[int, Any] = {}
        pending: list[tuple[tuple[int, ...], int, Failure | None]] = [(unit, 0, None) for unit in units]
        while pending:
            unit, tries, before = pending.pop(0)
            results = work(Attempts(self.host, [unit]))
            good = {client: r for client, r in results.items() if not isinstance(r, Failure)}
            found.update(good)
            self.clients_done(len(good))
            for failure in dict.fromkeys(r for r in results.values() if isinstance(r, Failure)):
                rest = self.failure_policy.again(failure, tries, before)
                pending += [(rest, tries + 1, failure)] if rest else []
        return found

    def _trained(self, found: Mapping[int, Reply]) -> Trained[Content]:
        replies = [found[client] for client in sorted(found)]
        self.failure_policy.kept(replies)
        states = {reply.report.client: reply.state for reply in replies}
        return Trained([[reply.uplink for reply in replies]], tuple(reply.report for reply in replies), states)


def _sent(messages: Mapping[int, Message]) -> Sent[Content]:
    return Sent(messages, {client: payload_bytes(message) for client, message in messages.items()})
