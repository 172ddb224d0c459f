"""The first baseline: FedAvg in one process, written as in most public codes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.rounds import Round, check_steps, digest
from lightning_modules.prepare import PreparedRun
from lightning_modules.training import Training
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, shard

EVAL_BATCH = 64
State = dict[str, Tensor]
Loader = DataLoader[tuple[Tensor, ...]]


def loaders(dataset: Dataset, partition: Partition, client: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return data loaders of a client's training and test examples, as float tensors."""
    own = shard(dataset, partition, client)
    train, test = (TensorDataset(*part.batch(slice(None))) for part in (own.train, own.test))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, EVAL_BATCH)


def train_client(model: nn.Module, loader: Loader, training: Training, smallest: int) -> tuple[int, int]:
    """Train for the local epochs; return steps and examples. Skip batches below `smallest`, as pflsim does."""
    optimizer = torch.optim.SGD(model.parameters(), training.lr, training.momentum, weight_decay=training.weight_decay)
    criterion = nn.CrossEntropyLoss()
    model.train()
    device = next(model.parameters()).device
    steps = examples = 0
    for _ in range(training.local_epochs):
        for inputs, labels in loader:
            if len(labels) < smallest:
                continue
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            steps, examples = steps + 1, examples + len(labels)
    return steps, examples


def average(states: Sequence[State], sizes: Sequence[int]) -> State:
    """Return the mean of state_dicts, weighted by examples; other than floating-point tensors are the first one's."""
    total = sum(sizes)
    mean = {name: value.clone() for name, value in states[0].items()}
    for name, value in mean.items():
        if value.is_floating_point():
            value.zero_()
            for state, size in zip(states, sizes, strict=True):
                value += state[name] * (size / total)
    return mean


def evaluate(model: nn.Module, loader: Loader) -> tuple[int, int]:
    """Return the numbers of correct and of all test examples."""
    model.eval()
    device = next(model.parameters()).device
    correct = total = 0
    with torch.no_grad():
        for inputs, labels in loader:
            correct += int((model(inputs.to(device)).argmax(1) == labels.to(device)).sum())
            total += len(labels)
    return correct, total


class PlainLoop:
    """Holds the server's model, on the device, and the data loaders of all clients."""

    def __init__(self, prepared: PreparedRun, device: str = "cpu"):
        torch.manual_seed(prepared.settings.seed)
        module = prepared.factory.build()
        self.server: nn.Module = module.net.to(device)
        self.training, self.smallest = prepared.factory.training, module.smallest_batch
        batch_size, clients = self.training.batch_size, range(prepared.partition.clients)
        self.clients = [loaders(prepared.dataset, prepared.partition, c, batch_size) for c in clients]
        self.sizes = [len(rows) for rows in prepared.partition.train]
        self.message = sum(t.numel() * t.element_size() for t in self.server.state_dict().values())

    def round(self) -> tuple[Round, float]:
        """Train, average, and evaluate all client models and the mean; return figures and the mean's accuracy."""
        start = time.perf_counter()
        models, work = [], []
        for train, _ in self.clients:
            model = deepcopy(self.server)
            work.append(train_client(model, train, self.training, self.smallest))
            models.append(model)
        trained = time.perf_counter()
        self.server.load_state_dict(average([model.state_dict() for model in models], self.sizes))
        fused = time.perf_counter()
        own = [evaluate(model, test) for model, (_, test) in zip(models, self.clients, strict=True)]
        mean_counts = [evaluate(self.server, test) for _, test in self.clients]
        end = time.perf_counter()
        seconds = {"train": trained - start, "fuse": fused - trained, "evaluate": end - fused, "total": end - start}
        steps, examples = (sum(counts) for counts in zip(*work, strict=True))
        evaluated = sum(total for _, total in own + mean_counts)
        moved = float(len(models) * self.message)
        counts = {"steps": steps, "examples": examples, "evaluated": evaluated, "up_bytes": moved, "down_bytes": moved}
        return {**seconds, **counts}, sum(c for c, _ in mean_counts) / sum(n for _, n in mean_counts)


def measure(prepared: PreparedRun, threads: int) -> dict[str, Any]:
    """Run all rounds with a number of torch threads; return the figures."""
    torch.set_num_threads(threads)
    loop = PlainLoop(prepared)
    made = [loop.round() for _ in range(prepared.settings.rounds)]
    rounds = [done for done, _ in made]
    check_steps(prepared, rounds)
    return digest(prepared, rounds, accuracy=made[-1][1], cores=threads)
