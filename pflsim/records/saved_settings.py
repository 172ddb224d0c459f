"""The settings of a saved run, and which of them may change when it is resumed."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from pflsim.config.checks import check, settings_from
from pflsim.config.components import COMPONENTS
from pflsim.config.settings import Settings, dotted
from pflsim.config.validate import check_no_password, is_url
from pflsim.errors import SettingsError
from pflsim.records.environment import read_environment
from pflsim.records.folder import CONFIG, last_run
from pflsim.records.older_settings import saved_config

CHANGEABLE = (
    *("placement", "checkpoint", "executor", "ray_address", "on_client_error", "on_nonfinite"),
    *("progress", "sweep", "tracking", "stop", "data.root", "data.path", "run_dir"),
    "pretrained.weights",
)
"""Settings that may change when a run is resumed, because they do not change its results. A hash of the data detects
other data at a new path. `stop` decides when the run ends; `ray_actors.resume_point` checks that it would not have
ended before."""
EXTENSION = "rounds"
"""The setting that extends a run; `ray_actors.resume_point` checks that the rounds that are done stay the same."""
CHANGED_CODE = "changed_code"
"""Allows to resume a run with other code of the user; no setting of the run."""
FIXED_PLACEMENT = ("placement.threads", "placement.device", "placement.server_device")
"""Exceptions from `CHANGEABLE`: settings that may change the last bits of a result."""


def run_folder(asked: str) -> Path:
    """Return the folder of the run that `resume=` names: a folder, `last`, or a URL, which is downloaded.

    Raises:
        SettingsError: there is no run.
    """
    if is_url(asked):
        from pflsim.records.remote import download

        return download(asked)
    folder = last_run() if asked == "last" else Path(os.path.expanduser(asked))
    if not (folder / CONFIG).is_file():
        what = f"{folder} is not a run folder, because {CONFIG} is missing" if folder.is_dir() else "no such folder"
        raise SettingsError(f"resume={asked}: {what}; expected a run folder, a URL or last")
    return folder


def saved_settings(folder: Path, used: Sequence[str] = COMPONENTS) -> Settings:
    """Read the settings of a run from its config.yaml; `used` as in `settings_from`.

    Raises:
        SettingsError: it cannot be read, does not contain valid settings, or the run has another format.
    """
    import yaml

    read_environment(folder)  # refuses another format
    path = folder / CONFIG
    try:
        return settings_from(saved_config(path), used)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be used: {str(error).partition(chr(10))[0]}") from error


def fixed_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that define a run, by dotted key. A checkpoint stores them to detect differences."""
    values = dotted(asdict(settings))
    free = {*CHANGEABLE, "names"}
    return {k: v for k, v in values.items() if k in FIXED_PLACEMENT or free.isdisjoint((k, k.partition(".")[0]))}


def changed(settings: Settings, given: Settings, keys: Collection[str]) -> Settings:
    """Return the saved settings with new values.

    Args:
        settings: the saved settings.
        given: settings with the new values.
        keys: the dotted keys whose values are taken from `given`.

    Raises:
        SettingsError: one of these settings cannot change, because it defines the run.
    """
    before = settings
    for key in keys:
        if key not in (*CHANGEABLE, EXTENSION) and key.partition(".")[0] not in CHANGEABLE:
            others = f"settings that can change: {', '.join((EXTENSION, *CHANGEABLE))}"
            raise SettingsError(f"{key} defines the run and cannot change when it is resumed; {others}")
        settings = _with(settings, given, key.split("."))
    for key in FIXED_PLACEMENT:
        value = attrgetter(key)
        if key in keys and value(given) != value(before):
            raise SettingsError(f"{key} may change the last bits of a result and cannot change when a run is resumed")
        settings = _with(settings, before, key.split("."))
    if "run_dir" in keys and given.run_dir is not None and not is_url(given.run_dir):
        raise SettingsError(f"run_dir={given.run_dir}: a resumed run stays in its folder; expected a URL or null")
    on_gpus = [bool(s.placement.gpus) for s in (before, settings)]
    if settings.placement.device == "auto" and on_gpus[0] != on_gpus[1]:
        why = f"would change the device and so the last bits of a result; keep placement.gpus={before.placement.gpus}"
        raise SettingsError(f"placement.gpus={settings.placement.gpus} {why}")
    check(settings)
    return settings


def check_destination(settings: Settings, folder: Path, keys: Collection[str]) -> None:
    """Refuse to copy a run to a URL that only its config.yaml names, because the folder may be somebody else's.

    Raises:
        SettingsError: `run_dir` is a URL, and not one of the keys on the command line.
    """
    if is_url(settings.run_dir) and "run_dir" not in keys:
        check_no_password(str(settings.run_dir), "run_dir")
        advice = f"give run_dir={settings.run_dir} to continue it, or run_dir=null"
        raise SettingsError(f"{folder / CONFIG} has a remote copy: {advice}")


def _with(settings: Any, given: Any, path: Sequence[str]) -> Any:
    """Return a copy of the settings with one value, or one group of values, from `given`."""
    name, rest = path[0], path[1:]
    if isinstance(settings, Mapping):
        return {**settings, name: given[name]}
    value = getattr(given, name)
    return replace(settings, **{name: _with(getattr(settings, name), value, rest) if rest else value})
