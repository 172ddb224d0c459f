"""Measures the machine: the rate of float32 matrix products on one core, and on two cores at once."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from benchmarks.cases import CORES

SIZES = (1024, 1536, 2048)
SECONDS = 0.7
"""Duration of the measurement of each size."""


def rates(seconds: float = SECONDS, sizes: tuple[int, ...] = SIZES) -> dict[str, float]:
    """Return the GFLOP/s of one single-threaded process, and of two together, each at its best size."""
    return {"one": _together(1, seconds, sizes), "two": _together(CORES, seconds, sizes)}


def _together(processes: int, seconds: float, sizes: tuple[int, ...]) -> float:
    """Return the best total over all sizes of processes that multiply at the same time."""
    spawn = multiprocessing.get_context("spawn")
    barrier, queue = spawn.Barrier(processes), spawn.Queue()
    started = [spawn.Process(target=_multiply, args=(barrier, queue, seconds, sizes)) for _ in range(processes)]
    for process in started:
        process.start()
    found = [queue.get(timeout=120) for _ in started]
    for process in started:
        process.join()
    return max(map(sum, zip(*found, strict=True)))


def _multiply(barrier: Barrier, queue: Queue[list[float]], seconds: float, sizes: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    found = []
    for n in sizes:
        a, b, c = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)
        torch.mm(a, b, out=c)
        barrier.wait()
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds or not count:
            torch.mm(a, b, out=c)
            count += 1
        found.append(2 * n**3 * count / passed / 1e9)
    queue.put(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.machine")
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_text(json.dumps(rates()))
