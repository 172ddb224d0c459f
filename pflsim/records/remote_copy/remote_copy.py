"""Upload a run folder to a URL after each checkpoint."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pflsim.errors import RunError
from pflsim.records.checkpoint.meta import META
from pflsim.records.remote_copy.remote_folder import RemoteFolder, is_hidden, reason

CHECKPOINTS, SUMMARY = "checkpoints/", "summary.json"
logger = logging.getLogger(__name__)


class RemoteCopy:
    """Keeps a copy of a run folder at a URL.

    An upload brings the records first, then each new checkpoint with its meta.json last, then removes files that the
    run has removed, and brings summary.json at the end. So a run can be resumed from the copy even if an upload is
    interrupted: a checkpoint with meta.json is complete, and the records include its round.

    Use it as a context: it uploads at the beginning and at the end. During the run, `upload_if_due` uploads after each
    checkpoint and waits for the upload to finish. A failed upload is logged once and repeated after the next
    checkpoint; if the last upload fails, the run ends with an error.

    Args:
        remote: the folder at the URL.
        folder: the run folder.
    """

    def __init__(self, remote: RemoteFolder, folder: Path):
        self.remote, self.folder, self.url = remote, folder, remote.url
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._due = False
        self._warned = False

    def checkpoint_saved(self) -> None:
        """Make the next `upload_if_due` upload."""
        self._due = True

    def upload_if_due(self) -> None:
        """Upload if a checkpoint was saved since the last upload."""
        if not self._due:
            return
        self._due = False
        if (error := _failure(self._upload)) and not self._warned:
            self._warned = True
            next_try = f"the run continues in {self.folder}, and the next checkpoint uploads again"
            logger.warning(f"the remote copy {self.url} could not be updated: {error}; {next_try}")

    def finish(self) -> None:
        """Upload what is missing and compare names and sizes.

        Raises:
            RunError: the copy is incomplete.
        """
        if error := _failure(self._upload) or _failure(self._difference):
            why = f"{error}; all files are in {self.folder}: copy them there"
            raise RunError(f"the remote copy {self.url} is incomplete: {why}")

    def mark_uploaded(self, checkpoint: Path) -> None:
        """Do not upload a checkpoint that the remote copy has already."""
        for path in checkpoint.iterdir():
            self._uploaded[path.relative_to(self.folder).as_posix()] = _version(path)

    def _upload(self) -> None:
        remote, local = self.remote.files(), run_files(self.folder)
        versions = {name: _version(path) for name, path in local.items()}
        changed = {name for name, v in versions.items() if remote.get(name) != v[0] or self._uploaded.get(name) != v}
        for name in [name for name in changed if name.startswith(CHECKPOINTS)]:
            meta = f"{name.rpartition('/')[0]}/{META}"  # the checkpoint is invalid until all of its files are uploaded
            if meta in remote:
                self.remote.remove(meta)
            changed.update({meta} & local.keys())
        for name in sorted(changed - {SUMMARY}, key=lambda name: (name.startswith(CHECKPOINTS), _meta_last(name))):
            self._upload_file(name, local[name], versions[name])
        for name in sorted(remote.keys() - local.keys(), key=_meta_last, reverse=True):
            self.remote.remove(name)
        if SUMMARY in changed:
            self._upload_file(SUMMARY, local[SUMMARY], versions[SUMMARY])

    def _upload_file(self, name: str, path: Path, version: tuple[int, int]) -> None:
        if name.startswith(CHECKPOINTS):
            self.remote.upload(path, name)
        else:
            with tempfile.NamedTemporaryFile() as copy:  # a thread of TensorBoard may be writing to the original
                shutil.copyfile(path, copy.name)
                self.remote.upload(Path(copy.name), name)
        self._uploaded[name] = version

    def _difference(self) -> str | None:
        here = {name: path.stat().st_size for name, path in run_files(self.folder).items()}
        there = self.remote.files()
        wrong = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        return f"{', '.join(wrong[:3])} differs; does another run use the same URL?" if wrong else None

    def __enter__(self) -> RemoteCopy:
        self._due = True
        self.upload_if_due()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # a second Ctrl-C
        try:
            self.finish()
        except RunError as failure:
            if kind is None:
                raise
            logger.warning(str(failure))  # the error that ended the run is raised


def run_files(folder: Path) -> dict[str, Path]:
    """Return the files of a run folder that are copied, by name; hidden files and symbolic links are not."""
    files = ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*"))
    return {name: path for name, path in files if not is_hidden(name) and path.is_file() and not path.is_symlink()}


def _failure(step: Callable[[], str | None]) -> str | None:
    """Take a step that returns what is wrong, and return this or why the step failed."""
    try:
        return step()
    except Exception as error:  # a file system can raise any exception
        return reason(error)


def _version(path: Path) -> tuple[int, int]:
    details = path.stat()
    return details.st_size, details.st_mtime_ns


def _meta_last(name: str) -> tuple[bool, str]:
    return name.endswith(f"/{META}"), name
