"""Measures the GPU memory of a client before a run, to decide how many actors share a GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from lightning_modules.hosts.client_errors import in_words
from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.gpu import CONTEXT_MB
from lightning_modules.hosts.server_host import ServerHost
from lightning_modules.prepare import PreparedRun
from pflsim.config.settings import Placement
from pflsim.data.dataset import Dataset
from pflsim.data.federated import FORWARD_BATCH, Partition
from pflsim.engine.execution import EvalRequest, ReplyTask, TrainTask
from pflsim.errors import RunError, SettingsError
from pflsim.records.saved_settings import fixed_settings
from pflsim.servers.base import Federation, ServerRule
from ray_actors.executor.remote_actor import RemoteActor
from ray_actors.placement.layout import Supply

USABLE_FRACTION = 0.9
"""Of a GPU's memory; the rest is for fragmentation and for what the dry run does not measure."""
BATCHES = 3
"""Mini-batches of the dry run: the first one is as large as any, and after the third all buffers exist."""
MAX_COHORTS = 1000
"""Rounds that are searched for the most clients that train together."""
START_TIMEOUT_S = 120.0
"""How long the actor of the dry run may take to start."""
IRRELEVANT = ("seed", "rounds", "lr", "lr_decay", "weight_decay", "on_nonfinite", "fraction", "faults", "trace")
"""Settings, and groups of settings, that do not change a client's memory."""


class CudaMemory:
    """Measures the memory of torch on the first GPU, in bytes; the CUDA context is not included."""

    def begin(self) -> None:
        """Start a measurement; free what is not in use."""
        torch.cuda.init()  # statistics cannot be reset before
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)

    def peak(self) -> int:
        """Return the largest amount that torch has reserved since `begin`."""
        return torch.cuda.max_memory_reserved(0)

    def total(self) -> int:
        """Return the memory of the GPU."""
        return torch.cuda.get_device_properties(0).total_memory


MEMORY = CudaMemory()


class Footprint(NamedTuple):
    """The GPU memory of clients that train together.

    Args:
        clients: how many clients trained together; 1 without lockstep.
        peak: bytes of the GPU, including the CUDA context.
        total: bytes of the GPU in total.
    """

    clients: int
    peak: int
    total: int

    def fit(self, data: float) -> int:
        """Return how many actors fit on one GPU beside `data` bytes of their clients' examples; at least 1."""
        return max(1, int((USABLE_FRACTION * self.total - data) // self.peak))

    def describe(self, per_gpu: int) -> str:
        """Return a line for the log with the number of actors per GPU."""
        who = "one client takes" if self.clients == 1 else f"a stack of {self.clients} clients takes"
        actors = "1 actor" if per_gpu == 1 else f"{per_gpu} actors"
        return f"{who} {self.peak / 2**20:.0f} MiB of {self.total / 2**30:.0f} GiB on the GPU: {actors} per GPU"


@dataclass(frozen=True, slots=True)
class Trial:
    """The clients whose memory is measured, for one variant of the model."""

    stack: tuple[int, ...]
    """All clients of their stack."""
    unit: tuple[int, ...]
    """The clients of the stack that train together."""
    work: float
    """The fraction of their mini-batches to train on."""


def trials(prepared: PreparedRun) -> list[Trial]:
    """Return, for each variant of the model, the largest group of clients in any round; of equal ones, that with the
    most examples.
    """
    sizes = [len(rows) for rows in prepared.partition.train]
    units: dict[int, list[tuple[int, ...]]] = {}
    for cohort in sorted(set(prepared.plan.cohorts[:MAX_COHORTS])):
        for unit in prepared.factory.client_groups(cohort):
            units.setdefault(prepared.factory.variant_of(unit[0]), []).append(unit)
    best = [max(units[v], key=lambda unit: (len(unit), sum(sizes[c] for c in unit))) for v in sorted(units)]
    stacks = {client: stack for stack in prepared.factory.stacks for client in stack}
    return [
        Trial(stacks.get(unit[0], unit), unit, min(1.0, BATCHES / max(prepared.batches_per_round[c] for c in unit)))
        for unit in best
    ]


def measure(
    factory: ClientFactory,
    dataset: Dataset,
    partition: Partition,
    rule: ServerRule[Any],
    federation: Federation,
    tried: Sequence[Trial],
    memory: CudaMemory,
) -> Footprint:
    """Train the clients of each trial on a few mini-batches and evaluate one batch; return the largest footprint.

    Args:
        factory: builds the clients, with a whole GPU.
        dataset: the examples.
        partition: the examples of each client.
        rule: the server rule.
        federation: what the server knows before the first round.
        tried: the trials.
        memory: measures the memory of the factory's GPU.
    """
    found, server = list[Footprint](), ServerHost(rule, federation, factory.threads)
    for trial in tried:
        memory.begin()
        host = ClientHost(factory, dataset, partition, trial.stack)
        if server.rule.initial_round:
            replies = host.run(ReplyTask(), dict.fromkeys(trial.unit))
            server.fuse([reply.uplink for reply in replies.values()])
        share = dict.fromkeys(trial.unit, trial.work)
        host.run(TrainTask(1, share), server.downlinks(trial.unit))
        client = trial.unit[0]
        own, most = host.shards[client], factory.eval_batch_size or FORWARD_BATCH[host.device.type]
        host.shards[client] = replace(own, test=replace(own.test, x=own.test.x[:most], y=own.test.y[:most]))
        host.run(EvalRequest("personal", "trained", (client,), ("test",)), {client: None})
        found.append(Footprint(len(trial.unit), memory.peak() + CONTEXT_MB * 2**20, memory.total()))
        del host, own
    return max(found, key=lambda f: f.peak)


class DryRunner(RemoteActor):
    """An actor for the dry run: its process ends afterwards and gives all memory back."""

    def measure(self, factory: ClientFactory, dataset: Dataset, partition: Partition, *rest: Any) -> Footprint:
        """Return the footprint; see `measure`."""
        return measure(factory, dataset, partition, *rest)


def footprint(prepared: PreparedRun, cpus: float) -> Footprint:
    """Measure in a new actor that has a GPU to itself, and end the actor.

    On a cluster, any free GPU stands for all of them; each actor is limited to its share of its own GPU.

    Args:
        prepared: the run.
        cpus: the CPUs in total.

    Raises:
        SettingsError: no GPU is free.
        RunError: a client cannot train on the GPU.
    """
    runner: Any = ray.remote(num_cpus=min(1.0, cpus), num_gpus=1)(DryRunner).remote()
    try:
        if not ray.wait([runner.__ray_ready__.remote()], timeout=START_TIMEOUT_S)[0]:
            why = f"no GPU was free for a dry run within {START_TIMEOUT_S:g} s"
            raise SettingsError(f"placement.actors_per_gpu=auto: {why}; set it to a number")
        factory, server = prepared.factory.with_gpus(1.0), (prepared.rule, prepared.federation)
        arguments = (factory, prepared.dataset, prepared.partition, *server, trials(prepared), MEMORY)
        runner.extend_path.remote(sys.path)
        return ray.get(runner.measure.remote(*arguments))
    except RayTaskError as error:
        why = in_words(error.cause if isinstance(error.cause, Exception) else error)
        raise RunError(f"placement.actors_per_gpu=auto: the dry run failed: {why}") from None
    except RayError as error:
        raise RunError(f"placement.actors_per_gpu=auto: the actor of the dry run died: {error}") from None
    finally:
        ray.kill(runner)


def max_actors_per_gpu(prepared: PreparedRun, supply: Supply) -> int:
    """Return the upper limit of actors per GPU, whatever its memory.

    Each actor keeps about one CPU busy, so there are not more actors than CPUs, unless the settings give the number of
    actors. On a cluster, only the CPUs of nodes with GPUs count.
    """
    placement, clients = prepared.settings.placement, prepared.settings.clients
    if placement.actors is not None:
        return -(-placement.actors // placement.gpus)
    if placement.clients_per_actor != "auto":
        actors = -(-clients // int(placement.clients_per_actor))
        return -(-actors // placement.gpus)
    stacks = clients - sum(len(stack) - 1 for stack in prepared.factory.stacks)
    cpus = sum(node.cpus for node in supply.nodes if node.gpus >= 1) if supply.nodes else supply.cpus
    return max(1, min(-(-stacks // placement.gpus), int(cpus) // placement.gpus))


def choose_actors_per_gpu(
    prepared: PreparedRun, upper: int, cpus: float, known: dict[str, Footprint], clear: Callable[[], object]
) -> tuple[Placement, str]:
    """Return the placement with a number for `actors_per_gpu`, and a line for the log.

    Args:
        prepared: the run.
        upper: the upper limit of actors per GPU; see `max_actors_per_gpu`.
        cpus: the CPUs in total.
        known: results of earlier dry runs, which are reused for runs whose clients need the same memory.
        clear: called before a dry run, to free a GPU for it.
    """
    settings = {k: v for k, v in fixed_settings(prepared.settings).items() if k.partition(".")[0] not in IRRELEVANT}
    key = repr((settings, [len(trial.unit) for trial in trials(prepared)]))
    if key not in known:
        clear()
        known[key] = footprint(prepared, cpus)
    found, placement = known[key], prepared.settings.placement
    data = (prepared.dataset.x.nbytes + prepared.dataset.y.nbytes) / placement.gpus  # spread over all GPUs
    per_gpu = min(found.fit(data), upper)
    return replace(placement, actors_per_gpu=per_gpu), found.describe(per_gpu)
