"""Part 4: clients in several processes that share the GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor

import pflsim
from benchmarks.data import random_images
from benchmarks.gpu_check.runs import Check, Skipped, bits, made, seconds_of
from benchmarks.gpu_check.workers import workers
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.server_host import ServerHost
from pflsim.engine.execution import TrainTask
from pflsim.messages import Message

NETS = {"mlp": "model=mlp", "cnn": "model=cnn"}


def checks(device: str) -> list[Check]:
    """Return the checks, the most important ones first."""
    return [
        ("on Ray, 4 actors", partial(on_ray, device)),
        *((f"{net}, several processes", partial(shares, device, net)) for net in NETS),
    ]


def shares(device: str, net: str) -> str:
    """Train the same clients in 1, 2 and 4 processes, each with its share of the memory: equal bits."""
    on_cpu = device == "cpu"
    examples, clients, processes = (400, 8, (1, 2)) if on_cpu else (14_000, 64, (1, 2, 4))
    run = made(
        "method=pfedcfr", NETS[net], f"clients={clients}", f"lockstep_clients={clients // 4}",
        f"data.examples={examples}", "partition=dirichlet",
    )  # fmt: skip
    factory, share = replace(run.factory, device=device), 0 if on_cpu else 1
    # a stack stays in one process
    stacks = run.factory.stacks or tuple((client,) for client in range(clients))
    server = ServerHost(run.rule, run.federation, 1, "cpu")
    found, expected = [], dict[str, Tensor]()
    for count in processes:
        groups = [tuple(client for stack in stacks[k::count] for client in stack) for k in range(count)]
        own = factory.with_gpus(share / count)
        messages = [server.downlinks(group) for group in groups]
        with workers(client_host, [(own, run.dataset, run.partition, group) for group in groups]) as ask:
            states = {name: value for answer in ask(messages) for name, value in answer.items()}
            seconds = min(seconds_of(partial(ask, messages), "cpu") for _ in range(2))
        expected = expected or states
        bits(states, expected)
        found.append(f"{count}: {seconds:.3f} s")
    return "equal to the bit; a round " + ", ".join(found)


def client_host(
    factory: Any, dataset: Any, partition: Any, clients: Sequence[int]
) -> Callable[[Mapping[int, Message]], dict[str, Tensor]]:
    """Return a function that trains round 1 of a host's clients from their initial states and given messages."""
    host, task = ClientHost(factory, dataset, partition, clients), TrainTask(1)

    def train(messages: Mapping[int, Message]) -> dict[str, Tensor]:
        replies = host.run_groups(task, factory.task_groups(task, clients), messages)
        states = {client: reply.state or {} for client, reply in replies.items()}
        return {f"{client}.{name}": value for client, state in states.items() for name, value in state.items()}

    return train


def on_ray(device: str) -> str:
    """Compare a run on four actors, on a GPU with a quarter of it each, with the same run in this process."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise Skipped("Ray is not installed") from None
    given: dict[str, Any] = dict(
        data=random_images(examples=840), method="pfedcfr", clients=8, lockstep_clients=2, rounds=3, lr=0.05
    )
    ways = {"inline": {"executor": "inline"}, "ray": {"executor": "ray", "placement.actors": 4}}
    if device != "cpu":
        ways = {"inline": {"executor": "inline"}, "ray": {"executor": "ray", "placement.actors_per_gpu": 4}}
        given["placement.gpus"] = 1
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        runs = [pflsim.run(**given, **way, run_dir=f"{folder}/{name}") for name, way in ways.items()]
        tables = [(Path(run.folder) / "per_client.csv").read_bytes() for run in runs]
    differing = sum(a != b for a, b in zip(*(table.splitlines() for table in tables), strict=True))
    assert not differing, f"{differing} rows of per_client.csv differ"
    return "equal to one process, to the bit"
