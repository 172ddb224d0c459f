"""The copy of a run folder at a URL, made with fsspec."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pflsim.config.validate import CONFIGURATION, check_no_password, is_url
from pflsim.errors import RunError, SettingsError
from pflsim.records.checkpoint_read import META, by_round
from pflsim.records.folder import CONFIG, first_free, write_config
from pflsim.records.history import METRICS

logger = logging.getLogger(__name__)


class RemoteFolder:
    """A folder at a URL, whose files are named by their path in it. Its file system can raise any exception.

    Args:
        url: the URL of the folder.
        setting: the setting that names it, for messages.

    Raises:
        SettingsError: fsspec cannot access the URL.
    """

    def __init__(self, url: str, setting: str = "run_dir"):
        from fsspec.core import url_to_fs  # slow to import, and only runs with a URL need it
        from fsspec.spec import AbstractFileSystem

        self.url, self._named = url, f"{setting}={url}"
        with self.errors("used"):
            self.fs, root = url_to_fs(url)
        self._root = root.rstrip("/")
        # a file system with its own `mv` is like a disk, whose folders must exist; in an object store they need not
        self._has_folders = type(self.fs).mv is not AbstractFileSystem.mv

    def files(self) -> list[str]:
        """Return the names of all files but hidden ones."""
        self.fs.invalidate_cache()
        names = (path.removeprefix(self._root).lstrip("/") for path in self.fs.find(self._root))
        return [name for name in names if name and not _is_hidden(name)]

    def checkpoints(self) -> dict[int, str]:
        """Return the complete checkpoints: the names of their folders by round."""
        folders = {name.split("/")[1] for name in self.files() if re.fullmatch(rf"checkpoints/round_\d+/{META}", name)}
        return {int(folder[6:]): f"checkpoints/{folder}" for folder in folders}

    def read(self, name: str) -> bytes:
        """Return the content of a file; empty if it does not exist."""
        try:
            return self.fs.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return b""

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        if self._has_folders:
            self.fs.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{self._root}/{name}")

    @contextmanager
    def errors(self, verb: str) -> Iterator[None]:
        """Raise an error inside the block as a `SettingsError`."""
        try:
            yield
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(f"{self._named} cannot be {verb}: {_reason(error)}; {CONFIGURATION}") from error


class RemoteCopy:
    """Keeps a copy of a run folder at a URL.

    An upload brings the records first, then each new checkpoint with its meta.json last, then removes checkpoints that
    the run has removed, and brings summary.json at the end. A checkpoint with meta.json is complete, and the records
    include its round. So a run can be resumed from a copy whose upload was interrupted between two files.

    Use it as a context: it uploads at the beginning and at the end. During the run, `upload_if_due` uploads after each
    checkpoint. A failed upload is logged once and repeated after the next checkpoint; if the last upload fails, the run
    ends with an error.

    Args:
        remote: the folder at the URL.
        folder: the run folder.
    """

    def __init__(self, remote: RemoteFolder, folder: Path):
        self.remote, self.folder, self.url = remote, folder, remote.url
        self.uploaded: dict[Path, tuple[int, int]] = {}
        """The size and time of each file in the copy."""
        self._due = self._warned = False

    def checkpoint_saved(self) -> None:
        """Make the next `upload_if_due` upload."""
        self._due = True

    def upload_if_due(self) -> None:
        """Upload if a checkpoint was saved since the last upload."""
        if not self._due:
            return
        self._due = False
        try:
            self.upload()
        except Exception as error:
            if not self._warned:
                self._warned = True
                next_try = f"the run continues in {self.folder}, and the next checkpoint uploads again"
                logger.warning(f"the remote copy {self.url} could not be updated: {_reason(error)}; {next_try}")

    def upload(self) -> None:
        """Upload what is new."""
        summary, checkpoints = self.folder / "summary.json", by_round(self.folder / "checkpoints")
        files = [path for path in self.folder.rglob("*") if path.is_file() and not _is_hidden(self._name(path))]
        for path in files:
            if path != summary and not self._name(path).startswith("checkpoints/"):
                self._put(path)
        for folder in checkpoints.values():
            if self.uploaded.get(folder / META) != version(folder / META):
                self.remote.remove(self._name(folder / META))  # if an earlier session has left one
                for path in sorted(folder.iterdir(), key=lambda path: path.name == META):
                    self._put(path)
        kept = tuple(f"{self._name(folder)}/" for folder in checkpoints.values())
        old = [name for name in self.remote.files() if name.startswith("checkpoints/") and not name.startswith(kept)]
        for name in sorted(old, key=lambda name: not name.endswith(META)):
            self.remote.remove(name)
        self._put(summary)

    def _put(self, path: Path) -> None:
        if path.exists() and self.uploaded.get(path) != (found := version(path)):
            self.remote.write(self._name(path), path.read_bytes())
            self.uploaded[path] = found

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def __enter__(self) -> RemoteCopy:
        self._due = True
        self.upload_if_due()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # a second Ctrl-C
        try:
            self.upload()
        except Exception as error:
            why = f"{_reason(error)}; all files are in {self.folder}: copy them there"
            failure = f"the remote copy {self.url} is incomplete: {why}"
            if kind is None:
                raise RunError(failure) from error
            logger.warning(failure)  # the error that ended the run is raised


def new_remote_folder(run_dir: str | None) -> RemoteFolder | None:
    """Return the remote folder of a new run; None if run_dir is not a URL.

    Raises:
        SettingsError: the folder cannot be used, or is not empty.
    """
    if run_dir is None or not is_url(run_dir):
        return None
    remote = RemoteFolder(run_dir)
    with remote.errors("read"):
        if remote.files():
            raise SettingsError(f"run_dir={run_dir} is not empty: give another URL, or remove the files")
    with remote.errors("written to"):
        remote.write(".probe", b"")
        remote.remove(".probe")
    return remote


def resume_remote_copy(run_dir: str | None, folder: Path, done: int | None) -> RemoteCopy | None:
    """Return the remote copy of a resumed run; None if run_dir is not a URL.

    Args:
        run_dir: the run's setting.
        folder: the run folder on this machine.
        done: the last round whose checkpoint can be used; None: the run starts again.

    Raises:
        SettingsError: the remote folder cannot be used, has another run, or has a later checkpoint of this run.
    """
    if run_dir is None or not is_url(run_dir):
        return None
    remote = RemoteFolder(run_dir)
    copy = RemoteCopy(remote, folder)
    with remote.errors("read"):
        checkpoints, lines = remote.checkpoints(), folder / METRICS
        own = lines.read_bytes().partition(b"\n")[0] if lines.exists() else b""
        if (last := max(checkpoints, default=-1)) > (-1 if done is None else done):
            why = f"has a checkpoint of round {last}, but {folder} has {'none' if done is None else f'round {done}'}"
        elif (first := remote.read(METRICS).partition(b"\n")[0]) and first != own:  # two runs differ in seconds
            why = f"has files of another run than {folder}"
        else:
            for name in checkpoints.values():
                meta = folder / name / META
                if meta.exists() and remote.read(f"{name}/{META}") == meta.read_bytes():
                    copy.uploaded[meta] = version(meta)
            return copy
        raise SettingsError(f"run_dir={run_dir} {why}: give resume={run_dir} to continue that run, or another URL")


def download(url: str, root: Path = Path("runs")) -> Path:
    """Download a run to a new folder in `root` and return the folder. The resumed run keeps updating the URL.

    Raises:
        SettingsError: there is no run at the URL, it cannot be read, or the URL has a password.
    """
    import yaml

    check_no_password(url)
    remote = RemoteFolder(url, "resume")
    with remote.errors("downloaded"):
        names = remote.files()
        if CONFIG not in names:
            raise SettingsError(f"resume={url}: there is no run, because {CONFIG} is missing")
        root.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rstrip("/").rpartition("/")[2]).lstrip(".")
        folder = first_free(root / (name or "run"))
        try:
            # Checkpoints are downloaded before the records, which then include their rounds even if the run continues.
            for name in sorted(names, key=lambda name: not name.startswith("checkpoints/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(remote.read(name))
            write_config(folder, {**yaml.safe_load((folder / CONFIG).read_bytes()), "run_dir": url})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def version(path: Path) -> tuple[int, int]:
    """Return the size and the time of change of a file."""
    details = path.stat()
    return details.st_size, details.st_mtime_ns


def _is_hidden(name: str) -> bool:
    """Return whether a file, or a folder that it is in, begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _reason(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join([*([str(error.filename)] if error.filename else []), error.strerror])
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
