"""The executor that runs everything in this process: for debugging, and for most tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.execution import Judge, Sent, Trained
from pflsim.messages import Message, Uplink
from pflsim.payload import payload_bytes
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import EvalRow, Tensors
from ray_actors.client_host import ClientHost
from ray_actors.recipe import Recipe
from ray_actors.server_host import ServerHost

Content = Message | Sequence[Uplink]


class InlineExecutor:
    """One host with all clients, beside the server; a handle is the message itself."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, partition: Partition, rule: ServerRule, federation: Federation
    ):
        self._parts = recipe, dataset, partition, rule, federation

    def start(self) -> None:
        """Build server and host."""
        recipe, dataset, partition, rule, federation = self._parts
        self.server = ServerHost(rule, federation, recipe.threads)
        self.host = ClientHost(recipe, dataset, partition, range(partition.clients))

    def send(self, clients: Sequence[int]) -> Sent[Content]:
        """The server's messages."""
        return _sent(self.server.downlinks(clients))

    def join(self, clients: Sequence[int]) -> Sent[Content]:
        """The server's messages to newcomers."""
        return _sent(self.server.join(clients))

    def finetune(self, round_number: int, sent: Sent[Content], epochs: int) -> None:
        """Train newcomers, in turn."""
        clients, messages = list(sent.downlinks), list(sent.downlinks.values())
        self.host.finetune(round_number, epochs, clients, range(len(clients)), *messages)  # type: ignore[arg-type]

    def train(self, round_number: int, sent: Sent[Content]) -> Trained[Content]:
        """Train the clients that were sent something, in turn."""
        clients, messages = list(sent.downlinks), list(sent.downlinks.values())
        uplinks, reports = self.host.train(round_number, clients, range(len(clients)), *messages)  # type: ignore[arg-type]
        return Trained([uplinks], tuple(reports))

    def open(self, clients: Sequence[int]) -> Trained[Content]:
        """Reply, in turn."""
        uplinks, reports = self.host.open(clients)
        return Trained([uplinks], tuple(reports))

    def fuse(self, trained: Trained[Content]) -> None:
        """Fuse."""
        self.server.fuse(*trained.uplinks)  # type: ignore[arg-type]

    def evaluate(self, judge: Judge, sent: Sent[Content] | None = None) -> list[EvalRow]:
        """Judge."""
        if judge.model == "global":
            message = self.server.global_message()
            return (
                [] if message is None else self.host.evaluate(judge, judge.clients, [0] * len(judge.clients), message)
            )
        if judge.phase == "received":
            messages = (self.send(judge.clients) if sent is None else sent).downlinks
            return self.host.evaluate(judge, list(messages), range(len(messages)), *messages.values())  # type: ignore[arg-type]
        return self.host.evaluate(judge, judge.clients, ())

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
        yield from self.host.private_states().items()


def _sent(messages: Mapping[int, Message]) -> Sent[Content]:
    return Sent(messages, {client: payload_bytes(message) for client, message in messages.items()})
