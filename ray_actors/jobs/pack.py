"""Choose the files of the working directory that `submit` sends to a cluster; Ray packs and uploads them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from pflsim.errors import SettingsError

MAX_BYTES = 80 * 2**20
"""Largest total size of the files. The dashboard accepts requests of up to 100 MiB."""
MAX_LISTED = 10
"""How many paths an error or a warning lists."""
GENERATED = (
    *("__pycache__", "node_modules", "*.egg-info", "*.pyc", ".git", ".hg", ".svn", ".venv", ".tox", ".nox"),
    *(".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".benchmarks", ".ipynb_checkpoints"),
)
"""Names that are excluded in every folder."""
TOP_LEVEL = ("runs", "data", "build", "dist", "multirun", "outputs", "benchmarks/out")
"""Paths that are excluded in the working directory only, because packages such as `pflsim/data` use the same names."""
SECRETS = (".env", ".env.*", ".netrc", ".aws", ".ssh", "*.pem", "id_rsa*", "id_ed25519*", ".git-credentials", ".pypirc")
"""Names that are excluded with a warning, because other users of the cluster may be able to read what is uploaded."""
REQUIRED = ("launch.py", "configs", "pflsim", "lightning_modules", "ray_actors")
RUN_FILES = (".lock", "environment.json", "partition.json")
"""A folder with config.yaml and one of these files is a run folder."""


@dataclass
class Package:
    """The files of a working directory that are sent.

    Args:
        root: the working directory.
        sizes: size in bytes of each file, by its path relative to `root`.
        excludes: the paths that are not sent, as `excludes` of Ray's `runtime_env`.
        warnings: messages for the user.
    """

    root: Path
    sizes: dict[str, int] = field(default_factory=dict)
    excludes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(self.sizes.values())


def select(root: Path, data: Collection[Path] = (), exclude: Sequence[str] = ()) -> Package:
    """Select the files that a run needs: code and configs, but no data, results or caches.

    Args:
        root: the working directory.
        data: files and folders of data sets, which are not sent.
        exclude: patterns of further names, or of paths relative to `root`, that are not sent.

    Raises:
        SettingsError: the files are too large, or one of them cannot be read or packed.
    """
    package = Package(root.resolve())
    not_sent = {path.resolve() for path in data} - {package.root}
    patterns = [pattern.rstrip("/") for pattern in exclude]
    links: list[str] = []
    secrets: list[str] = []
    folders = [package.root]
    try:
        while folders:
            for path in sorted(folders.pop().iterdir()):
                name = path.relative_to(package.root).as_posix()
                if _is_excluded(name, patterns) or path in not_sent or _is_environment(path) or _is_run(path):
                    pass
                elif path.is_symlink():
                    links.append(name)
                elif any(fnmatch(path.name, pattern) for pattern in SECRETS):
                    secrets.append(name)
                elif path.is_dir():
                    folders.append(path)
                    continue
                elif path.is_file():
                    if not os.access(path, os.R_OK):
                        raise PermissionError(13, "Permission denied", str(path))
                    package.sizes[name] = path.stat().st_size
                    continue
                package.excludes.append("/" + re.sub(r"([*?\[\]\\ ])", r"\\\1", name))
    except OSError as error:
        raise SettingsError(f"{error.filename} cannot be read ({error.strerror}): exclude it with --exclude") from error
    if secrets:
        package.warnings.append(f"not sent, because they may contain secrets: {_listed(secrets)}")
    if links:
        package.warnings.append(f"not sent, because they are symbolic links: {_listed(links)}")
    if package.bytes > MAX_BYTES:
        raise SettingsError(
            f"the working directory has {mib(package.bytes)} in {len(package.sizes)} files; at most {mib(MAX_BYTES)} "
            f"can be sent. The largest files: {_largest(package.sizes)}. Exclude what a run does not need with "
            "--exclude PATTERN. Keep data sets elsewhere and set data.root to their folder on the cluster"
        )
    return package


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    if name in TOP_LEVEL or any(fnmatch(last, pattern) for pattern in GENERATED):
        return True
    matched = next((p for p in patterns if fnmatch(last, p) or fnmatch(name, p)), None)
    if matched is not None and name in REQUIRED:
        raise SettingsError(f"--exclude {matched} would exclude {name}, which every run needs")
    return matched is not None


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and any((folder / name).exists() for name in RUN_FILES)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(sorted(names)[:MAX_LISTED]) + more


def _largest(sizes: Mapping[str, int]) -> str:
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_LISTED]
    return ", ".join(f"{name} ({mib(sizes[name])})" for name in names)


def mib(count: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"
