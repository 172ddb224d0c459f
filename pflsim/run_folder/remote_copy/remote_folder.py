"""A place that a URL names, reached through fsspec: what is there; bringing, fetching and removing single files."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

from pflsim.config.names import nearest
from pflsim.config.urls import CONFIGURATION
from pflsim.errors import SettingsError

PART = ".part"


def last_part(url: str) -> str:
    """The last part of a URL's path, in characters that every file system takes."""
    return (
        re.sub(r"[^A-Za-z0-9._-]+", "_", url.rpartition("://")[2].rstrip("/").rpartition("/")[2]).lstrip(".") or "run"
    )


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder that it is in, is none of the run's results."""
    return any(part.startswith(".") for part in name.split("/"))


def reason(error: BaseException) -> str:
    """What went wrong, in a line."""
    said = getattr(error, "strerror", None)
    if said:
        return str(said)
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class RemoteFolder:
    """Files by name, relative to a URL. Whatever the store raises passes through, but for `__init__` and `try_out`.

    Args:
        url: where.
        setting: what has named it, for messages.

    Raises:
        SettingsError: there is no way to such a place.
    """

    def __init__(self, url: str, setting: str = "run_dir"):
        from fsspec.core import url_to_fs  # only those who keep a run elsewhere pay for it
        from fsspec.registry import available_protocols
        from fsspec.spec import AbstractFileSystem

        self.url, self._named = url, f"{setting}={url}"
        try:
            self.fs, root = url_to_fs(url)
        except ImportError as error:
            package = re.search(r'[Ii]nstall ([\w-]+)|"([\w-]+)"', str(error))
            how = f": pip install {package[1] or package[2]}" if package else ""
            raise SettingsError(f"{self._named} cannot be used: {error}{how}") from error
        except Exception as error:  # a store's own package raises whatever it likes
            protocol = url.partition("://")[0].rpartition("::")[2]
            if protocol not in available_protocols():
                what = f"fsspec knows no {protocol}://; {nearest(protocol, available_protocols())}"
                raise SettingsError(f"{self._named} cannot be used: {what}") from error
            raise SettingsError(f"{self._named} cannot be used: {reason(error)}; {CONFIGURATION}") from error
        self._root = root.rstrip("/")
        # A file system that renames is like a disk, where half a file can be seen. Where fsspec has to copy and remove
        # for it, it is an object store, in which a file appears when it is whole, and folders are no things.
        self._renames = type(self.fs).mv is not AbstractFileSystem.mv
        self._made: set[str] = set()

    def try_out(self, empty: bool) -> None:
        """See that files can be written and removed; what there is stays untouched.

        Args:
            empty: whether there must be nothing yet.

        Raises:
            SettingsError: it cannot be used, or is not empty.
        """
        try:
            there = bool(empty and self.files(hidden=True))
            if not there:
                with tempfile.NamedTemporaryFile() as probe:
                    self.put(Path(probe.name), ".probe")
                self.remove(".probe")
        except Exception as error:  # a store's own package raises whatever it likes
            what = f"cannot be written to: {reason(error)}"
            raise SettingsError(f"{self._named} {what}; {CONFIGURATION}") from error
        if there:
            raise SettingsError(
                f"{self._named} is not empty, and a run never writes over another; give a new place or remove this one"
            )

    def files(self, hidden: bool = False) -> dict[str, int]:
        """What is there: sizes in bytes by name."""
        self.fs.invalidate_cache()
        found: dict[str, int] = {}
        for path, about in self.fs.find(self._root, detail=True).items():
            name = path.removeprefix(self._root).lstrip("/")
            if name and not name.endswith("/") and (hidden or not is_hidden(name)):
                found[name] = int(about["size"] or 0)
        return found

    def put(self, path: Path, name: str) -> None:
        """Bring a file, which is there whole or not at all, and as long as it is not whole the one before it is."""
        target = self._at(name)
        if not self._renames:
            self.fs.put_file(str(path), target)
            return
        folder, _, last = target.rpartition("/")
        if folder not in self._made:
            self.fs.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        aside = f"{folder}/.{last}{PART}"
        try:
            self.fs.put_file(str(path), aside)
            self._rename(aside, target)
        except BaseException:
            with suppress(Exception):
                self.fs.rm_file(aside)
            raise

    def _rename(self, path: str, target: str) -> None:
        try:
            self.fs.mv(path, target)
        except OSError:
            if not self.fs.exists(target):
                raise
            self.fs.rm_file(target)  # there are file systems that rename only to where nothing is
            self.fs.mv(path, target)

    def read(self, name: str) -> bytes | None:
        """The contents of a file; None: there is none."""
        try:
            return self.fs.cat_file(self._at(name))
        except FileNotFoundError:
            return None

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file from there."""
        self.fs.get_file(self._at(name), str(path))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._at(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder in which nothing is, where folders are things."""
        if self._renames:
            self._made.discard(self._at(name))
            with suppress(Exception):
                self.fs.rmdir(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"
