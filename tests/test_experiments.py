"""Every file in configs/experiment and configs/quick composes and holds together; nothing is loaded or run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pflsim import cli
from pflsim.config.checks import check, check_sweep
from pflsim.config.components import COMPONENTS, bind_variants, check_part
from pflsim.config.compose import CONFIGS, composed, composing, plain, sweep
from pflsim.config.settings import Settings

EXPERIMENTS = sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml"))
QUICK = sorted(p.stem for p in (CONFIGS / "quick").glob("*.yaml"))
FILES = sorted(p for group in ("experiment", "quick") for p in (CONFIGS / group).glob("*.yaml"))


def settings(*overrides: str) -> Settings:
    with composing([CONFIGS]):
        found = plain(composed(list(overrides), [CONFIGS]))
    sound(found)
    return found


def sound(found: Settings) -> None:
    check(found)
    for part in COMPONENTS:
        check_part(getattr(found, part), part)
    bind_variants(found.model)


def test_every_experiment_has_its_quick_form() -> None:
    assert EXPERIMENTS and QUICK == EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes(name: str) -> None:
    """Alone and quick; quick is the same experiment, less of it."""
    full = settings(f"+experiment={name}")
    quick = settings(f"+experiment={name}", f"+quick={name}")
    assert full != quick and quick.rounds <= full.rounds
    for group in ("method", "data"):
        assert quick.names[group] == full.names[group]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_commands_in_the_comments_compose(path: Path) -> None:
    """A file says how it is run, and each of its commands is understood."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n")
    found = re.findall(r"^# (python launch\.py .+)$", text, re.MULTILINE)
    assert any(f"+{path.parent.name}={path.stem}" in line for line in found), "its own command is missing"
    for line in found:
        options = cli._options(shlex.split(line)[2:])
        with composing([CONFIGS]):
            jobs = sweep(options.overrides, [CONFIGS]) if options.multirun else [options.overrides]
            runs = [plain(composed(job, [CONFIGS])) for job in jobs]
        for run in runs:
            sound(run)
        check_sweep(runs)
