"""The number of torch's threads on the driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import settings_of

from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.devices import torch_threads
from pflsim import cli
from ray_actors.run import Runner


@pytest.mark.parametrize("threads", [1, 2])
def test_the_driver_uses_the_threads_of_the_placement(
    threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, run_groups = set[int](), ClientHost.run_groups

    def recorded(*arguments: Any) -> Any:
        seen.add(torch.get_num_threads())
        return run_groups(*arguments)

    monkeypatch.setattr(ClientHost, "run_groups", recorded)
    overrides = ["executor=inline", "rounds=1", "progress=none", f"placement.threads={threads}"]
    with torch_threads(3), Runner() as runner:
        runner.run(settings_of(*overrides, f"run_dir={tmp_path / 'run'}"))
        assert torch.get_num_threads() == 3
    assert seen == {threads}


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_while_they_wait(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that spin keep each other from working where others need the CPUs, too."""
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert cli.run(["--help"]) == 0 and os.environ["OMP_WAIT_POLICY"] == found
