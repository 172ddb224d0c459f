"""Resumes a run from its folder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pflsim.commands.sweep import new_runner
from pflsim.config.components import replaced
from pflsim.config.compose import composed, to_settings
from pflsim.config.help import groups_in
from pflsim.config.names import written
from pflsim.config.validate import checked, is_url
from pflsim.errors import SettingsError
from pflsim.records.folder import is_complete, read_summary
from pflsim.records.saved_settings import CHANGED_CODE, changed, check_destination, run_folder, saved_settings


def resume_run(
    name: str,
    values: Mapping[str, Any],
    folders: Sequence[Path],
    own_process: bool = False,
    callbacks: Iterable[Any] = (),
    given: Mapping[str, Any] | None = None,
) -> Path:
    """Resume a run with its own settings, given ones that cannot change its results, and perhaps more rounds.

    Args:
        name: the run's folder or URL, or `last`.
        values: settings to change, and `changed_code`, by dotted key.
        folders: config folders.
        own_process: see `new_runner`.
        callbacks: see `pflsim.run`.
        given: the names of objects that are given again, by dotted key.

    Returns:
        The run folder.

    Raises:
        SettingsError: the run cannot be resumed with these settings.
        RunError: the run ended early.
    """
    folder, keys = run_folder(name), [key for key in values if key != CHANGED_CODE]
    settings, changed_code = saved_settings(folder), checked(CHANGED_CODE, bool, values.get(CHANGED_CODE, False))
    own, again = written([settings.task.loss, settings.eval.metrics]), written(given)
    for target in sorted(replaced):
        if re.search(rf"{target}\b", own) and not re.search(rf"{target}\b", again):
            raise SettingsError(f"{target}: another object has this name now; pass the run's own to pflsim.resume")
    if keys:
        option = settings.names["data"]
        data = option if option in groups_in(folders)["data"] else settings.data["_target_"]
        same = {"data": data} if any(key.startswith("data.") for key in keys) else {}
        found = composed(same | {key: values[key] for key in keys}, folders)
        settings = changed(settings, to_settings(found), keys)
    stopped, saved = read_summary(folder).get("stopped_early"), saved_settings(folder)
    if stopped and is_complete(folder, at := stopped["round"]) and settings.stop == saved.stop:
        by_callback = stopped["reason"].startswith("callback ")
        if "rounds" not in keys or settings.rounds <= (at if by_callback else saved.rounds):
            print(f"{folder} is complete: it stopped early in round {at}")
            return folder
        if not by_callback:
            advice = f"give a stop.patience above {saved.stop.patience} as well, or stop.patience=null"
            raise SettingsError(
                f"rounds={settings.rounds}: {folder} stopped early in round {at}; to continue it, {advice}"
            )
    if is_complete(folder, settings.rounds):
        print(f"{folder} is complete: all of its {settings.rounds} rounds are done")
        return folder
    if not is_url(name):
        check_destination(settings, folder, keys)
    with new_runner(settings, own_process) as runner:
        runner.resume(folder, settings, callbacks, changed_code)
    return folder
