"""The second baseline: FedAvg on two plain Ray workers, which receive weights as numpy arrays; the driver averages."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cases import CORES
from benchmarks.speed.plain import evaluate, loaders, train_client
from benchmarks.speed.rounds import Round, check_steps, digest
from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.prepare import PreparedRun
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition

Arrays = list[np.ndarray]
Fit = tuple[int, Arrays, tuple[int, int], tuple[int, int]]
"""The client, its weights, its steps and examples, its correct and all test examples."""


class Worker:
    """Holds a model and the data loaders of all clients; a free worker gets the next client. Uses one thread."""

    def __init__(self, factory: ClientFactory, dataset: Dataset, partition: Partition):
        torch.set_num_threads(1)
        torch.manual_seed(factory.seed)
        module = factory.build()
        self.net, self.training, self.smallest = module.net, factory.training, module.smallest_batch
        clients, batch_size = range(partition.clients), factory.training.batch_size
        self.clients = [loaders(dataset, partition, client, batch_size) for client in clients]

    def weights(self) -> Arrays:
        """Return the weights of the model."""
        return [value.numpy().copy() for value in self.net.state_dict().values()]

    def load(self, weights: Sequence[np.ndarray]) -> None:
        """Load weights, copied because arrays from Ray are read-only."""
        names = self.net.state_dict()
        self.net.load_state_dict({n: torch.from_numpy(w.copy()) for n, w in zip(names, weights, strict=True)})

    def fit(self, weights: Sequence[np.ndarray], client: int) -> Fit:
        """Train a client from these weights and evaluate the result on its test examples."""
        self.load(weights)
        train, test = self.clients[client]
        work = train_client(self.net, train, self.training, self.smallest)
        return client, self.weights(), work, evaluate(self.net, test)

    def evaluate(self, weights: Sequence[np.ndarray], client: int) -> tuple[int, int]:
        """Return the numbers of correct and of all test examples of a client."""
        self.load(weights)
        return evaluate(self.net, self.clients[client][1])


def mean(weights: Sequence[Arrays], sizes: Sequence[int]) -> Arrays:
    """Return the mean weighted by examples; other than floating-point arrays are the first one's."""
    shares = [size / sum(sizes) for size in sizes]
    return [
        sum(share * part for share, part in zip(shares, parts, strict=True)).astype(parts[0].dtype)  # type: ignore[union-attr]
        if parts[0].dtype.kind == "f"
        else parts[0]
        for parts in zip(*weights, strict=True)
    ]


class Driver:
    """Starts Ray with two workers, and holds the weights."""

    def __init__(self, prepared: PreparedRun):
        import ray
        from ray.util import ActorPool

        start_ray(prepared)
        data, rows = ray.put(prepared.dataset), ray.put(prepared.partition)
        workers: list[Any] = [ray.remote(num_cpus=1)(Worker).remote(prepared.factory, data, rows) for _ in range(CORES)]
        self.weights: Arrays = ray.get([worker.weights.remote() for worker in workers])[0]  # waits for both
        self.pool = ActorPool(workers)
        self.clients, self.sizes = (
            list(range(prepared.partition.clients)),
            [len(rows) for rows in prepared.partition.train],
        )

    def round(self) -> tuple[Round, float]:
        """Train, average, and evaluate all client models and the mean; return figures and the mean's accuracy."""
        start = time.perf_counter()
        fits: list[Fit] = self._all("fit")
        fits.sort(key=lambda fit: fit[0])
        trained = time.perf_counter()
        self.weights = mean([fit[1] for fit in fits], self.sizes)
        fused = time.perf_counter()
        evaluated: list[tuple[int, int]] = self._all("evaluate")
        end = time.perf_counter()
        seconds = {"train": trained - start, "fuse": fused - trained, "evaluate": end - fused, "total": end - start}
        moved = float(len(fits) * sum(part.nbytes for part in self.weights))
        counts = {
            "steps": sum(fit[2][0] for fit in fits),
            "examples": sum(fit[2][1] for fit in fits),
            "evaluated": sum(total for _, total in [*evaluated, *(fit[3] for fit in fits)]),
            "up_bytes": moved,
            "down_bytes": moved,
        }
        return {**seconds, **counts}, sum(correct for correct, _ in evaluated) / sum(total for _, total in evaluated)

    def _all(self, method: str) -> list[Any]:
        """Call a method of the workers for all clients; return the results in the order of completion."""
        import ray

        sent = ray.put(self.weights)
        return list(self.pool.map_unordered(lambda worker, c: getattr(worker, method).remote(sent, c), self.clients))


def start_ray(prepared: PreparedRun) -> None:
    """Start Ray on this machine with the object store that pflsim would use."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=CORES,
        num_gpus=0,
        include_dashboard=False,
        logging_level=logging.WARNING,
    )


def measure(prepared: PreparedRun) -> dict[str, Any]:
    """Run all rounds; return the figures."""
    import ray

    driver = Driver(prepared)
    made = [driver.round() for _ in range(prepared.settings.rounds)]
    ray.shutdown()
    rounds = [done for done, _ in made]
    check_steps(prepared, rounds)
    return digest(prepared, rounds, accuracy=made[-1][1], cores=CORES)
