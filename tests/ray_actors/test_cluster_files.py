"""The files of configs/cluster: what Ray, Kubernetes and Slurm make of them."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import lines_until

from benchmarks.tools.loopback import Cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "configs" / "cluster"
SMALL = ["method=fedavg", "clients=6", "rounds=4", "lockstep=false", "model.hidden=[8]"]
SRUN = """#!{python}
import os, subprocess, sys
hosts = {hosts!r}
options = [word for word in sys.argv[1:] if word.startswith("--")]
at = next(n for n, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
words = sys.argv[at:]
(host,) = [word.partition("=")[2] for word in options if word.startswith("--nodelist=")]
assert "--ntasks=1" in options and "--nodes=1" in options
if words[0] == "hostname":
    print(hosts[host][0])
    sys.exit()
command = [*hosts[host][1], *words]
os.execvp(command[0], command)
"""


def composed(name: str) -> dict[str, Any]:
    return yaml.safe_load((FILES / name).read_text())


def test_ray_accepts_the_cluster_of_ray_up() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    made = prepare_config(composed("ray_up.yml"))
    validate_config(made)
    assert made["provider"]["type"] == "local" and len(made["provider"]["worker_ips"]) == made["max_workers"]
    head, worker = ("\n".join(made[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    assert "--head" in head and "$RAY_HEAD_IP:6379" in worker and "--head" not in worker
    assert all("RAY_AUTH_MODE=token" in text for text in (head, worker))


def test_the_job_of_kuberay_composes_and_mounts_what_it_names() -> None:
    from pflsim.cli import checked

    spec = composed("kuberay_rayjob.yml")["spec"]
    python, script, *overrides = shlex.split(spec["entrypoint"])
    assert (python, Path(script).name) == ("python", "launch.py")
    ((settings,)) = checked(overrides, False, [])
    cluster = spec["rayClusterSpec"]
    (worker,), head = cluster["workerGroupSpecs"], cluster["headGroupSpec"]
    assert settings.ray_address == "auto" and settings.placement.nodes == 1 + worker["replicas"]
    pod = head["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounted.values()) == {volume["name"] for volume in pod["volumes"]}
    assert settings.data["root"] in mounted and str(Path(str(settings.run_dir)).parent) in mounted
    asked = json.loads(spec["entrypointResources"])
    assert json.loads(json.loads(head["rayStartParams"]["resources"])) == asked == {"driver": 1}
    version = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray==")]
    assert version == [f"ray=={cluster['rayVersion']}"]


@pytest.fixture
def slurm(tmp_path: Path) -> Any:
    """Three nodes of a Slurm that has the two commands of it that the script uses."""
    with Cluster(3) as nodes:
        if not nodes.isolated:
            pytest.skip("nodes that share a /tmp cannot be started by others (network namespaces need root)")
        hosts = {f"node{node.number}": (node.address, node.apart([])) for node in nodes.nodes}
        tools = tmp_path / "bin"
        tools.mkdir()
        (tools / "srun").write_text(SRUN.format(python=sys.executable, hosts=hosts))
        (tools / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(hosts)}\n")
        for tool in tools.iterdir():
            tool.chmod(0o755)
        env = {
            **nodes.env, "PATH": f"{tools}:{nodes.env['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "3",
            "PFLSIM_VENV": str(Path(sys.executable).parents[1]),
        }  # fmt: skip
        yield nodes, env


def started(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(FILES / "slurm.sh"), *arguments], env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.ray
def test_the_script_for_slurm_runs_on_all_nodes_and_ends_with_the_run(slurm: Any) -> None:
    nodes, env = slurm
    run = started(env, *SMALL, f"run_dir={nodes.head.inner_home}/run")
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0 and "round 4/4" in out, out
    assert all(f"1 on {node.address}" in out for node in nodes.nodes), out
    assert (nodes.head.home / "run" / "summary.json").is_file()


@pytest.mark.ray
def test_a_slurm_job_whose_time_is_over_saves_its_state(slurm: Any) -> None:
    nodes, env = slurm
    run = started(env, *SMALL[:2], "rounds=100000", *SMALL[3:], f"run_dir={nodes.head.inner_home}/run")
    lines_until(run, "round      3/")
    os.kill(run.pid, signal.SIGTERM)
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, out
    assert "resume with" in out and [*(nodes.head.home / "run" / "checkpoints").glob("round_*")]
