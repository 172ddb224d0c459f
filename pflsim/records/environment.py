"""environment.json: the format of a run's files, package versions, the commit of the code, and the hardware.

It names no machine and no person.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired

import psutil

from pflsim.config.names import listed
from pflsim.config.plugins import plugins
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError
from pflsim.records.files import keys, read_json, write_atomically
from pflsim.records.limits import usable_cpus
from pflsim.records.own_code import code_digests, module_file, own_modules

FORMAT = 1
"""The format of the files of a run, also in meta.json of checkpoints. Every change of a file's meaning raises it."""
PACKAGES = (
    *("pflsim", "torch", "torchvision", "lightning", "ray", "numpy", "scipy", "scikit-learn", "torchmetrics"),
    *(
        "tensorboard",
        "hydra-core",
        "omegaconf",
        "safetensors",
        "jaxtyping",
        "psutil",
        "rich",
        "matplotlib",
        "dp-accounting",
    ),
)
JOB = "PFLSIM_JOB"
"""The environment variable of a submitted job with the command that submits a job: `pflsim submit`."""
PACKAGE = Path(__file__).resolve().parents[1]
CODE = "PFLSIM_CODE"
"""The environment variable of a submitted job with the value of `code` on the machine that submitted it, as JSON."""


Machine = keys({"gpus": list[str], "cpus": NotRequired[int | None], "memory_mb": NotRequired[int]})
EnvironmentFile = keys({
    "versions": Mapping[str, str | None], "code": Mapping[str, str | bool | None], "machine": Machine,
    "command": list[str], "own_code": NotRequired[Mapping[str, str]],
})  # fmt: skip
"""The keys of environment.json that are read back."""


def versions() -> dict[str, str | None]:
    """Return the installed versions by package name, with those of plugins; None if a package is not installed.

    Versions come from package metadata, without importing anything. If torch is already imported, its `__version__` is
    used, which includes the build (e.g. 2.14.1+cpu).
    """
    found = {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}
    found |= {plugin.package: plugin.version for plugin in plugins()}
    if "torch" in sys.modules:
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


@cache
def _installed(package: str) -> str | None:
    """Return a package's version; kept, because every checkpoint records all of them."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code(package: Path = PACKAGE) -> dict[str, str | bool | None]:
    """Return the commit of the package's repository, and whether it has uncommitted changes (new files included).

    Both are None if the package is not under version control, e.g. when installed from a wheel.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return json.loads(os.environ.get(CODE, '{"commit": null, "dirty": null}'))
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, object]:
    """Return the operating system, the processors, the memory in MB (10⁶ bytes), NVIDIA GPUs and their software."""
    return {
        "platform": platform.platform(),
        "architecture": platform.machine(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "cpus_usable": usable_cpus(),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
        "gpus": gpu_names(),
        **gpu_software(),
    }


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the processor, and the instruction set that PyTorch uses if it is imported.

    Matrix products of AVX2 and AVX512 differ in the last bits.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    torch = sys.modules.get("torch")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}" if torch else name


def gpu_names(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the names of the machine's NVIDIA GPUs. Reads the driver's files and does not initialise CUDA."""
    lines = [line for path in sorted(root.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def gpu_software() -> dict[str, object]:
    """Return the versions of driver, CUDA and cuDNN; empty without a driver."""
    try:
        found: dict[str, object] = {"driver": Path("/sys/module/nvidia/version").read_text().strip()}
    except OSError:
        return {}
    if torch := sys.modules.get("torch"):
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def write_environment(folder: Path, name: str = "environment.json", settings: Settings | None = None) -> None:
    """Write environment.json to a run folder.

    Args:
        folder: the run folder.
        name: of the file; resumed sessions have their own.
        settings: of the run: the files of the user's own modules are recorded relative to the folder, and the digests
            of the user's code.
    """
    own = {module: os.path.relpath(path, folder) for module, path in own_modules(settings).items()} if settings else {}
    digests = code_digests(settings) if settings else {}
    content = {"format": FORMAT, "versions": versions(), "code": code(), "machine": machine(), "command": sys.argv}
    content |= {key: value for key, value in {"own_modules": own, "own_code": digests}.items() if value}
    write_atomically(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_environment(folder: Path) -> Mapping[str, Any]:
    """Read environment.json of a run folder.

    Raises:
        SettingsError: it cannot be read, or the run has another format.
    """
    path = folder / "environment.json"
    check_format(read_json(path, Mapping[str, Any]).get("format"), folder)
    return read_json(path, EnvironmentFile)


def read_sessions(folder: Path) -> list[Mapping[str, Any]]:
    """Return environment.json of a run folder and the environments of later sessions.

    Raises:
        SettingsError: see `read_environment`.
    """
    later = sorted(folder.glob("environment-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [read_environment(folder), *(read_json(path, EnvironmentFile) for path in later)]


def check_code(folder: Path, settings: Settings, allowed: bool, report: Callable[[str], None]) -> None:
    """Compare the user's code with that of the last session of a run.

    Args:
        folder: the run folder.
        settings: of the run.
        allowed: whether a run with other code goes on.
        report: called with a line if it does, or if the session has no digests.

    Raises:
        SettingsError: the code differs, and this is not allowed.
    """
    saved, now = read_sessions(folder)[-1].get("own_code", {}), code_digests(settings)
    if now and not saved:
        report(f"{folder} has no digests of your code: whether {listed([*now])} changed since cannot be compared")
    elif names := [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]:
        changed = [str(module_file(name) or name) for name in names]
        text = f"{listed(changed)} {'have' if len(changed) > 1 else 'has'} changed since {folder} ran"
        if not allowed:
            advice = "restore the code or start a new run; changed_code=true continues with the new code"
            raise SettingsError(f"{text}, so the results would be of two programs: {advice}")
        report(f"{text}: later rounds are of the new code")


def check_format(found: object, folder: Path, expected: int = FORMAT) -> None:
    """Refuse the files of a run or a checkpoint in another format.

    Raises:
        SettingsError: the format differs.
    """
    if found != expected:
        raise SettingsError(
            f"{folder} has format {found}, expected {expected}: use the version of pflsim that wrote it"
        )
