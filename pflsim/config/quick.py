"""The quick form of an experiment: `+experiment=NAME quick=true`.

An experiment's YAML file lists under `quick` the overrides that make it small, as on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Override

from pflsim.errors import SettingsError

QUICK = "quick"


def is_quick(overrides: Sequence[Override]) -> bool:
    """Return whether the command line asks for the quick form.

    Raises:
        SettingsError: the value is not true or false, or `+` stands before the key.
    """
    asked = False
    for override in overrides:
        if override.key_or_group != QUICK:
            continue
        added = override.is_add() or override.is_force_add()
        if added or override.is_sweep_override() or not isinstance(override.value(), bool):
            raise SettingsError(f"{override.input_line}: expected true or false, as in +experiment=NAME quick=true")
        asked = bool(override.value())
    return asked


def quick_overrides(listed: Sequence[str], given: Sequence[Override]) -> list[str]:
    """Return an experiment's quick overrides, without those of keys that the command line sets itself.

    Args:
        listed: `quick` of the experiment.
        given: overrides of the command line.

    Raises:
        SettingsError: the experiment has none, or no experiment is chosen.
    """
    if not listed:
        raise SettingsError("quick=true: only experiments have a quick form: +experiment=NAME quick=true")
    keys = {override.key_or_group for override in given}
    return [text for text in listed if text.partition("=")[0] not in keys]
