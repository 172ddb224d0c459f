"""A run folder kept the same at a URL while the run goes on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import TracebackType

from pflsim.errors import RunError
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.remote_copy.remote_folder import RemoteFolder, is_hidden, reason

CHECKPOINTS, META, SUMMARY = "checkpoints", "meta.json", "summary.json"
ASIDE = ".mirror"
SECONDS = 60.0

Seen = tuple[int, int, int]
"""Size, time of the last change and inode of a file; another one has others."""
Held = dict[str, tuple[Path, Seen]]
"""The files of a checkpoint by name: where to read them, and what they are."""


class RemoteCopy:
    """Brings what is new in a run folder to a place elsewhere, and removes there what is gone.

    Whoever looks there at any moment, even after this process was killed, finds only checkpoints that are whole, whose
    rounds are in the records, and at least one as soon as there was one: the records come first, then the new
    checkpoints, each with its meta.json last, then those that are gone go, each with its meta.json first, and
    summary.json, which says whether the run is complete, comes at the very end.

    As a context it begins with an upload, and ends with one that leaves everything there; but whoever leaves it in a
    hurry (KeyboardInterrupt) does not wait. In between uploads go on in the background, one at a time.

    Args:
        place: where to.
        folder: the run folder.
        journal: is told once when the place cannot be written to.
        known: what is there already: by name, the local file that is the same, None where nothing is known.
        seconds: something is brought at least this often.
    """

    def __init__(
        self,
        place: RemoteFolder,
        folder: Path,
        journal: Journal,
        known: Mapping[str, Seen | None] | None = None,
        seconds: float = SECONDS,
    ):
        self.place, self.folder, self.seconds = place, folder, seconds
        self._journal = journal
        self._there: dict[str, Seen | None] = dict(known or {})
        self._thread: Thread | None = None
        self._due, self._begun = True, 0.0
        self._trouble: str | None = None
        self._told = False

    @property
    def url(self) -> str:
        """Where the run is kept."""
        return self.place.url

    def expect(self) -> None:
        """A checkpoint is about to take its place: the next `tick` begins an upload."""
        self._due = True

    def tick(self) -> None:
        """Begin an upload in the background where one is due and none is under way."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._trouble and not self._told:
            self._told = True
            self._journal.say(
                f"the run cannot be kept at {self.url} at the moment: {self._trouble}; it goes on, all of it is in "
                f"{self.folder}, and this is tried again"
            )
        if self._due or time.monotonic() - self._begun >= self.seconds:
            self._due, self._begun = False, time.monotonic()
            self._thread = Thread(target=self._try, name="remote copy", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the upload that is under way."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait for the upload that is under way, then bring what is left, and see that everything is there.

        Raises:
            RunError: it is not.
        """
        self.wait()
        self._try(last=True)
        if self._trouble:
            raise RunError(
                f"not all of the run could be brought to {self.url}: {self._trouble}; all of it is in {self.folder}"
            )

    def __enter__(self) -> RemoteCopy:
        self.tick()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return
        try:
            self.finish()
        except RunError as another:
            if kind is None:
                raise
            self._journal.say(str(another))  # what has ended the run is said by its own error

    def _try(self, last: bool = False) -> None:
        self._trouble = None
        try:
            self._upload()
            if last:
                self._trouble = self._missing()
        except Exception as error:  # a store's own package raises whatever it likes
            self._trouble = reason(error)

    def _upload(self) -> None:
        with self._held() as (checkpoints, lost):
            # What counts is listed before the records are read: so these have all rounds of those checkpoints.
            files = run_files(self.folder)
            summary = files.pop(SUMMARY, None)
            present = {SUMMARY, *files, *(name for checkpoint in checkpoints for name in checkpoint)}
            for name, path in files.items():
                self._bring_copy(name, path)
            for checkpoint in checkpoints:
                self._bring_checkpoint(checkpoint)
            self._remove(n for n in self._there if n not in present and not (lost and n.startswith(f"{CHECKPOINTS}/")))
            if summary is not None:
                self._bring_copy(SUMMARY, summary)

    @contextmanager
    def _held(self) -> Iterator[tuple[list[Held], bool]]:
        """The checkpoints that count now, in files that stay when the run removes them; and whether one was lost."""
        aside = self.folder / ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        held, lost = [], False
        try:
            for checkpoint in sorted((self.folder / CHECKPOINTS).glob("round_*")):
                if checkpoint.is_file():
                    continue
                try:
                    held.append(_hold(checkpoint, aside / checkpoint.name))
                except FileNotFoundError:  # removed meanwhile, since there is a newer one
                    lost = self._due = True
            yield held, lost
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _bring_copy(self, name: str, path: Path) -> None:
        """Bring a file that may be growing: a store may be taken aback by one that is not as long as it was."""
        try:
            now = seen(path)
            if self._there.get(name) == now:
                return
            copy = self.folder / ASIDE / "copy"
            shutil.copyfile(path, copy)
        except FileNotFoundError:  # gone since it was listed
            return
        self._bring(name, copy, now)

    def _bring_checkpoint(self, checkpoint: Held) -> None:
        """Bring a checkpoint, meta.json last; without that it is none, and so has none while it is not whole."""
        new = [name for name, (_, now) in checkpoint.items() if self._there.get(name) != now]
        meta = next((name for name in checkpoint if name.endswith(f"/{META}")), None)
        if new and meta is not None:
            if meta in self._there:
                self._remove([meta])
            new = [*(name for name in new if name != meta), meta]
        for name in new:
            self._bring(name, *checkpoint[name])

    def _bring(self, name: str, path: Path, now: Seen) -> None:
        self._there[name] = None  # until it is certain
        self.place.put(path, name)
        self._there[name] = now

    def _remove(self, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: (not name.endswith(f"/{META}"), name)):
            self.place.remove(name)
            del self._there[name]
            folder = name.rpartition("/")[0]
            if folder and not any(other.startswith(f"{folder}/") for other in self._there):
                self.place.remove_folder(folder)

    def _missing(self) -> str | None:
        """What is not there as it should be, going by the sizes; for when nothing changes any more."""
        here = {name: path.stat().st_size for name, path in run_files(self.folder, checkpoints=True).items()}
        there = self.place.files()
        wrong = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{wrong[0]}{more} there is not what was brought; does another run use the place?" if wrong else None


def run_files(folder: Path, checkpoints: bool = False) -> dict[str, Path]:
    """The files of a run by name, without what is hidden, and checkpoints only where they are asked for."""
    found: dict[str, Path] = {}
    for at, folders, names in os.walk(folder):
        inside = Path(at).relative_to(folder)
        leave_out = {CHECKPOINTS} if inside == Path() and not checkpoints else set()
        folders[:] = sorted(name for name in folders if name not in leave_out and not is_hidden(name))
        for name in sorted(names):
            path = Path(at) / name
            if not is_hidden(name) and path.is_file():  # a pipe would be read for ever
                found[(inside / name).as_posix()] = path
    return found


def seen(path: Path) -> Seen:
    """What tells a file from another one, and from what it was."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns, about.st_ino


def _hold(checkpoint: Path, aside: Path) -> Held:
    """The files of a checkpoint, as links that stay when it is removed, or copies where there are no links.

    Raises:
        FileNotFoundError: it is being removed.
    """
    before, held = checkpoint.stat().st_ino, dict[str, tuple[Path, Seen]]()
    aside.mkdir()
    for path in sorted(checkpoint.iterdir()):
        held[f"{CHECKPOINTS}/{checkpoint.name}/{path.name}"] = aside / path.name, seen(path)
        try:
            os.link(path, aside / path.name)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(path, aside / path.name)
    if checkpoint.stat().st_ino != before:
        raise FileNotFoundError(checkpoint)
    return held
