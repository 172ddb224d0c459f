"""The copy of a run folder at a URL, made with fsspec."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from pflsim.config.validate import CONFIGURATION, check_no_password
from pflsim.errors import RunError, SettingsError, in_one_line
from pflsim.records.checkpoint_read import META, by_round
from pflsim.records.folder import CONFIG, STATUS, first_free, write_config
from pflsim.records.history import METRICS

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints/"


class RemoteCopy:
    """Keeps a copy of a run folder at a URL, whose file system can raise any exception.

    An upload brings the records first, then new checkpoints, their meta.json last, then summary.json. A checkpoint with
    meta.json is complete, and the records include its round. So a run can be resumed from a copy whose upload was
    interrupted between two files.

    Use it as a context: it uploads at the beginning and at the end. During the run, `upload_if_due` uploads after each
    checkpoint. A failed upload is logged and repeated after the next checkpoint; if the last upload fails, the run
    ends with an error.

    Args:
        url: the URL.
        folder: the run folder.
        setting: the setting that names the URL, for messages.

    Raises:
        SettingsError: fsspec cannot access the URL.
    """

    def __init__(self, url: str, folder: Path, setting: str = "run_dir"):
        from fsspec.core import url_to_fs  # slow to import, and only runs with a URL need it

        self.url, self.folder, self._setting = url, folder, setting
        self._uploaded: dict[str, tuple[int, int]] = {}  # the size and time of each file in the copy
        self._newest: int | None = None
        with self.errors("used"):
            self.fs, self.root = url_to_fs(url)
        self._make_folder = cache(partial(self.fs.makedirs, exist_ok=True))

    @contextmanager
    def errors(self, verb: str) -> Iterator[None]:
        """Raise an error inside the block as a `SettingsError`."""
        try:
            yield
        except Exception as error:
            why = f"{in_one_line(error)}; {CONFIGURATION}"
            raise SettingsError(f"{self._setting}={self.url} cannot be {verb}: {why}") from error

    def files(self) -> list[str]:
        """Return the names of all remote files."""
        self.fs.invalidate_cache()
        return [path.removeprefix(self.root).lstrip("/") for path in self.fs.find(self.root)]

    def read(self, name: str) -> bytes:
        """Return the content of a remote file."""
        return self.fs.cat_file(f"{self.root}/{name}")

    def upload_if_due(self) -> None:
        """Upload if there is a new checkpoint since the last call."""
        newest = max(by_round(self.folder / CHECKPOINTS), default=None)
        if newest == self._newest:
            return
        self._newest = newest
        try:
            self.upload()
        except Exception as error:
            next_try = f"the run continues in {self.folder}, and the next checkpoint uploads again"
            logger.warning(f"the remote copy {self.url} could not be updated: {in_one_line(error)}; {next_try}")

    def upload(self) -> None:
        """Upload what is new, then remove the checkpoints that the run has removed."""
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        names = [name for name in paths if name != STATUS and not re.search(r"(^|/)\.", name)]
        for name in sorted(names, key=lambda n: (n == "summary.json", n.startswith(CHECKPOINTS), META in n)):
            details = paths[name].stat()
            if self._uploaded.get(name) != (version := (details.st_size, details.st_mtime_ns)):
                path = f"{self.root}/{name}"
                self._make_folder(path.rpartition("/")[0])
                self.fs.pipe_file(path, paths[name].read_bytes())
                self._uploaded[name] = version
        old = [name for name in self.files() if name.startswith(CHECKPOINTS) and name not in paths]
        for name in sorted(old, key=lambda name: META not in name):
            self.fs.rm_file(f"{self.root}/{name}")

    def __enter__(self) -> RemoteCopy:
        with self.errors("written to"):
            self.upload()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # a second Ctrl-C
        try:
            self.upload()
        except Exception as error:
            why = f"{in_one_line(error)}; all files are in {self.folder}: copy them there"
            failure = f"the remote copy {self.url} is incomplete: {why}"
            if kind is None:
                raise RunError(failure) from error
            logger.warning(failure)  # the error that ended the run is raised


def check_new_url(url: str) -> None:
    """Check that the folder at the URL of a new run can be read and is empty.

    Raises:
        SettingsError: it is not.
    """
    copy = RemoteCopy(url, Path())
    with copy.errors("read"):
        names = copy.files()
    if names:
        raise SettingsError(f"run_dir={url} is not empty: give another URL, or remove the files")


def resumed_copy(url: str, folder: Path, done: int | None) -> RemoteCopy:
    """Return the remote copy of a resumed run.

    Args:
        url: of the copy.
        folder: the run folder on this machine.
        done: the last round whose checkpoint can be used; None: the run starts again.

    Raises:
        SettingsError: the remote folder cannot be used, has another run, or has a later checkpoint of this run.
    """
    copy = RemoteCopy(url, folder)
    with copy.errors("read"):
        names = copy.files()
        first = copy.read(METRICS).partition(b"\n")[0] if METRICS in names else b""
    found = [re.fullmatch(rf"{CHECKPOINTS}round_(\d+)/{META}", name) for name in names]
    last, lines = max((int(match[1]) for match in found if match), default=-1), folder / METRICS
    own = lines.read_bytes().partition(b"\n")[0] if lines.exists() else b""
    if last > (-1 if done is None else done):
        why = f"has a checkpoint of round {last}, but {folder} has {'none' if done is None else f'round {done}'}"
    elif first not in (b"", own):  # two runs differ in seconds
        why = f"has files of another run than {folder}"
    else:
        return copy
    raise SettingsError(f"run_dir={url} {why}: give resume={url} to continue that run, or another URL")


def download(url: str, root: Path = Path("runs")) -> Path:
    """Download a run to a new folder in `root` and return the folder. The resumed run keeps updating the URL.

    Raises:
        SettingsError: there is no run at the URL, it cannot be read, or the URL has a password.
    """
    import yaml

    check_no_password(url)
    copy = RemoteCopy(url, root, "resume")
    with copy.errors("downloaded"):
        names = copy.files()
        if CONFIG not in names:
            raise FileNotFoundError(f"there is no {CONFIG}")
        root.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rstrip("/").rpartition("/")[2]).lstrip(".")
        folder = first_free(root / (name or "run"))
        try:
            # Checkpoints are downloaded before the records, which then include their rounds even if the run continues.
            for name in sorted(names, key=lambda name: not name.startswith(CHECKPOINTS)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(copy.read(name))
            write_config(folder, {**yaml.safe_load((folder / CONFIG).read_bytes()), "run_dir": url})
        except BaseException:
            shutil.rmtree(folder)
            raise
    return folder
