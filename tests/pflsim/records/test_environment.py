import json
import platform
import subprocess

import torch

from pflsim.records.environment import code, gpu_names, processor, write_environment


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


def test_the_processor_is_its_model_and_the_instructions_that_torch_uses(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: Fast CPU @ 2 GHz\n")
    assert processor(info) == f"Fast CPU @ 2 GHz, {torch.backends.cpu.get_cpu_capability()}"


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


def test_gpu_names_come_from_the_drivers_files(tmp_path):
    assert gpu_names(tmp_path) == []
    for number, name in enumerate(("NVIDIA A", "NVIDIA B")):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text(f"Model: \t\t {name}\nIRQ:   1\n")
    assert gpu_names(tmp_path) == ["NVIDIA A", "NVIDIA B"]
