"""The second yardstick: FedAvg over two plain Ray workers, weights sent as numpy arrays, averaged in the driver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cases import CORES
from benchmarks.plain import evaluate, loaders, train_client
from benchmarks.rounds import Round, check_steps, digest
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from ray_actors.hosts.client_factory import ClientFactory
from ray_actors.prepare import PreparedRun

Arrays = list[np.ndarray]
Fit = tuple[int, Arrays, tuple[int, int], tuple[int, int]]
"""Client, its weights, steps and examples, right and all test examples."""


class Worker:
    """One model, one thread, the loaders of all clients: whoever is free takes the next client."""

    def __init__(self, factory: ClientFactory, dataset: Dataset, partition: Partition):
        torch.set_num_threads(1)
        torch.manual_seed(factory.seed)
        module = factory.build()
        self.net, self.training, self.smallest = module.net, factory.training, module.smallest_batch
        clients, batch_size = range(partition.clients), factory.training.batch_size
        self.clients = [loaders(dataset, partition, client, batch_size) for client in clients]

    def weights(self) -> Arrays:
        """The model's values."""
        return [value.numpy().copy() for value in self.net.state_dict().values()]

    def take(self, weights: Sequence[np.ndarray]) -> None:
        """Load values; those from Ray are read-only, hence the copies."""
        names = self.net.state_dict()
        self.net.load_state_dict({n: torch.from_numpy(w.copy()) for n, w in zip(names, weights, strict=True)})

    def fit(self, weights: Sequence[np.ndarray], client: int) -> Fit:
        """Train a client from these weights and judge the outcome on its test examples."""
        self.take(weights)
        train, test = self.clients[client]
        work = train_client(self.net, train, self.training, self.smallest)
        return client, self.weights(), work, evaluate(self.net, test)

    def request(self, weights: Sequence[np.ndarray], client: int) -> tuple[int, int]:
        """Right and all test examples of a client, by these weights."""
        self.take(weights)
        return evaluate(self.net, self.clients[client][1])


def mean(weights: Sequence[Arrays], sizes: Sequence[int]) -> Arrays:
    """The mean weighted by examples; what is no floating-point number is the first one's."""
    shares = [size / sum(sizes) for size in sizes]
    return [
        sum(share * part for share, part in zip(shares, parts, strict=True)).astype(parts[0].dtype)  # type: ignore[union-attr]
        if parts[0].dtype.kind == "f"
        else parts[0]
        for parts in zip(*weights, strict=True)
    ]


class Driver:
    """Two workers on a Ray of their own, and the weights."""

    def __init__(self, job: PreparedRun):
        import ray
        from ray.util import ActorPool

        start_ray(job)
        data, rows = ray.put(job.dataset), ray.put(job.partition)
        workers: list[Any] = [ray.remote(num_cpus=1)(Worker).remote(job.factory, data, rows) for _ in range(CORES)]
        self.weights: Arrays = ray.get([worker.weights.remote() for worker in workers])[0]  # both are up now
        self.pool = ActorPool(workers)
        self.clients, self.sizes = list(range(job.partition.clients)), [len(rows) for rows in job.partition.train]

    def round(self) -> tuple[Round, float]:
        """Train, average, evaluate every client's model and the mean; what it took, and the mean's accuracy."""
        start = time.perf_counter()
        fits: list[Fit] = self._all("fit")
        fits.sort(key=lambda fit: fit[0])
        trained = time.perf_counter()
        self.weights = mean([fit[1] for fit in fits], self.sizes)
        fused = time.perf_counter()
        judged: list[tuple[int, int]] = self._all("judge")
        end = time.perf_counter()
        seconds = {"train": trained - start, "fuse": fused - trained, "evaluate": end - fused, "total": end - start}
        moved = float(len(fits) * sum(part.nbytes for part in self.weights))
        counts = {
            "steps": sum(fit[2][0] for fit in fits),
            "examples": sum(fit[2][1] for fit in fits),
            "evaluated": sum(total for _, total in [*judged, *(fit[3] for fit in fits)]),
            "up_bytes": moved,
            "down_bytes": moved,
        }
        return {**seconds, **counts}, sum(right for right, _ in judged) / sum(total for _, total in judged)

    def _all(self, method: str) -> list[Any]:
        """Have the workers do it for all clients with the weights as they are; in the order in which they are done."""
        import ray

        sent = ray.put(self.weights)
        return list(self.pool.map_unordered(lambda worker, c: getattr(worker, method).remote(sent, c), self.clients))


def start_ray(job: PreparedRun) -> None:
    """A Ray on this machine with as much store as ours has."""
    import ray

    from ray_actors.run import store_mb

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_cpus=CORES,
        num_gpus=0,
        object_store_memory=store_mb(job) * 2**20,
        include_dashboard=False,
        logging_level=logging.WARNING,
    )


def measure(job: PreparedRun) -> dict[str, Any]:
    """All rounds of a job."""
    import ray

    driver = Driver(job)
    made = [driver.round() for _ in range(job.settings.rounds)]
    ray.shutdown()
    rounds = [done for done, _ in made]
    check_steps(job, rounds)
    return digest(job, rounds, accuracy=made[-1][1], cores=CORES)
