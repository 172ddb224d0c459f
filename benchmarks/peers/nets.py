"""The models and the work of a client for all peers; imports torch only, so that it runs in their environments."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MAKE = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    ),
    "lenet": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    ),
}  # fmt: skip


@cache
def work(path: str) -> dict[str, Any]:
    """Return the case that `python -m benchmarks.peers` wrote: clients' examples, model, batch size, rounds."""
    return dict(torch.load(path, mmap=True))


def train(net: nn.Module, case: dict[str, Any], client: int) -> int:
    """Train for the local epochs by plain SGD; return the number of examples."""
    examples = TensorDataset(*case["train"][client])
    loader = DataLoader(examples, case["batch_size"], shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), case["lr"])
    net.train()
    for _ in range(case["epochs"]):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    return len(examples)


def evaluate(net: nn.Module, case: dict[str, Any], client: int) -> tuple[int, int]:
    """Return the numbers of correct and of all test examples."""
    examples = TensorDataset(*case["test"][client])
    net.eval()
    with torch.no_grad():
        correct = sum(int((net(x).argmax(1) == y).sum()) for x, y in DataLoader(examples, 128))
    return correct, len(examples)


class Clock:
    """Writes when each round began and ended, with the accuracy after it."""

    def __init__(self, out: Path):
        self.out, self.rounds, self.start = out, [], time.perf_counter()

    def end(self, accuracy: float) -> None:
        """End a round, and begin the next."""
        now = time.perf_counter()
        self.rounds.append({"seconds": now - self.start, "accuracy": accuracy})
        self.start = now
        self.out.write_text(json.dumps(self.rounds) + "\n", encoding="utf-8")
