"""The client actor: a process with a `ClientHost`. It keeps no state of a client between calls.

This module imports nothing that takes time, so that the driver can start actors before it has imported torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray_actors.executor.remote_actor import RemoteActor, zero_copy

if TYPE_CHECKING:
    from lightning_modules.hosts.client_factory import ClientFactory
    from pflsim.data.dataset import Dataset
    from pflsim.data.federated import Partition
    from pflsim.engine.execution import ClientTask, EvalRequest
    from ray_actors.executor.fingerprint import RuntimeFingerprint


class RemoteHost(RemoteActor):
    """A client actor. It starts without a host; `build` can be called again for the next run.

    `run` takes the private states as arguments and returns the new ones, so that nothing is lost if the process dies:
    another actor can repeat the call.
    """

    def __init__(self) -> None:
        importlib.import_module("lightning_modules.light")  # before anything imports Lightning
        importlib.import_module("lightning_modules.hosts.client_host")

    def build(
        self, factory: ClientFactory, dataset: Dataset, partition: Partition, clients: Sequence[int]
    ) -> RuntimeFingerprint:
        """Build the host of these clients in place of any earlier one."""
        import torch

        from lightning_modules.hosts.client_errors import in_words
        from lightning_modules.hosts.client_host import ClientHost
        from ray_actors.executor.fingerprint import runtime_fingerprint

        try:
            self.host = ClientHost(factory, dataset, partition, clients)
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(in_words(error)) from error
        return runtime_fingerprint()

    def run(
        self,
        task: ClientTask | EvalRequest,
        groups: Sequence[tuple[int, ...]],
        positions: Sequence[int],
        *messages_and_states: Any,
    ) -> tuple[Any, ...]:
        """Do a task for client groups in turn.

        Args:
            task: see `ClientHost.run`.
            groups: which clients work together; K clients in all.
            positions: for each of the K clients, the index of its message.
            messages_and_states: each message once, then the K clients' states; None stands for an initial state.

        Returns:
            The outcome by client: a `Failure`, a list of `EvalRow`, or a report and its note on values that are not
            finite. Then the uplinks as one object. Then, if the task changes states, the K new states.
        """
        from lightning_modules.hosts.client_host import Reply
        from lightning_modules.hosts.failures import run_groups

        clients = [client for group in groups for client in group]
        messages, states = messages_and_states[: -len(clients)], messages_and_states[-len(clients) :]
        self.host.states.update((c, state) for c, state in zip(clients, states, strict=True) if state is not None)
        try:
            received = {client: messages[at] for client, at in zip(clients, positions, strict=True)}
            results = run_groups(self.host, task, groups, received)
        finally:
            for client in clients:
                self.host.states.pop(client, None)
        replies = {client: result for client, result in results.items() if isinstance(result, Reply)}
        outcomes = {**results, **{client: (reply.report, reply.nonfinite) for client, reply in replies.items()}}
        uplinks = [reply.uplink for reply in replies.values() if reply.uplink is not None]
        changed = clients if task.changes_state else []
        new_states = [zero_copy(replies[client].state) if client in replies else None for client in changed]
        return outcomes, zero_copy(uplinks), *new_states
