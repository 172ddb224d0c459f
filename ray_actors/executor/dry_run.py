"""What a client takes of a GPU's memory, measured before a run, and how many actors therefore share one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from pflsim.config.settings import Placement
from pflsim.data.dataset import Dataset
from pflsim.data.federated import AT_ONCE, Examples, Partition
from pflsim.engine.execution import EvalRequest
from pflsim.errors import RunError, SettingsError
from pflsim.run_folder.resume import fixed_settings
from ray_actors.hosts.client_errors import in_words
from ray_actors.hosts.client_factory import ClientFactory
from ray_actors.hosts.client_host import ClientHost
from ray_actors.hosts.gpu import CONTEXT_MB
from ray_actors.hosts.server_host import ServerHost
from ray_actors.placement.layout import Supply
from ray_actors.prepare import PreparedRun

FILLED = 0.9
"""Of a GPU's memory: the rest is for what fragments, and for what the dry run has not seen."""
BATCHES = 3
"""Mini-batches of the dry run; the first is as large as any, and by the third every buffer is there."""
COHORTS = 1000
"""Rounds in which is looked for the most clients that train together."""
FREE_S = 120.0
"""How long the dry run's actor may take to be up."""
WEIGHTLESS = ("seed", "rounds", "lr", "lr_decay", "weight_decay", "on_nonfinite", "fraction", "faults", "trace")
"""Settings, and groups of them, that change nothing in what a client takes; see `_key`."""


class Memory(Protocol):
    """Of a GPU, in bytes."""

    def begin(self) -> None:
        """What was in use until now and is not any more does not count."""
        ...

    def peak(self) -> int:
        """The most that this process has held since."""
        ...

    def total(self) -> int:
        """Of the GPU."""
        ...


class CudaMemory:
    """Of the first GPU that this process is shown, as torch counts it; CUDA itself comes on top."""

    def begin(self) -> None:
        """Give back what is only held for later."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)

    def peak(self) -> int:
        """The most that torch has reserved."""
        return torch.cuda.max_memory_reserved(0)

    def total(self) -> int:
        """Of the card."""
        return torch.cuda.get_device_properties(0).total_memory


MEMORY: Memory = CudaMemory()


class Footprint(NamedTuple):
    """What working for some clients at once took.

    Args:
        clients: how many trained together, 1 where each trains alone.
        peak: bytes of a GPU, with what CUDA itself takes.
        total: bytes of that GPU.
    """

    clients: int
    peak: int
    total: int

    def fit(self, data: float) -> int:
        """How many actors fit on one GPU, beside the data of their clients, in bytes; at least 1."""
        return max(1, int((FILLED * self.total - data) // self.peak))

    def told(self, per_gpu: int) -> str:
        """In a line, with how many actors share a GPU."""
        who = "one client takes" if self.clients == 1 else f"a stack of {self.clients} clients takes"
        actors = "1 actor has it" if per_gpu == 1 else f"{per_gpu} actors share it"
        return f"{who} {self.peak / 2**20:.0f} MiB of {self.total / 2**30:.0f} GiB on the GPU: {actors}"


@dataclass(frozen=True, slots=True)
class Trial:
    """Those whose work is tried: one unit for each variant of the model, with how much of it."""

    stack: tuple[int, ...]
    """The whole stack that it belongs to."""
    unit: tuple[int, ...]
    """Who of it trains together."""
    work: float
    """The share of its mini-batches."""


def trials(job: PreparedRun) -> list[Trial]:
    """For each variant of the model the largest unit of any round, and of those the one with the most examples."""
    sizes = [len(rows) for rows in job.partition.train]
    best: dict[int, tuple[int, ...]] = {}
    for cohort in sorted(set(job.plan.cohorts[:COHORTS])):
        for unit in job.factory.units(cohort):
            variant = job.factory.variant_of(unit[0])
            if variant not in best or _size(unit, sizes) > _size(best[variant], sizes):
                best[variant] = unit
    whole = {client: stack for stack in job.factory.stacks for client in stack}
    return [
        Trial(whole.get(unit[0], unit), unit, min(1.0, BATCHES / max(job.work[c] for c in unit)))
        for _, unit in sorted(best.items())
    ]


def _size(unit: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    return len(unit), sum(sizes[client] for client in unit)


def measure(
    factory: ClientFactory,
    dataset: Dataset,
    partition: Partition,
    server: ServerHost,
    tried: Sequence[Trial],
    memory: Memory,
) -> Footprint:
    """Train each of them for a few mini-batches and evaluate one batch; what took the most is what counts.

    Args:
        factory: of the run, with a whole GPU.
        dataset: of the run.
        partition: of the run.
        server: has the state that the run begins with; this changes it.
        tried: whose work.
        memory: of the GPU that the recipe works on.
    """
    found: list[Footprint] = []
    for trial in tried:
        memory.begin()
        host = ClientHost(factory, dataset, partition, trial.stack)
        if server.rule.initial_round:
            server.fuse(host.open(trial.unit)[0])
        messages = server.downlinks(trial.unit)
        share = dict.fromkeys(trial.unit, trial.work)
        host.train(1, trial.unit, range(len(trial.unit)), *messages.values(), work=share)
        client = trial.unit[0]
        own, most = host.shards[client], factory.eval_batch_size or AT_ONCE[host.device.type]
        host.shards[client] = replace(own, test=_first(own.test, most))
        host.evaluate(EvalRequest("personal", "trained", (client,), ("test",)), (client,), ())
        found.append(Footprint(len(trial.unit), memory.peak() + CONTEXT_MB * 2**20, memory.total()))
        del host, own
    return max(found, key=lambda f: f.peak)


def _first(examples: Examples, most: int) -> Examples:
    return replace(examples, x=examples.x[:most], y=examples.y[:most])


class DryRunner:
    """A process of its own for a dry run: nothing of it is left when it ends, and no other random state is touched."""

    def up(self) -> bool:
        """Answers when it is."""
        return True

    def measure(
        self,
        factory: ClientFactory,
        dataset: Dataset,
        partition: Partition,
        server: Any,
        tried: list[Trial],
        memory: Memory,
    ) -> Footprint | str:
        """See `measure`; a failure in words."""
        try:
            return measure(factory, dataset, partition, ServerHost(*server), tried, memory)
        except Exception as error:
            return in_words(error)


def footprint(job: PreparedRun, cpus: float) -> Footprint:
    """Measure in an actor that has a GPU to itself, and end it.

    On a cluster it is one GPU of those that are free, which stands for all: each actor is held to its share of its own.

    Args:
        job: the run.
        cpus: that there are.

    Raises:
        SettingsError: no GPU is free.
        RunError: a client cannot be trained on one.
    """
    runner: Any = ray.remote(num_cpus=min(1.0, cpus), num_gpus=1)(DryRunner).remote()
    try:
        if not ray.wait([runner.up.remote()], timeout=FREE_S)[0]:
            raise SettingsError(
                f"placement.actors_per_gpu=auto: no GPU was free for a dry run within {FREE_S:g} s; give a number"
            )
        parts = (
            job.factory.seated(1.0),
            job.dataset,
            job.partition,
            (job.rule, job.federation, job.factory.threads),
        )
        found: Footprint | str = ray.get(runner.measure.remote(*parts, trials(job), MEMORY))
    except RayTaskError as error:
        found = in_words(error.cause if isinstance(error.cause, Exception) else error)
    except RayError as error:
        raise RunError(f"placement.actors_per_gpu=auto: the dry run's actor died: {error}") from None
    finally:
        ray.kill(runner)
    if isinstance(found, str):
        raise RunError(f"placement.actors_per_gpu=auto: the dry run failed: {found}")
    return found


def most_per_gpu(job: PreparedRun, supply: Supply) -> int:
    """How many actors there could be for each GPU, whatever its memory: no more than are wanted, or a CPU each.

    An actor keeps about one CPU busy with telling the GPU what to do, so that more of them would wait for each other.
    Where a number of actors was asked for, they share the CPUs as everywhere. On a cluster only the CPUs of nodes with
    GPUs count.
    """
    placement, clients = job.settings.placement, job.settings.clients
    if placement.actors is not None:
        return -(-placement.actors // placement.gpus)
    if placement.clients_per_actor != "auto":
        actors = -(-clients // int(placement.clients_per_actor))
        return -(-actors // placement.gpus)
    parts = clients - sum(len(stack) - 1 for stack in job.factory.stacks)
    cpus = sum(node.cpus for node in supply.nodes if node.gpus >= 1) if supply.nodes else supply.cpus
    return max(1, min(-(-parts // placement.gpus), int(cpus) // placement.gpus))


class DryRuns:
    """Measures what must be measured, once for runs that differ only in what takes no memory."""

    def __init__(self) -> None:
        self._known: dict[str, Footprint] = {}

    def decide(self, job: PreparedRun, most: int, cpus: float, clear: Callable[[], None]) -> tuple[Placement, str]:
        """The placement with a number for `actors_per_gpu`, and what is said of it.

        Args:
            job: the run, with "auto".
            most: so many actors could be on a GPU; see `most_per_gpu`.
            cpus: that there are.
            clear: is called before something is measured, for which a GPU must be free.
        """
        key = _key(job)
        if key not in self._known:
            clear()
            self._known[key] = footprint(job, cpus)
        found, placement = self._known[key], job.settings.placement
        data = (job.dataset.x.nbytes + job.dataset.y.nbytes) / placement.gpus  # all of it, on one GPU or another
        per_gpu = min(found.fit(data), most)
        return replace(placement, actors_per_gpu=per_gpu), found.told(per_gpu)


def _key(job: PreparedRun) -> str:
    """Equal for runs whose clients take the same memory: of the seed only how many train together counts."""
    settings = {k: v for k, v in fixed_settings(job.settings).items() if k.partition(".")[0] not in WEIGHTLESS}
    return repr((settings, [len(trial.unit) for trial in trials(job)]))
