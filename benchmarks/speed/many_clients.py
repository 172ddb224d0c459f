"""Times a run with very many clients: `python -m benchmarks.speed.many_clients 100000 --method ditto`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

import pflsim
from pflsim.data.dataset import Dataset

PARTICIPANTS = 100
MODELS = {"linear": (20,), "mlp": (1, 28, 28)}
"""The shape of the inputs of each model."""


def main() -> int:
    """Run, and print the seconds of the start, of each round's parts, and of the end, the memory, and the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.many_clients", description=__doc__)
    parser.add_argument("clients", type=int)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--model", choices=MODELS, default="linear")
    parser.add_argument("--examples", type=int, default=8, help="of each client")
    parser.add_argument("--evaluated", default="1000", help="eval.clients")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rng, n = np.random.default_rng(0), given.clients * given.examples
    x = rng.standard_normal((n, *MODELS[given.model]), dtype=np.float32)
    y = (x.reshape(n, -1) @ rng.standard_normal((x[0].size, 2))).argmax(1)
    data = Dataset("random_rows", x, y, 2, n, clients=np.arange(n) // given.examples)
    settings = {"method": given.method, "model": given.model, "clients": given.clients, "rounds": given.rounds}
    settings |= {
        "fraction": PARTICIPANTS / given.clients,
        "eval.clients": given.evaluated if given.evaluated == "all" else int(given.evaluated),
        "batch_size": 4,
    }
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        run = pflsim.run(
            **settings, data=data, partition="by_client", split="merged", executor="inline", run_dir=f"{folder}/run"
        )
        files = len([*Path(run.folder).glob("checkpoints/*/*")])
    whole, rounds = time.perf_counter() - begun, run.summary["seconds"]
    seconds = run.metrics().filter(like="seconds").round(2).dropna(axis=1, how="all")
    sys.stdout.write(
        f"{json.dumps(settings)}\n{seconds.to_string()}\nbefore and after the rounds {whole - rounds:.1f} s, "
    )
    sys.stdout.write(f"rounds {rounds:.1f} s, {run.summary['peak_rss_mb'] / 1000:.1f} GB, {files} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
