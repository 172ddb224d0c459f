"""Where a run that is kept elsewhere is begun, taken up, or brought back from."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pflsim.config.urls import check_no_password, is_url
from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint.meta import META, BadCheckpoint, round_of
from pflsim.run_folder.checkpoint.read import verified
from pflsim.run_folder.folder import CONFIG, first_free, write_config
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.remote_copy.remote_copy import CHECKPOINTS, RemoteCopy, Seen, seen
from pflsim.run_folder.remote_copy.remote_folder import PART, RemoteFolder, is_hidden, last_part, reason
from pflsim.run_folder.tracking.records import METRICS, PER_CLIENT, read_records


def new_place(run_dir: str | None) -> RemoteFolder | None:
    """The place of a run that is to begin; None where run_dir is none elsewhere.

    Raises:
        SettingsError: it cannot be used, or something is there.
    """
    if run_dir is None or not is_url(run_dir):
        return None
    place = RemoteFolder(run_dir)
    place.try_out(empty=True)
    return place


def resume_at_url(run_dir: str | None, folder: Path, journal: Journal, done: int | None) -> RemoteCopy | None:
    """The mirror of a run that is taken up in its folder; None where it is kept in this folder alone.

    Args:
        run_dir: where it is kept.
        folder: its folder.
        journal: in that folder.
        done: the last round that is done there; None: it begins again.

    Raises:
        SettingsError: the place cannot be used, is another run's, or has more of this run than can be used here.
    """
    if run_dir is None or not is_url(run_dir):
        return None
    place = RemoteFolder(run_dir)
    place.try_out(empty=False)
    try:
        return RemoteCopy(place, folder, journal, _known(place, folder, done))
    except SettingsError:
        raise
    except Exception as error:  # a store's own package raises whatever it likes
        raise SettingsError(f"run_dir={run_dir} cannot be read: {reason(error)}") from error


def _known(place: RemoteFolder, folder: Path, done: int | None) -> dict[str, Seen | None]:
    """What is there already, with the files of checkpoints that are the same as here: so these stay while they do."""
    found = place.files(hidden=True)
    there = {name: size for name, size in found.items() if not is_hidden(name)}
    if there:
        _check_same_run(place, folder, there, done)
    for name in found.keys() - there.keys():
        if name.endswith(PART):  # of an upload that was killed
            place.remove(name)
    known: dict[str, Seen | None] = dict.fromkeys(there)
    for meta in (folder / CHECKPOINTS).glob(f"round_*/{META}"):
        name = f"{CHECKPOINTS}/{meta.parent.name}"
        if f"{name}/{META}" not in there or place.read(f"{name}/{META}") != meta.read_bytes():
            continue
        for path in meta.parent.iterdir():  # their digests are in meta.json
            if there.get(f"{name}/{path.name}") == path.stat().st_size:
                known[f"{name}/{path.name}"] = seen(path)
    return known


def _check_same_run(place: RemoteFolder, folder: Path, there: Mapping[str, int], done: int | None) -> None:
    config = place.read(CONFIG)
    first, own = ((data or b"").partition(b"\n")[0] for data in (place.read(METRICS), _contents(folder / METRICS)))
    same = config is not None and _settings(config) == _settings(_contents(folder / CONFIG))
    if not same or (first and own and first != own):  # its seconds are no two runs' alike
        raise SettingsError(
            f"run_dir={place.url} holds something else than the run in {folder}; remove it, or take that up with "
            f"resume={place.url}"
        )
    last = _last_usable(place, there, -1 if done is None else done)
    if last is not None:
        newest = max(
            (n for path in (folder / CHECKPOINTS).glob("round_*") if (n := round_of(path)) is not None), default=-1
        )
        here = "none that can be used" if done is None else f"only after round {done}"
        why = "the run has gone on there" if newest < last else "what is here is damaged, and would take its place"
        raise SettingsError(
            f"run_dir={place.url} has a checkpoint after round {last}, {folder} {here}: {why}; take it up with "
            f"resume={place.url}"
        )


def _last_usable(place: RemoteFolder, there: Collection[str], after: int) -> int | None:
    """The last round after which a run brought back from there would go on, if it is a later one than this."""
    rounds = sorted({n for n in map(_round_at, there) if n is not None and n > after}, reverse=True)
    if not rounds:
        return None
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        try:
            for name in {METRICS, PER_CLIENT}.intersection(there):
                place.fetch(name, folder / name)
            recorded = read_records(folder).last
        except SettingsError:  # they are none
            return None
        for number in rounds:
            checkpoint = folder / f"round_{number:04d}"
            names = [name for name in there if _is_in(name, f"{CHECKPOINTS}/{checkpoint.name}")]
            if number <= recorded:
                checkpoint.mkdir()
                for name in names:
                    place.fetch(name, checkpoint / Path(name).name)
                with suppress(BadCheckpoint):
                    return verified(checkpoint).round
                shutil.rmtree(checkpoint)
    return None


def _round_at(name: str) -> int | None:
    """The round of a checkpoint, by the name of its meta.json."""
    path = Path(name)
    return round_of(path.parent) if path.name == META and path.parent.parent == Path(CHECKPOINTS) else None


def _is_in(name: str, folder: str) -> bool:
    return name.rpartition("/")[0] == folder


def fetch(url: str, root: Path = Path("runs")) -> Path:
    """Bring a run from elsewhere into a new folder below `root`, to be taken up there and kept where it comes from.

    Raises:
        SettingsError: there is no run, it cannot be read, or the URL has a password.
    """
    check_no_password(url)
    place = RemoteFolder(url, "resume")
    try:
        there = place.files()
    except Exception as error:  # a store's own package raises whatever it likes
        raise SettingsError(f"resume={url} cannot be read: {reason(error)}") from error
    if CONFIG not in there:
        raise SettingsError(f"resume={url}: there is no run, for it has no {CONFIG}")
    folder = _new_folder(root / last_part(url))
    try:
        for name in sorted(filter(lambda name: _counts(name, there), there), key=_state_first):
            path = folder / name
            if ".." in Path(name).parts or not path.resolve().is_relative_to(folder.resolve()):
                raise SettingsError(f"resume={url}: {name} is no name of a run's file")
            path.parent.mkdir(parents=True, exist_ok=True)
            place.fetch(name, path)
        _point_to(folder, url)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SettingsError) or not isinstance(error, Exception):
            raise
        raise SettingsError(f"resume={url} cannot be read: {reason(error)}; is the run going on?") from error
    return folder


def _new_folder(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return first_free(path)
    except OSError as error:
        raise SettingsError(f"a folder for the run cannot be made: {error.filename}: {error.strerror}") from error


def _counts(name: str, there: Collection[str]) -> bool:
    """Whether a file is not of a checkpoint that is none yet, or none any more."""
    return not name.startswith(f"{CHECKPOINTS}/") or f"{name.rpartition('/')[0]}/{META}" in there


def _state_first(name: str) -> tuple[int, str]:
    """Checkpoints before the records, which must have all their rounds; last what makes it a run, config.yaml."""
    return (2 if name == CONFIG else 0 if name.startswith(f"{CHECKPOINTS}/") else 1), name


def _point_to(folder: Path, url: str) -> None:
    """Have config.yaml say where the run is kept from now on, if it was copied there from elsewhere."""
    settings = _settings(_contents(folder / CONFIG), without=())
    if isinstance(settings, dict) and settings.get("run_dir") != url:
        write_config(folder, {**settings, "run_dir": url})


def _settings(config: bytes, without: tuple[str, ...] = ("run_dir",)) -> Any:
    """What config.yaml says; None where it cannot be read."""
    import yaml

    try:
        content = yaml.safe_load(config)
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return {key: value for key, value in content.items() if key not in without} if isinstance(content, dict) else None


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
