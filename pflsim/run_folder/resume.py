"""Taking up a run: which folder, and with which settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pflsim.config.plain import dotted, settings_from
from pflsim.config.settings import Settings
from pflsim.config.urls import is_url
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import CONFIG, last_run

CHANGEABLE = (
    "placement",
    "checkpoint",
    "executor",
    "ray_address",
    "on_client_error",
    "on_nonfinite",
    "progress",
    "tracking",
    "data.root",
    "data.path",
)
"""What may be another when a run is taken up: nothing here changes a result of what goes well. That the data are the
same elsewhere is seen by their hash."""
FIXED = ("placement.threads", "placement.device", "placement.cpu_actors")
"""But for these, which may change the last bits."""
MIXED = tuple(f"placement.{name}" for name in ("gpus", "actors_per_gpu", "gpu_speed", "actors", "clients_per_actor"))
"""And for these in a run with some clients on CPUs and others on GPUs: they decide which."""


def run_folder(asked: str, root: Path = Path("runs")) -> Path:
    """The folder of the run that `resume=` asks for: a folder, `last`, or a URL, from where it is brought here.

    Raises:
        SettingsError: there is no run in it.
    """
    if not asked:
        raise SettingsError("resume= is empty: expected a run folder, or last")
    if is_url(asked):
        from pflsim.run_folder.remote_copy.begin import fetch

        return fetch(asked, root)
    folder = last_run(root) if asked == "last" else Path(asked)
    if not folder.is_dir():
        raise SettingsError(f"resume={asked}: there is no such folder; expected a run folder, or last")
    if not (folder / CONFIG).is_file():
        raise SettingsError(f"resume={asked}: {folder} is no run folder, for it has no {CONFIG}")
    return folder


def saved_settings(folder: Path) -> Settings:
    """The settings that a run was begun with.

    Raises:
        SettingsError: config.yaml is not what a run writes.
    """
    import yaml

    path = folder / CONFIG
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(content, Mapping):
        raise SettingsError(f"{path} does not hold the settings of a run")
    try:
        return settings_from(content)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def fixed_settings(settings: Settings) -> dict[str, Any]:
    """By dotted key, all settings that belong to what a run is; a checkpoint has them, so that others are noticed."""
    kept = _kept(settings)
    return {key: value for key, value in dotted(asdict(settings)).items() if key in kept or not _is_free(key)}


def _kept(settings: Settings) -> tuple[str, ...]:
    """What of the placement belongs to the run; of a mix of devices nothing where there is none."""
    if settings.placement.cpu_actors:
        return FIXED + MIXED
    return tuple(key for key in FIXED if key != "placement.cpu_actors")


def _is_free(key: str) -> bool:
    return key in CHANGEABLE or key.partition(".")[0] in (*CHANGEABLE, "names", "run_dir")


def changed(settings: Settings, given: Settings, keys: Collection[str]) -> Settings:
    """The saved settings with what is given anew.

    Args:
        settings: saved.
        given: has the new values.
        keys: which of its keys count, dotted.

    Raises:
        SettingsError: one of them belongs to what the run is; names it.
    """
    before = settings
    for key in keys:
        if key not in CHANGEABLE and key.partition(".")[0] not in CHANGEABLE:
            raise SettingsError(
                f"{key} belongs to what the run is, so it cannot change when the run is taken up; what can: "
                f"{', '.join(CHANGEABLE)}"
            )
        settings = _with(settings, given, key.split("."))
    for key in FIXED + MIXED if before.placement.cpu_actors else FIXED:
        path = key.split(".")
        if key in keys and _at(given, path) != _at(before, path):
            raise SettingsError(f"{key} may change the last bits of a result, so a run that is taken up keeps its own")
        settings = _with(settings, before, path)
    on_gpus = [bool(s.placement.gpus) for s in (before, settings)]
    if settings.placement.device == "auto" and on_gpus[0] != on_gpus[1]:
        raise SettingsError(
            f"placement.gpus={settings.placement.gpus} would change the device, and with it the last bits of a result; "
            f"the run was begun with placement.gpus={before.placement.gpus}"
        )
    return settings


def _with(settings: Any, given: Any, path: Sequence[str]) -> Any:
    """A copy of the settings with one value, or one group of them, of the others."""
    name, rest = path[0], path[1:]
    if isinstance(settings, Mapping):
        return {**settings, name: given[name]}
    value = getattr(given, name)
    return replace(settings, **{name: _with(getattr(settings, name), value, rest) if rest else value})


def _at(settings: Any, path: Sequence[str]) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings
