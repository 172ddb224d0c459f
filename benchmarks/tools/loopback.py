"""Starts a Ray cluster on this machine: a raylet for each node, with its own address and resources.

For root, each node is a network namespace with its own /tmp, so that nodes communicate only over the network, whose
bytes the kernel counts. Otherwise the nodes are addresses of the loopback interface.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.cases import ROOT

RAY = str(Path(sys.executable).parent / "ray")
STORE_MB = 100
START_TIMEOUT_S = 120.0
SHARED = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
"""Folders that all nodes use, even if they are in /tmp, which is private to each node: the clone and Python."""
SETTINGS = {
    "RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3", "RAY_worker_niceness": "0",
}  # fmt: skip
"""Ray detects a dead node after 3 seconds instead of 15, and its processes get as much CPU as others."""


class Node:
    """A node, which runs from `start` to `kill`."""

    def __init__(self, cluster: Cluster, number: int):
        self.cluster, self.number = cluster, number
        self.address = f"10.66.{cluster.net}.{number + 1}" if cluster.isolated else f"127.0.{cluster.net}.{number + 1}"
        self.space = f"{cluster.name}-{number}"
        self.tmp = cluster.folder / f"tmp{number}"
        self.home = self.tmp / "home"
        """The home folder, as seen from outside; `inner_home` is its path on the node."""
        self.inner_home = Path("/tmp/home") if cluster.isolated else self.home
        self.log = cluster.folder / f"node{number}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.home.mkdir(parents=True)

    def start(self, cpus: int, gpus: int = 0, store_mb: int = STORE_MB, env: Mapping[str, str] | None = None) -> Node:
        """Start the node; return before it is up, see `Cluster.wait`."""
        cluster = self.cluster
        words = [
            RAY, "start", "--block", f"--node-ip-address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
            f"--object-store-memory={store_mb * 2**20}", "--disable-usage-stats",
        ]  # fmt: skip
        if self.number == 0:
            words += ["--head", f"--port={cluster.port}", f"--dashboard-host={self.address}"]
            words += [f"--dashboard-port={cluster.http}", "--include-dashboard=true"]
            words += ['--resources={"driver": 1}']
            words += [] if cluster.isolated else [f"--temp-dir={cluster.folder}/r"]
        else:
            words += [f"--address={cluster.address}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.apart(words), env={**cluster.env, "HOME": str(self.inner_home), **(env or {})},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self

    def apart(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs with the network and the /tmp of this node, even before `start`."""
        if not self.cluster.isolated:
            return list(words)
        private = shlex.quote(str(self.tmp))
        mounts = [
            f"mkdir -p {private}/{inside} && mount --bind /tmp/{inside} {private}/{inside}"
            for inside in (shlex.quote(str(p.relative_to("/tmp"))) for p in SHARED if p.is_relative_to("/tmp"))
        ]
        inner = " && ".join([*mounts, f"mount --rbind {private} /tmp", 'exec "$@"'])
        return ["ip", "netns", "exec", self.space, "unshare", "--mount", "sh", "-c", inner, "sh", *words]

    def inside(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs on this node after `start`."""
        assert self.process is not None
        return ["nsenter", "-t", str(self.process.pid), "-n", "-m", *words] if self.cluster.isolated else list(words)

    def moved_bytes(self) -> int:
        """Return the bytes between this node and the others; only if isolated, and not for the head."""
        device = "/sys/class/net/eth/statistics"
        words = ["ip", "netns", "exec", self.space, "cat", f"{device}/tx_bytes", f"{device}/rx_bytes"]
        found = subprocess.run(words, check=True, capture_output=True, text=True)
        return sum(map(int, found.stdout.split()))

    def kill(self) -> None:
        """Kill all processes of the node at once, as a power failure does.

        The node is disconnected first: finding its processes takes a while, in which a run could end.
        """
        if self.process is None:
            return
        plug = ["-n", self.cluster.head.space, "link", "set", f"plug{self.number}"]
        cut = self.cluster.isolated and self is not self.cluster.head
        if cut:
            _ip(*plug, "down")
        with suppress(psutil.NoSuchProcess):
            one = psutil.Process(self.process.pid)
            processes = [one, *one.children(recursive=True)]
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=30)
        self.process.wait()
        self.process = None
        if cut:
            _ip(*plug, "up")  # so that waiting connections fail at once


class Cluster:
    """A cluster whose first node is the head. Use it as a context manager.

    Args:
        nodes: the maximum number of nodes; none is started.
        env: environment variables of all nodes.
    """

    def __init__(self, nodes: int, env: Mapping[str, str] | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="pc-", dir="/tmp"))
        self.name, self.net = f"pc{os.getpid()}", 1 + os.getpid() % 200
        self.isolated = _may_isolate()
        self.port, self.http = _free_ports()
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self.env = {
            **inherited, **SETTINGS, "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), **(env or {}),
        }  # fmt: skip
        self.nodes = [Node(self, number) for number in range(nodes)]
        if self.isolated:
            self._connect()

    @property
    def head(self) -> Node:
        """The head node."""
        return self.nodes[0]

    @property
    def address(self) -> str:
        """The address of the head, for ray start and ray_address."""
        return f"{self.head.address}:{self.port}"

    @property
    def http_address(self) -> str:
        """The address of the dashboard, for jobs."""
        return f"http://{self.head.address}:{self.http}"

    def start(self, *cpus: int, store_mb: int = STORE_MB) -> Cluster:
        """Start a node for each number of CPUs, and wait until all are up."""
        for number, count in enumerate(cpus):
            self.nodes[number].start(count, store_mb=store_mb)
            if number == 0 or not self.isolated:  # nodes that share /tmp must not choose sockets at the same time
                self.wait(number + 1)
        self.wait(len(cpus))
        return self

    def wait(self, nodes: int) -> None:
        """Wait until this many nodes are alive."""
        code = (
            "import ray, sys, time; from ray._raylet import GcsClient\n"
            f"client = GcsClient(address='{self.address}')\n"
            f"while sum(n.state == 0 for n in client.get_all_node_info().values()) < {nodes}: time.sleep(0.2)\n"
        )
        deadline, errors = time.monotonic() + START_TIMEOUT_S, ""
        while time.monotonic() < deadline:
            done = subprocess.run(
                self.head.inside([sys.executable, "-c", code]),
                env=self.env,
                capture_output=True,
                timeout=START_TIMEOUT_S,
            )
            if done.returncode == 0:
                return
            errors = done.stderr.decode()
        raise AssertionError(f"the cluster is not up: {self.logs()} {errors}")

    def launch(self, *arguments: str, node: int = 0) -> subprocess.Popen[str]:
        """Start launch.py on a node, in its home folder, with stderr in stdout."""
        return self.command(sys.executable, "-u", str(SHARED[0] / "launch.py"), *arguments, node=node)

    def command(self, *words: str, node: int = 0) -> subprocess.Popen[str]:
        """Start a command on a node, in its home folder, with stderr in stdout."""
        where = self.nodes[node]
        return subprocess.Popen(
            where.inside(["env", f"--chdir={where.inner_home}", *words]),
            env={**self.env, "HOME": str(where.inner_home)}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def logs(self) -> str:
        """Return the last lines of the logs of all nodes."""
        return "\n".join(node.log.read_text()[-2000:] for node in self.nodes if node.log.exists())

    def _connect(self) -> None:
        """Create a namespace for each node, and a bridge between them in the head's namespace."""
        spaces = [node.space for node in self.nodes]
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", spaces[0], "link", "add", "name", "lan", "type", "bridge")
        _ip("-n", spaces[0], "link", "set", "lan", "up")
        _ip("-n", spaces[0], "addr", "add", f"{self.head.address}/24", "dev", "lan")
        for number, node in enumerate(self.nodes[1:], start=1):
            plug = f"plug{number}"
            _ip(
                "-n", spaces[0], "link", "add", "name", plug, "type", "veth", "peer", "name", "eth", "netns", node.space
            )
            _ip("-n", spaces[0], "link", "set", plug, "master", "lan", "up")
            _ip("-n", node.space, "addr", "add", f"{node.address}/24", "dev", "eth")
            _ip("-n", node.space, "link", "set", "eth", "up")

    def close(self) -> None:
        """Kill all nodes, and remove their namespaces and folders."""
        for node in reversed(self.nodes):
            node.kill()
        if self.isolated:
            for node in self.nodes:
                with suppress(subprocess.CalledProcessError):
                    _ip("netns", "del", node.space)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _may_isolate() -> bool:
    """Return whether this process can create network namespaces and mounts."""
    if os.getuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter", "mount")):
        return False
    name = f"pc-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        tried = ["ip", "netns", "exec", name, "unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"]
        return subprocess.run(tried, capture_output=True).returncode == 0
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for found in (one, other):
            found.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
