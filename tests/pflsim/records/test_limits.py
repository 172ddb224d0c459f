import json
import os
import platform
import resource
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from support import refusing

from pflsim.records import limits
from pflsim.records.environment import code, write_environment


def groups(folder: Path, lines: str, files: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """Have the process be in control groups with these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(lines)
    patch.setattr(limits, "GROUPS", folder)
    patch.setattr(limits, "MEMBERSHIP", folder / "membership")
    patch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    patch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_without_limits_they_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a/cpu.max": "max 100000\n", "a/memory.max": "max\n", "a/memory.current": "5\n"}
    groups(tmp_path, "0::/a\n", files, monkeypatch)
    assert limits.usable_cpus() == 16
    reading = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: reading)
    assert limits.free_memory() == reading.available > 0


def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    files = {
        "job/cpu.max": "250000 100000\n",
        "job/step/cpu.max": "max 100000\n",
        "job/memory.max": f"{500 * mib}\n",
        "job/memory.current": f"{450 * mib}\n",
        "job/memory.stat": f"anon 5\ninactive_file {30 * mib}\nactive_file 7\n",
        "job/step/memory.max": "max\n",
    }
    groups(tmp_path, "0::/job/step\n", files, monkeypatch)
    assert (limits.usable_cpus(), limits.free_memory()) == (3, 80 * mib)


def test_what_ray_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, values: raised.append(values))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 4096))
    limits.check_limits(2)
    assert raised == [(144, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 64))
    with refusing("144", "64", "executor=inline"):
        limits.check_limits(2)


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_file_names_versions_code_and_machine_but_no_host(tmp_path):
    write_environment(tmp_path)
    text = (tmp_path / "environment.json").read_text()
    content = json.loads(text)
    assert set(content) == {"format", "versions", "code", "machine", "command"}
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["machine"]["memory_mb"] > 100
    del content["command"]
    node = platform.node()
    assert not node or f'"{node}"' not in json.dumps(content)


def test_the_commit_and_whether_the_code_differs_from_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert code(package) == {"commit": None, "dirty": None}
    git(tmp_path, "init")
    assert code(package) == {"commit": None, "dirty": None}, "another project's repository is not ours"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    clean = code(package)
    assert len(str(clean["commit"])) == 40
    assert clean["dirty"] is False
    (package / "new.py").write_text("")
    assert code(package) == {"commit": clean["commit"], "dirty": True}
