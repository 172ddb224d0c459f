"""The client actor: a process with a `ClientHost`. It keeps no state of a client between calls.

This module imports nothing that takes time, so that the driver can start actors before it has imported torch.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import ObjectRef

if TYPE_CHECKING:
    from pflsim.engine.execution import ClientTask, EvalRequest


class Setup(NamedTuple):
    """How an actor builds its host. Every call has one; the actor builds a new host when it differs from the last.

    Args:
        path: folders for the end of the import path; the arguments may be of own classes.
        arguments: references to the first arguments of the host's class.
        clients: the clients of a client host.
    """

    path: tuple[str, ...]
    arguments: tuple[ObjectRef, ...]
    clients: tuple[int, ...] = ()

    def get(self) -> list[Any]:
        """Fetch the arguments."""
        sys.path.extend(folder for folder in self.path if folder not in sys.path)
        return ray.get(list(self.arguments))


class Environment(NamedTuple):
    """What an actor runs on.

    Args:
        process: process id and node, for messages; another one shows that the actor was restarted.
        node: the id of the node.
        versions: of the software; another one may change results.
        processor: that computes; the last bits of results may depend on it.
        state_bytes: of a client's private state; 0 for other processes.
    """

    process: str
    node: str
    versions: str
    processor: str
    state_bytes: int = 0


def process_name() -> str:
    """Return the process id and the node's address."""
    return f"process {os.getpid()} on node {ray.util.get_node_ip_address()}"


def environment() -> Environment:
    """Return what this process runs on."""
    import numpy
    import torch

    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for package in ("pflsim", "lightning_modules", "ray_actors"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {numpy.__version__}"
    versions += f", pflsim {digest.hexdigest()[:8]}"
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_initialized():
        cudnn = torch.backends.cudnn.version()
        processor = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, cuDNN {cudnn}"
    return Environment(process_name(), ray.get_runtime_context().get_node_id(), versions, processor)


class ClientActor:
    """A client actor.

    `run` takes the private states as arguments and returns the new ones. So Ray can restart a process that died, and
    repeat its calls.
    """

    def __init__(self) -> None:
        importlib.import_module("lightning_modules.quick_import")  # before anything imports Lightning
        importlib.import_module("lightning_modules.hosts.client_host")
        gc.freeze()  # what is imported stays: collections need not look at it
        self._setup: Setup | None = None
        self._process = process_name()

    def ping(self) -> str:
        """Return the name of the process, once it has started."""
        return self._process

    def prepare(self, setup: Setup) -> Environment:
        """Build the host."""
        self._build(setup)
        return environment()._replace(state_bytes=sum(t.nbytes for t in self.host.module.state_dict().values()))

    def _build(self, setup: Setup) -> None:
        import torch

        from lightning_modules.hosts.client_host import ClientHost
        from lightning_modules.torch_defaults import set_torch_defaults
        from pflsim.errors import in_words

        if setup != self._setup:
            factory, dataset, partition = setup.get()
            set_torch_defaults()  # the modules that this has imported may have set others
            try:
                self.host = ClientHost(factory, dataset, partition, setup.clients)
            except torch.cuda.OutOfMemoryError as error:
                raise RuntimeError(in_words(error)) from error
            self._setup = setup

    def run(
        self,
        setup: Setup,
        task: ClientTask | EvalRequest,
        groups: Sequence[tuple[int, ...]],
        received: Mapping[int, int],
        places: Mapping[int, tuple[int, int]],
        together: int,
        *objects: Any,
    ) -> tuple[Any, ...]:
        """Do a task for client groups in turn.

        Args:
            setup: of the host.
            task: see `ClientHost.run`.
            groups: which clients work together; K clients in all.
            received: by client, the index of its message.
            places: by client, the index of the list with its state, and the position in it; initial states have none.
            together: the number of states that are returned as one object.
            objects: messages and lists of states.

        Returns:
            The name of the process, and the outcome by client: a `Failure`, a list of `EvalRow`, or a report and its
            note on values that are not finite. Then the uplinks as one object. Then, if the task changes states, lists
            of the new states, in the order of the clients.
        """
        from lightning_modules.hosts.exchange import Reply
        from pflsim.seeding import restored_generators
        from ray_actors.zero_copy import ZeroCopyMessage

        self._build(setup)
        clients = [client for group in groups for client in group]
        self.host.states.update({client: objects[at][place] for client, (at, place) in places.items()})
        try:
            with restored_generators():
                results = self.host.run_groups(task, groups, {client: objects[at] for client, at in received.items()})
        finally:
            for client in clients:
                self.host.states.pop(client, None)
        replies = {client: result for client, result in results.items() if isinstance(result, Reply)}
        outcomes = {**results, **{client: (reply.report, reply.nonfinite) for client, reply in replies.items()}}
        uplinks = [reply.uplink for reply in replies.values() if reply.uplink is not None]
        states = [replies[client].state if client in replies else None for client in clients]
        lists = range(0, len(clients), together) if task.changes_state else ()
        return (
            (self._process, ZeroCopyMessage(outcomes)),
            ZeroCopyMessage(uplinks),
            *(ZeroCopyMessage(states[first : first + together]) for first in lists),
        )
