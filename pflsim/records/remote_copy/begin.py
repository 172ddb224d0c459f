"""Check the URL of a new or resumed run, and download a run folder to resume it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pflsim.config.validate import check_no_password, is_url
from pflsim.errors import SettingsError
from pflsim.records.checkpoint.meta import META, round_of
from pflsim.records.folder import CONFIG, first_free, write_config
from pflsim.records.remote_copy.remote_copy import CHECKPOINTS, RemoteCopy
from pflsim.records.remote_copy.remote_folder import RemoteFolder, is_hidden, last_part, reason
from pflsim.records.tracking.records import METRICS


def new_remote_folder(run_dir: str | None) -> RemoteFolder | None:
    """Return the remote folder of a new run; None if run_dir is not a URL.

    Raises:
        SettingsError: the folder cannot be used, or is not empty.
    """
    if run_dir is None or not is_url(run_dir):
        return None
    remote = RemoteFolder(run_dir)
    remote.check_writable(empty=True)
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
    remote.check_writable(empty=False)
    copy = RemoteCopy(remote, folder)
    try:
        files = [name for name in remote.files() if not is_hidden(name)]
        if files:
            _check_same_run(remote, folder)
        for round_number, name in sorted(_checkpoints(files).items(), reverse=True):
            if round_number > (-1 if done is None else done):
                last = "has no usable checkpoint" if done is None else f"has round {done}"
                found = f"run_dir={run_dir} has a checkpoint of round {round_number}, but {folder} {last}"
                raise SettingsError(
                    f"{found}: give resume={run_dir}, or remove {run_dir}/{name} to continue from {folder}"
                )
            meta = folder / name / META
            if meta.is_file() and remote.read(f"{name}/{META}") == meta.read_bytes():
                copy.mark_uploaded(meta.parent)
        return copy
    except SettingsError:
        raise
    except Exception as error:  # a file system can raise any exception
        raise SettingsError(f"run_dir={run_dir} cannot be read: {reason(error)}") from error


def _check_same_run(remote: RemoteFolder, folder: Path) -> None:
    """Compare the settings and the first record, whose times differ between two runs."""
    configs = [_settings(data) or {} for data in (_read(folder, CONFIG), remote.read(CONFIG))]
    here, there = ({**config, "run_dir": None, "rounds": None} for config in configs)  # one may be extended
    first, own = (data.partition(b"\n")[0] for data in (remote.read(METRICS), _read(folder, METRICS)))
    if here != there or (first and own and first != own):
        both = f"run_dir={remote.url} has files of another run than {folder}"
        raise SettingsError(f"{both}: remove them, or give resume={remote.url} to continue that run")


def _checkpoints(files: list[str]) -> dict[int, str]:
    """Return the complete checkpoints: the names of their folders by round."""
    folders = [name.removesuffix(f"/{META}") for name in files if name.endswith(f"/{META}")]
    rounds = {folder: round_of(Path(folder)) for folder in folders if folder.startswith(CHECKPOINTS)}
    return {number: folder for folder, number in rounds.items() if number is not None}


def download(url: str, root: Path = Path("runs")) -> Path:
    """Download a run to a new folder in `root` and return the folder. The resumed run keeps updating the URL.

    Raises:
        SettingsError: there is no run at the URL, it cannot be read, or the URL has a password.
    """
    check_no_password(url)
    remote = RemoteFolder(url, "resume")
    try:
        files = [name for name in remote.files() if not is_hidden(name)]  # names with .. are hidden too
    except Exception as error:  # a file system can raise any exception
        raise SettingsError(f"resume={url} cannot be read: {reason(error)}") from error
    if CONFIG not in files:
        raise SettingsError(f"resume={url}: there is no run, because {CONFIG} is missing")
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = first_free(root / last_part(url))
    except OSError as error:
        raise SettingsError(f"the run folder cannot be created: {error.filename}: {error.strerror}") from error
    try:
        # Checkpoints are downloaded before the records, which then include their rounds even if the run continues.
        complete = (*(f"{name}/" for name in _checkpoints(files).values()),)
        for name in sorted(files, key=lambda name: (not name.startswith(CHECKPOINTS), name)):
            if name.startswith(CHECKPOINTS) and not name.startswith(complete):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            remote.download(name, folder / name)
        settings = _settings(_read(folder, CONFIG))
        if settings is not None and settings.get("run_dir") != url:
            write_config(folder, {**settings, "run_dir": url})
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SettingsError) or not isinstance(error, Exception):
            raise
        raise SettingsError(f"resume={url} cannot be read: {reason(error)}; is the run still running?") from error
    return folder


def _settings(config: bytes) -> dict[str, Any] | None:
    """Return the settings in config.yaml; None if it cannot be parsed."""
    import yaml

    try:
        content = yaml.safe_load(config)
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return content if isinstance(content, dict) else None


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    return path.read_bytes() if path.is_file() else b""
