"""The executor that runs everything in this process, for debugging and for tests."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from lightning_modules.hosts.base_executor import BaseExecutor
from lightning_modules.hosts.client_host import ClientHost, Reply
from lightning_modules.hosts.failures import Failure
from lightning_modules.hosts.server_host import ServerHost
from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import ClientTask, EvalRequest, Sent, Trained, trained_round
from pflsim.errors import ServerError
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.seeding import restored_generators
from pflsim.types import Tensors

logger = logging.getLogger(__name__)
Messages = Message | Sequence[Uplink]


class InlineExecutor(BaseExecutor[Messages]):
    """One host with all clients, and the server. A handle is the message itself, or a list of uplinks."""

    def start(self) -> None:
        """Build the server and the host."""
        self.server = ServerHost(*self.server_arguments)
        self.host = ClientHost(self.factory, *self.data, range(self.data[1].clients))
        self.states = self.host.states
        self._before = None

    def recover(self) -> None:
        """Do nothing: no state is lost."""

    def send(self, clients: Sequence[int], joining: bool = False) -> Sent[Messages]:
        """Have the server make the downlinks of these clients, or their first ones if they are `joining`."""
        with self._server_errors("send"):
            messages = self.server.downlinks(clients, joining)
        return Sent(messages, {client: payload_bytes(message) for client, message in messages.items()})

    def run(self, task: ClientTask, sent: Sent[Messages]) -> Trained[Messages]:
        """Have the clients in `sent` do a task, one client group after another."""
        results: dict[int, Reply] = self._results(task, sent.downlinks)
        replies = [results[client] for client in sorted(results)]
        self.failure_policy.record_kept({r.report.client: r.nonfinite for r in replies if r.nonfinite})
        uplinks = [reply.uplink for reply in replies if reply.uplink is not None]
        states = {reply.report.client: reply.state for reply in replies if reply.state is not None}
        return Trained([uplinks], tuple(reply.report for reply in replies), states, trained_round(task))

    @restored_generators()
    def _results(self, task: ClientTask | EvalRequest, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Return the results of the clients that succeed, after retries where the failure policy asks for them."""
        results: dict[int, Any] = {}
        groups = self.factory.task_groups(task, messages)
        pending: list[tuple[tuple[int, ...], int, Failure | None]] = [(group, 0, None) for group in groups]
        while pending:
            group, tries, before = pending.pop(0)
            clients = f"client{'s' * (len(group) > 1)} {', '.join(map(str, group))}"
            self.group_starts(f"round {task.round_number} ({task.name}) of {clients}")
            found = self.host.run_groups(task, [group], messages)
            succeeded = {client: result for client, result in found.items() if not isinstance(result, Failure)}
            results.update(succeeded)
            self.clients_done(len(succeeded))
            for failure in dict.fromkeys(result for result in found.values() if isinstance(result, Failure)):
                if failure.kind == "device":
                    raise failure.error  # only a new process can use the GPU again
                if again := self.failure_policy.retry(failure, tries, before):
                    pending.append((again, tries + 1, failure))
        return results

    def _fuse(self, trained: Trained[Messages], matrices: bool) -> RoundDiagnostics:
        uplinks: Any = trained.uplinks
        with self._server_errors("fuse"):
            return self.server.fuse(*uplinks, matrices=matrices, round_number=trained.round_number)

    def _global_message(self) -> Message | None:
        with self._server_errors("send_global"):
            return self.server.global_message()

    def downlink(self, handle: Messages) -> Message:
        """Return the message itself."""
        return cast(Message, handle)

    def uplinks(self, handle: Messages) -> Sequence[Uplink]:
        """Return the uplinks themselves."""
        return cast(Sequence[Uplink], handle)

    def server_numbers(self) -> Tensors:
        """Return the server rule's own numbers."""
        return self.server.numbers()

    def server_state(self) -> object:
        """Return the server rule's state as plain containers and tensors."""
        return self.server.saved_state()

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Yield every client's id and private state."""
        yield from ((client, self.host.states[client]) for client in self.host.clients)

    def _fetched(self, states: Mapping[int, Any]) -> Iterator[tuple[int, Tensors]]:
        yield from states.items()

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Load the states of a checkpoint."""
        self.server.restore(server)
        self.host.states.update(clients)

    @contextmanager
    def _server_errors(self, method: str) -> Iterator[None]:
        """Log an error of the server inside the block, and raise it as a `ServerError`."""
        try:
            yield
        except Exception as error:
            text = f"the server failed in {method}: {type(error).__name__}: {error}"
            logger.warning(text, exc_info=True)
            raise ServerError(text) from error
