"""Which files of the working directory go to a cluster, and the archive that they travel in."""

from __future__ import annotations

import ntpath
import os
import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from pflsim.errors import SettingsError

LIMIT = 80 * 2**20
"""Bytes of content. The dashboard takes requests of at most 100 MiB."""
LARGEST = 10
"""How many paths are named when it is too much."""
NAMES = ("__pycache__", "node_modules", "*.egg-info", "*.pyc", ".git", ".hg", ".svn", ".venv", ".tox", ".nox")
CACHES = (".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".benchmarks", ".ipynb_checkpoints")
SECRETS = (".env", ".env.*", ".netrc", ".aws", ".ssh", "*.pem", "id_rsa*", "id_ed25519*", ".git-credentials", ".pypirc")
"""Left out, and named: the cluster keeps what it is sent, for others to read perhaps."""
PROGRAM = ("launch.py", "configs", "pflsim", "lightning_modules", "ray_actors")
TOP = ("runs", "data", "build", "dist", "multirun", "outputs", "benchmarks/out")
"""Left out at the top only: deeper down these may be names of packages, as `pflsim/data` is."""
BEGUN = (".lock", "environment.json", "partition.json")
"""What a run folder has beside its config.yaml."""


@dataclass
class Package:
    """The files that go, by their names in the archive, in order."""

    root: Path
    files: dict[str, Path] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    """What is made for the archive and is no file here."""
    warnings: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Of content, before it is compressed."""
        return sum(self.sizes.values())

    def holds(self, folder: Path) -> bool:
        """Whether anything of a folder in the tree goes along."""
        name = folder.resolve().relative_to(self.root).as_posix()
        return name == "." or any(file.startswith(f"{name}/") for file in self.files)


def select(root: Path, left_out: Collection[Path] = (), exclude: Sequence[str] = ()) -> Package:
    """The files of a working directory that a run needs: code and configs, no data, no results, no caches.

    Args:
        root: the working directory.
        left_out: files and folders that stay here, such as the data.
        exclude: patterns of names, or of paths from the root, that stay here too.

    Raises:
        SettingsError: it is too much, or something in it cannot be read or named in an archive.
    """
    package = Package(root.resolve())
    walk = _Walk(package, {path.resolve() for path in left_out} - {package.root}, [p.rstrip("/") for p in exclude])
    walk.folder(package.root, "", (package.root,))
    if walk.secrets:
        more = f" and {len(walk.secrets) - LARGEST} more" if len(walk.secrets) > LARGEST else ""
        package.warnings.append(
            f"left out, since there may be secrets in it: {', '.join(walk.secrets[:LARGEST])}{more}"
        )
    package.files = dict(sorted(package.files.items()))
    if package.bytes > LIMIT:
        raise SettingsError(_too_much(package))
    return package


def write_archive(package: Package, target: Path) -> Path:
    """Write the archive, the same bytes for the same files, so that a cluster that has it need not get it again.

    Raises:
        SettingsError: a file cannot be read.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in package.files.items():
            try:
                content = path.read_bytes()
                runs = path.stat().st_mode & stat.S_IXUSR
            except OSError as error:
                raise SettingsError(_unreadable(name, error)) from error
            archive.writestr(_entry(name, 0o755 if runs else 0o644), content)
        for name, content in sorted(package.texts.items()):
            archive.writestr(_entry(name, 0o644), content)
    return target


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.create_system, entry.external_attr = 3, (stat.S_IFREG | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


@dataclass
class _Walk:
    package: Package
    left_out: set[Path]
    exclude: list[str]
    secrets: list[str] = field(default_factory=list)

    def folder(self, folder: Path, prefix: str, chain: tuple[Path, ...]) -> None:
        """Take what is in a folder; `chain` has the folders that lead here, as they are on disk."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise SettingsError(_unreadable(prefix, error)) from error
        for entry in entries:
            if not self._stays(entry, prefix + entry.name):
                self._take(Path(entry.path), prefix + entry.name, chain)

    def _take(self, path: Path, name: str, chain: tuple[Path, ...]) -> None:
        try:
            real = path.resolve(strict=True)
            found = real.stat()
        except (OSError, RuntimeError) as error:  # a link to nowhere, or to itself
            if not path.is_symlink():
                raise SettingsError(_unreadable(name, error)) from error
            self.package.warnings.append(f"{name} is a link to nothing; it was left out")
            return
        if not real.is_relative_to(self.package.root):
            self.package.warnings.append(f"{name} is a link to {real}, outside of what is sent; it was left out")
        elif real in self.left_out or _is_environment(real):
            return
        elif any(map(_is_secret, (path.name, *real.relative_to(self.package.root).parts))):
            self.secrets.append(name)
        elif stat.S_ISDIR(found.st_mode):
            if real in chain:
                self.package.warnings.append(f"{name} is a link to a folder that it lies in; it was left out")
            elif not _is_run(real):
                self.folder(path, f"{name}/", (*chain, real))
        elif stat.S_ISREG(found.st_mode):
            _check_name(name)
            self.package.files[name], self.package.sizes[name] = path, found.st_size

    def _stays(self, entry: os.DirEntry[str], name: str) -> bool:
        if name in TOP or any(fnmatch(entry.name, pattern) for pattern in (*NAMES, *CACHES)):
            return True
        asked = next((p for p in self.exclude for text in (entry.name, name) if fnmatch(text, p)), None)
        if asked is not None and name in PROGRAM:
            raise SettingsError(f"--exclude {asked} would leave out {name}, which every run needs")
        return asked is not None


def _is_secret(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in SECRETS)


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and any((folder / name).exists() for name in BEGUN)


def _check_name(name: str) -> None:
    """Refuse what Ray would drop without a word when it unpacks."""
    try:
        name.encode()
        good = "\\" not in name and not ntpath.splitdrive(name)[0]
    except UnicodeEncodeError:
        good = False
    if not good:
        raise SettingsError(f"{name!r} has a name that cannot be sent: rename it, or leave it out with --exclude")


def _unreadable(name: str, error: Exception) -> str:
    why = getattr(error, "strerror", None) or error
    return f"{name or 'the working directory'} cannot be read ({why}): leave it out with --exclude, or let it be read"


def _too_much(package: Package) -> str:
    return "\n".join(
        [
            f"the working directory has {mib(package.bytes)} in {len(package.files)} files; at most {mib(LIMIT)} are "
            "sent. The largest:",
            *largest(package.sizes),
            "leave out what a run does not need: --exclude PATTERN, as often as needed; data sets stay out of it and "
            "are named by data.root=DIR, where they are on the cluster's machines",
        ]
    )


def largest(sizes: Mapping[str, int]) -> Iterator[str]:
    """A line for each of the largest files."""
    for name in sorted(sizes, key=lambda name: (-sizes[name], name))[:LARGEST]:
        yield f"  {mib(sizes[name]):>10}  {name}"


def mib(count: int) -> str:
    """A number of bytes as it is told."""
    return f"{count / 2**20:.1f} MiB"
