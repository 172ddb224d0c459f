"""Measures other simulators beside ours: `python -m benchmarks.peers OVERRIDES --flower PYTHON --pfl PYTHON`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cases import EXECUTION, ROOT, settings_of
from benchmarks.peers.nets import MAKE
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.data.federated import shard

PEERS = {"flower": "flower.py", "pfl": "pfl_research.py"}


def main() -> None:
    """Run ours and the peers in turns, each run in its own process, and print seconds per round and ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("overrides", nargs="+", help="settings of the run, as for launch.py, without executor")
    parser.add_argument("--net", choices=MAKE, default="mlp", help="the peers' model, of the same size as ours")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--both", action="store_true", help="the peers evaluate the clients' own models too, as ours")
    for peer in PEERS:
        parser.add_argument(f"--{peer}", metavar="PYTHON", help="Python of an environment in which it is installed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case.pt"
        write_case(prepare(settings_of(given.overrides)), given, case)
        programs = {"pflsim": [sys.executable, "-m", "benchmarks.peers.ours", *given.overrides, *EXECUTION["ray2"]]}
        for peer, script in PEERS.items():
            if python := getattr(given, peer):
                programs[peer] = [python, str(ROOT / "benchmarks" / "peers" / script), str(case)]
        times: dict[str, list[float]] = {name: [] for name in programs}
        reached: dict[str, float] = {}
        for _ in range(given.turns):
            for name, command in programs.items():
                rounds = measured(command, Path(folder) / f"{name}.json")
                times[name] += [done["seconds"] for done in rounds[1:]]
                reached[name] = rounds[-1]["accuracy"]
    ours = median(times["pflsim"])
    for name, seconds in times.items():
        middle = median(seconds)
        spread = f"{min(seconds):.3g} to {max(seconds):.3g}"
        print(f"{name:8} {middle:.3g} s a round ({spread}), {middle / ours:.2f} of ours; accuracy {reached[name]:.3f}")


def write_case(prepared: PreparedRun, given: argparse.Namespace, path: Path) -> None:
    """Write the clients' examples and the training's settings for the peers."""
    settings, training = prepared.settings, prepared.factory.training
    count = sum(p.numel() for p in prepared.factory.build().net.parameters())
    assert count == sum(p.numel() for p in MAKE[given.net]().parameters()), f"--net: not of {count} entries"
    shards = [shard(prepared.dataset, prepared.partition, c) for c in range(prepared.partition.clients)]
    examples = {k: [tuple(getattr(s, k).batch(slice(None))) for s in shards] for k in ("train", "test")}
    fixed = {"model": given.net, "rounds": settings.rounds, "fraction": settings.fraction, "both": given.both}
    steps = {"batch_size": training.batch_size, "lr": training.lr, "epochs": training.local_epochs}
    torch.save({**examples, **fixed, **steps}, path)


def measured(command: list[str], out: Path) -> list[dict[str, Any]]:
    """Run a program that writes its rounds to `out`; return them."""
    paths = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run([*command, str(out)], env={**os.environ, **paths}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return list(json.loads(out.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
