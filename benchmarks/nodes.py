"""Seconds a round and bytes between nodes, for 100 clients: `python -m benchmarks.nodes --root DIR`.

The nodes are network namespaces of this machine, with one CPU each, so that only the bytes and the order of things are
those of a real cluster; three nodes share two cores. The kernel counts the bytes.
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
from benchmarks.loopback import Cluster
from benchmarks.report import put, table
from pflsim.run_folder.environment import code

PAGE, FIGURES = ROOT / "docs" / "cluster.md", ROOT / "docs" / "cluster.json"
CLIENTS, FIRST, LAST = 100, 5, 15
"""Rounds before the first are not counted, in which programs are traced and connections made."""
METHODS = ("fedavg", "pfedcfr")
RUN = ("model=dnn", f"clients={CLIENTS}", f"rounds={LAST}", "local_steps=10", "eval.every=5", "progress=plain")
STORE_MB = 700


@dataclass(frozen=True)
class Figures:
    """Of one run, a round: medians of seconds, the mean of the bytes between nodes.

    Args:
        method, nodes: of the run.
        seconds: of a round that is not evaluated.
        train, fuse: of that.
        moved: bytes between nodes, evaluations every 5 rounds included.
        told: bytes of messages, as the records have them, both ways and all clients.
    """

    method: str
    nodes: int
    seconds: float
    train: float
    fuse: float
    moved: float
    told: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__)
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
                print("error: network namespaces cannot be made here, and bytes not be counted", file=sys.stderr)
                return 1
            cluster.start(*[1] * nodes, store_mb=STORE_MB)
            for method in METHODS:
                found.append(measure(cluster, nodes, method, root))
                print(found[-1], flush=True)
    FIGURES.write_text(json.dumps({"code": code(), "figures": [asdict(one) for one in found]}, indent=1) + "\n")
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), {"nodes": shown(found)}), encoding="utf-8")
    return 0


def measure(cluster: Cluster, nodes: int, method: str, root: Path) -> Figures:
    """Run a method on all nodes of a cluster, the driver and the server on its head."""
    run = cluster.launch(
        f"method={method}", "data=mnist", f"data.root={root}", *RUN, f"ray_address={cluster.address}",
        "placement.strategy=spread", f"placement.actors={nodes}", f"run_dir={method}",
    )  # fmt: skip
    assert run.stdout is not None
    said, counted = [], {}
    for line in run.stdout:
        said.append(line)
        for number in (FIRST, LAST):
            if line.startswith(f"round {number:2}/"):
                counted[number] = sum(node.moved_bytes() for node in cluster.nodes[1:nodes])
    if run.wait() != 0:
        raise RuntimeError("".join(said))
    lines = (cluster.head.home / method / "metrics.jsonl").read_text().splitlines()
    rounds = [one for one in map(json.loads, lines) if one["round"] > FIRST]
    plain = [one["seconds"] for one in rounds if one["round"] % 5]
    told = statistics.mean(one["traffic"]["up_bytes"] + one["traffic"]["down_bytes"] for one in rounds)
    return Figures(
        method,
        nodes,
        statistics.median(one["total"] for one in plain),
        statistics.median(one["train"] for one in plain),
        statistics.median(one["fuse"] for one in plain),
        (counted[LAST] - counted[FIRST]) / (LAST - FIRST),
        told,
    )


def shown(found: Sequence[Figures]) -> str:
    """Markdown."""
    header = ("method", "nodes", "seconds a round", "training", "fusion", "MB between nodes", "MB of messages")
    ordered = sorted(found, key=lambda one: (METHODS.index(one.method), one.nodes))
    seconds = [[f"{value:.2f}" for value in (one.seconds, one.train, one.fuse)] for one in ordered]
    megabytes = [[f"{value / 1e6:.1f}" for value in (one.moved, one.told)] for one in ordered]
    rows = [[one.method, str(one.nodes), *s, *m] for one, s, m in zip(ordered, seconds, megabytes, strict=True)]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
