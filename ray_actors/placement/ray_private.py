"""All uses of Ray's private interface, each with its purpose. Checked with Ray 2.60.

- `available_resources_per_node`: the free resources of each node. `ray.nodes()` has the totals of each node and
  `ray.available_resources()` the free resources of all nodes together; the state API needs a dashboard.
- `ray_constants.ENABLE_RAY_CLUSTER`: if it is False, Ray listens on 127.0.0.1 only. Otherwise it listens on all network
  interfaces, whatever `_node_ip_address` says. RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 does the same, but only if it is set
  before Ray is imported.
- the loggers `ray._private.authentication` and `ray._private.worker`: each `ray.init` logs that it has enabled token
  authentication, and in a thread that it cannot set a handler of SIGTERM.
- `JobConfig._py_driver_sys_path`: the folders that come first on the import path of Ray's processes. Ray adds the
  working directory, where a file numpy.py would replace a library.
- `Node.kill_all_processes`: `ray.shutdown` waits a second for each of five processes to end after SIGTERM, but those
  that are started here block SIGTERM.
- `_temp_dir`, an option of `ray.init`: the folder of Ray's files. RAY_TMPDIR would set it for later runs, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.job_config import JobConfig

from pflsim.config.names import FOLDER


class SafePathConfig(JobConfig):
    """A job whose processes do not search the working directory for modules, unless pflsim is there."""

    def _serialize(self) -> str:
        here = {str(Path.cwd())} - {str(FOLDER)}
        self._py_driver_sys_path = [folder for folder in self._py_driver_sys_path if folder not in here]
        return super()._serialize()


def available_resources_per_node() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node by its id; memory in bytes."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


def loopback_options(temp_dir: Path) -> dict[str, Any]:
    """Return options of `ray.init` for a Ray that listens on 127.0.0.1 only and keeps its files in a folder."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    return {"address": "local", "include_dashboard": False, "_temp_dir": str(temp_dir)}


def kill_processes_at_shutdown() -> None:
    """Have the next `ray.shutdown` kill Ray's processes at once."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})


def silence_notices() -> None:
    """Keep `ray.init` from logging that token authentication is enabled, and that a thread cannot set a handler."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    logging.getLogger("ray._private.worker").addFilter(_is_to_log)


def _is_to_log(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()
