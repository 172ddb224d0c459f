"""A folder at a URL, accessed with fsspec: list, upload, download and remove single files."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

from pflsim.config.names import nearest
from pflsim.config.validate import CONFIGURATION
from pflsim.errors import SettingsError


def last_part(url: str) -> str:
    """Return the last part of a URL's path in characters that every file system accepts."""
    name = url.rpartition("://")[2].rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".") or "run"


def is_hidden(name: str) -> bool:
    """Return whether a file, or a folder that it is in, begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def reason(error: BaseException) -> str:
    """Describe an error in one line."""
    if strerror := getattr(error, "strerror", None):
        return str(strerror)
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class RemoteFolder:
    """A folder at a URL, whose files are named by their path in it.

    All methods but `check_writable` raise what the file system raises, which can be any exception.

    Args:
        url: the URL of the folder.
        setting: the setting that names it, for messages.

    Raises:
        SettingsError: fsspec cannot access the URL.
    """

    def __init__(self, url: str, setting: str = "run_dir"):
        from fsspec.core import url_to_fs  # slow to import, and only runs with a URL need it
        from fsspec.registry import available_protocols
        from fsspec.spec import AbstractFileSystem

        self.url, self._named = url, f"{setting}={url}"
        try:
            self.fs, root = url_to_fs(url)
        except Exception as error:
            protocol = url.partition("://")[0].rpartition("::")[2]
            if isinstance(error, ImportError):
                package = re.search(r'[Ii]nstall ([\w-]+)|"([\w-]+)"', str(error))
                why = f"{error}{f': pip install {package[1] or package[2]}' if package else ''}"
            elif protocol not in available_protocols():
                why = f"fsspec has no protocol {protocol}://; {nearest(protocol, available_protocols())}"
            else:
                why = f"{reason(error)}; {CONFIGURATION}"
            raise SettingsError(f"{self._named} cannot be used: {why}") from error
        self._root = root.rstrip("/")
        # A file system with its own `mv` is like a disk: it has folders, and a reader can see a file that is half
        # written. The others are object stores, where a file appears when its upload is complete.
        self._is_disk = type(self.fs).mv is not AbstractFileSystem.mv

    def check_writable(self, empty: bool) -> None:
        """Check that files can be written and removed.

        Args:
            empty: whether the folder must be empty.

        Raises:
            SettingsError: it cannot be written to, or is not empty.
        """
        try:
            files = empty and self.files()
            if not files:
                with tempfile.NamedTemporaryFile() as probe:
                    self.upload(Path(probe.name), ".probe")
                self.remove(".probe")
        except Exception as error:
            raise SettingsError(f"{self._named} cannot be written to: {reason(error)}; {CONFIGURATION}") from error
        if files:
            raise SettingsError(f"{self._named} is not empty: give another URL, or remove the files")

    def files(self) -> dict[str, int]:
        """Return the size in bytes of every file, hidden ones too, by name."""
        self.fs.invalidate_cache()
        found: dict[str, int] = {}
        for path, details in self.fs.find(self._root, detail=True).items():
            name = path.removeprefix(self._root).lstrip("/")
            if name and not name.endswith("/"):
                found[name] = int(details["size"] or 0)
        return found

    def upload(self, path: Path, name: str) -> None:
        """Upload a file so that a reader sees either the old or the new file, never a part of one."""
        target = f"{self._root}/{name}"
        if not self._is_disk:
            self.fs.put_file(str(path), target)
            return
        folder, _, last = target.rpartition("/")
        part = f"{folder}/.{last}.part"
        self.fs.makedirs(folder, exist_ok=True)
        self.fs.put_file(str(path), part)
        try:
            self.fs.mv(part, target)
        except OSError:  # some file systems do not rename to an existing name
            if not self.fs.exists(target):
                raise
            self.fs.rm_file(target)
            self.fs.mv(part, target)

    def read(self, name: str) -> bytes:
        """Return the contents of a file; empty if it does not exist."""
        try:
            return self.fs.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return b""

    def download(self, name: str, path: Path) -> None:
        """Copy a file to this machine."""
        self.fs.get_file(f"{self._root}/{name}", str(path))

    def remove(self, name: str) -> None:
        """Remove a file if it exists, and its folder if that is empty then."""
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError):
            self.fs.rm_file(path)
        if self._is_disk and "/" in name:
            with suppress(Exception):  # the folder is not empty
                self.fs.rmdir(path.rpartition("/")[0])
