"""Measures seconds per round and bytes between nodes with 100 clients: `python -m benchmarks.speed.nodes --root DIR`.

The nodes are network namespaces of this machine with one CPU each. They share two cores, so only the bytes are those of
a real cluster, not the seconds. The kernel counts the bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cases import ROOT
from benchmarks.speed.report import put, table
from benchmarks.tools.loopback import Cluster
from pflsim.records.environment import code

PAGE, FIGURES = ROOT / "docs" / "cluster.md", ROOT / "docs" / "cluster.json"
CLIENTS, FIRST, LAST = 100, 5, 15
"""The first rounds are not measured: they trace programs and open connections."""
METHODS = ("fedavg", "pfedcfr")
RUN = ("model=dnn", f"clients={CLIENTS}", f"rounds={LAST}", "local_steps=10", "eval.every=5", "progress=plain")
STORE_MB = 700


@dataclass(frozen=True)
class Figures:
    """The figures of one run per round: medians of the seconds, means of the bytes.

    Args:
        method, nodes: the method, and the number of nodes.
        seconds: a round without evaluation.
        train, fuse: local training and fusion in it.
        moved: bytes between the nodes, including an evaluation every 5 rounds.
        messages: bytes of the messages of all clients, up and down, as recorded.
    """

    method: str
    nodes: int
    seconds: float
    train: float
    fuse: float
    moved: float
    messages: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.nodes", description=__doc__)
    parser.add_argument("--root", default="data", help="folder of MNIST/raw (default: %(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args(arguments)
    root = Path(given.root).resolve()
    if not (root / "MNIST" / "raw").is_dir():
        print(f"error: no MNIST/raw in {root}: set --root", file=sys.stderr)
        return 2
    found = []
    for nodes in given.nodes:
        with Cluster(nodes) as cluster:
            if not cluster.isolated:
                print(
                    "error: cannot create network namespaces to count bytes: run as root",
                    file=sys.stderr,
                )
                return 1
            cluster.start(*[1] * nodes, store_mb=STORE_MB)
            for method in METHODS:
                found.append(measure(cluster, nodes, method, root))
                print(found[-1], flush=True)
    FIGURES.write_text(json.dumps({"code": code(), "figures": [asdict(one) for one in found]}, indent=1) + "\n")
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), {"nodes": shown(found)}), encoding="utf-8")
    return 0


def measure(cluster: Cluster, nodes: int, method: str, root: Path) -> Figures:
    """Run a method on all nodes of a cluster, with the driver and the server on the head."""
    run = cluster.launch(
        f"method={method}", "data=mnist", f"data.root={root}", *RUN, f"ray_address={cluster.address}",
        "placement.strategy=spread", f"placement.actors={nodes}", f"run_dir={method}",
    )  # fmt: skip
    assert run.stdout is not None
    output, counted = [], {}
    for line in run.stdout:
        output.append(line)
        for number in (FIRST, LAST):
            if line.startswith(f"round {number:2}/"):
                counted[number] = sum(node.moved_bytes() for node in cluster.nodes[1:nodes])
    if run.wait() != 0:
        raise RuntimeError("".join(output))
    lines = (cluster.head.home / method / "metrics.jsonl").read_text().splitlines()
    rounds = [one for one in map(json.loads, lines) if one["round"] > FIRST]
    plain = [one["seconds"] for one in rounds if one["round"] % 5]
    messages = statistics.mean(one["traffic"]["up_bytes"] + one["traffic"]["down_bytes"] for one in rounds)
    return Figures(
        method,
        nodes,
        statistics.median(one["total"] for one in plain),
        statistics.median(one["train"] for one in plain),
        statistics.median(one["fuse"] for one in plain),
        (counted[LAST] - counted[FIRST]) / (LAST - FIRST),
        messages,
    )


def shown(found: Sequence[Figures]) -> str:
    """Return the figures as a Markdown table."""
    header = ("method", "nodes", "seconds a round", "training", "fusion", "MB between nodes", "MB of messages")
    ordered = sorted(found, key=lambda one: (METHODS.index(one.method), one.nodes))
    seconds = [[f"{value:.2f}" for value in (one.seconds, one.train, one.fuse)] for one in ordered]
    megabytes = [[f"{value / 1e6:.1f}" for value in (one.moved, one.messages)] for one in ordered]
    rows = [[one.method, str(one.nodes), *s, *m] for one, s, m in zip(ordered, seconds, megabytes, strict=True)]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
