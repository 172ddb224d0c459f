"""Runs on a real cluster of a few nodes, of which some are killed."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from failing_clients import set_trap
from launched import lines_until

from benchmarks.tools.loopback import RAY, Cluster, Node
from pflsim import cli

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SMALL = ["method=fedavg", "clients=6", "rounds=8", "lockstep=false", "model.hidden=[8]"]
"""States that Ray sends to the driver with its answers."""
LARGE = ["method=pfedcfr", "clients=6", "rounds=8", "lockstep=false", "model.hidden=[512]"]
"""States that stay on the nodes that made them."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head and up to three nodes."""
    with Cluster(nodes=4) as made:
        yield made


def the_rest(run: subprocess.Popen[str]) -> str:
    out, _ = run.communicate(timeout=300)
    return out


def inline(folder: Path, arguments: Sequence[str]) -> Path:
    """The same run in this process."""
    assert cli.main([*arguments, "executor=inline", f"run_dir={folder / 'inline'}", "progress=quiet"]) == 0
    return folder / "inline"


def assert_same(one: Path, other: Path) -> None:
    """Records and the last states, byte by byte."""
    assert (one / "per_client.csv").read_bytes() == (other / "per_client.csv").read_bytes()
    (last,) = sorted((one / "checkpoints").glob("round_*"))[-1:]
    names = sorted(path.name for path in last.glob("*.pt"))
    assert len(names) > 1
    for name in names:
        assert (last / name).read_bytes() == (other / "checkpoints" / last.name / name).read_bytes(), name


def nodes_of(said: Sequence[str], cluster: Cluster) -> list[Node]:
    """The nodes with client actors, from what a run has said last of them."""
    (*_, line) = [line for line in said if "client actors: " in line]
    return [node for node in cluster.nodes if f"1 on {node.address}" in line.partition(";")[0]]


def test_a_node_that_dies_costs_time_and_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """As a job. Its states are lost with it: those of a checkpoint are used, and the rounds since are repeated."""
    cluster.start(2, 1, 1)
    to = ["--address", cluster.http_address]
    saved = [*LARGE[:2], "rounds=30", *LARGE[3:], "checkpoint.every=10"]
    given = [*saved, "placement.actors=2", "run_dir=run"]
    job = cluster.launch("submit", *to, "--id", "survivor", "--driver-resource", "driver=1", *given)
    said = the_rest(job)
    assert job.returncode == 0, said
    job = cluster.command(RAY, "job", "logs", "--follow", "survivor", *to)
    folder = cluster.head.home / "pflsim-runs" / "run"
    metrics = folder / "metrics.jsonl"  # the job's output comes late, perhaps when there is a checkpoint again
    while not metrics.exists() or metrics.read_text().count("\n") < 13:
        assert job.poll() is None, the_rest(job)
        time.sleep(0.01)
    dying = nodes_of((folder / "run.log").read_text().splitlines(), cluster)[-1]
    dying.kill()
    said = the_rest(job)
    assert job.returncode == 0 and "round 30/30" in said, said
    assert not [node for node in nodes_of(said.splitlines(), cluster) if node is dying], said
    log = (folder / "run.log").read_text()
    assert "states were lost with a node" in log
    assert_same(inline(tmp_path, saved), folder)


def test_without_room_for_its_actors_a_run_ends_and_is_resumed_on_what_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(0, 1, 1)
    saved = [*LARGE[:2], "rounds=24", *LARGE[3:], "checkpoint.every=5"]
    joined = f"ray_address={cluster.address}"
    run = cluster.launch(*saved, joined, "run_dir=run", "placement.wait_s=5")
    lines_until(run, "round 13/24")
    cluster.nodes[2].kill()
    said = the_rest(run)
    assert run.returncode == 1, said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "1 client actors, each with 1 CPUs" in error and "resume with placement.actors=1" in error, said
    resumed = cluster.launch("resume=run", "placement.actors=1", joined)
    said = the_rest(resumed)
    assert resumed.returncode == 0, said
    assert_same(inline(tmp_path, saved), cluster.head.home / "run")


def test_what_goes_wrong_on_a_node_is_reported_by_the_driver(cluster: Cluster) -> None:
    """With the traceback, and where it was; of clients that fail there, and of what is printed there.

    What cannot be met is refused in seconds, with what was asked for and what there is; nothing is left reserved.
    """
    cluster.env["PYTHONPATH"] = str(Path(__file__).parents[1])
    cluster.start(0, 1)
    refused = [
        (["placement.gpus=2"], ["placement.gpus=2", "Ray has 0 GPUs", f"{cluster.nodes[1].address}: 1 CPUs"]),
        (["clients=60", "placement.actors=60"], ["60 client actors, each with 0.0166 CPUs and 600 MiB", "Free"]),
    ]
    for arguments, words in refused:
        run = cluster.launch(*SMALL, *arguments, f"ray_address={cluster.address}", "placement.wait_s=1")
        said = the_rest(run)
        (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert run.returncode == 1 and said.splitlines()[-1] == error, said
        assert all(word in error for word in (*words, "placement.wait_s=1")), said
    elsewhere = cluster.launch(*SMALL, "ray_address=10.1.2.3:1")
    said = the_rest(elsewhere)
    assert elsewhere.returncode == 2 and "ray_address=10.1.2.3:1: nothing answers there" in said
    if not cluster.isolated:
        pytest.skip("the trap is in the /tmp of one node")
    there = cluster.nodes[2].start(1)
    cluster.wait(3)
    (there.tmp / "traps").mkdir()
    for client in range(6):
        set_trap(there.tmp / "traps", f"raise_train_{client}_2")
    mine = cluster.head.home / "mine" / "method"
    mine.mkdir(parents=True)
    targets = "client:\n  _target_: failing_clients.Endangered\nserver:\n  _target_: failing_clients.EndangeredServer\n"
    (mine / "endangered.yaml").write_text(targets)
    given = ["--config-dir", "mine", "method=endangered", "method.traps=/tmp/traps", *SMALL[1:]]
    run = cluster.launch(*given, "on_client_error=drop", f"ray_address={cluster.address}", "run_dir=run")
    said = the_rest(run)
    assert run.returncode == 0, said
    for text in (said, (cluster.head.home / "run" / "run.log").read_text()):
        assert "ValueError: a trap in training" in text and "Traceback (most recent call last)" in text
        assert f"on node {there.address}" in text and f"on node {cluster.nodes[1].address}" not in text
