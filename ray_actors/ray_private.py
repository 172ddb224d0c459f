"""All that pflsim uses of Ray's private modules, each with the reason why nothing public serves."""

import logging
from pathlib import Path
from typing import Any

from ray._private import ray_constants, worker
from ray._private.state import available_resources_per_node

__all__ = ["available_resources_per_node", "end_without_waiting", "listen_on_loopback", "logs", "silence_notices"]
# `ray.nodes` has the total resources of a node, and `ray.available_resources` sums over all nodes.


def listen_on_loopback() -> None:
    """Have the next `ray.init` listen on the loopback interface only; its public option is for the dashboard."""
    ray_constants.ENABLE_RAY_CLUSTER = False


def end_without_waiting() -> None:
    """Have `ray.shutdown` kill at once; else it waits a second for each of five processes, which block SIGTERM."""
    node: Any = worker._global_node
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})


def logs() -> Path:
    """Return the folder of the log files on this machine; `ray.util.state.get_log` needs the dashboard."""
    return Path(worker._global_node.get_logs_dir_path())  # type: ignore[union-attr]


def silence_notices() -> None:
    """Keep `ray.init` from logging that token authentication is enabled, and that a thread cannot set a handler.

    Its option `logging_level` would silence all other warnings too.
    """
    for name in ("authentication", "worker"):
        logging.getLogger(f"ray._private.{name}").setLevel(logging.ERROR)
