"""Settings of many command lines at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pflsim.config.components import COMPONENTS
from pflsim.config.compose import Composition, composed, composing, plain
from pflsim.config.settings import Settings


def compose_all(commands: Iterable[Sequence[str]], folders: Sequence[Path]) -> list[Settings]:
    """Return the settings of each list of overrides.

    Hydra composes each combination of groups once (0.3 s); other overrides are merged into a copy.

    Raises:
        SettingsError: a group or a component does not exist.
    """
    bases: dict[tuple[str, ...], Composition] = {}
    found = []
    with composing(folders):
        for words in commands:
            groups = tuple(w for w in words if w.startswith("+") or w.partition("=")[0] in COMPONENTS)
            if groups not in bases:
                bases[groups] = composed(groups, folders)
            values = OmegaConf.from_dotlist([word for word in words if word not in groups])
            merged: Any = OmegaConf.merge(bases[groups].config, values)
            found.append(plain(replace(bases[groups], config=merged)))
    return found
