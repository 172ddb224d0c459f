"""Every file in configs/experiment composes, also with quick=true; nothing is loaded or run."""

import re
import shlex
from pathlib import Path

import pytest
from support import settings_of

from pflsim import cli
from pflsim.config.checks import check_sweep
from pflsim.config.components import bind, variants_of
from pflsim.config.compose import CONFIGS, composed, parse, sweep, to_settings
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError

pytestmark = pytest.mark.slow

EXPERIMENTS = sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml"))
FILES = sorted((CONFIGS / "experiment").rglob("*.yaml"))
NAME = "fedfcd_table1_cifar10_pat"


def settings(*overrides: str) -> Settings:
    """Settings with a model that can be made."""
    found = settings_of(*overrides)
    for variant in variants_of(found.model):
        bind(variant, "model")
    return found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes(name: str) -> None:
    """Also with quick=true, which is the same experiment, scaled down."""
    full = settings(f"+experiment={name}")
    quick = settings(f"+experiment={name}", "quick=true")
    assert full.names["experiment"] == quick.names["experiment"] == name
    assert full != quick and quick.rounds <= full.rounds
    for group in ("method", "data"):
        assert quick.names[group] == full.names[group]


def test_the_command_line_wins_over_quick() -> None:
    quick = settings(f"+experiment={NAME}", "split.test=50", "quick=true", "rounds=7")
    assert (quick.rounds, quick.split["train"], quick.split["test"]) == (7, 200, 50)
    assert (quick.names["split"], quick.names["quick"]) == ("counts", "true")
    assert settings(f"+experiment={NAME}", "quick=false") == settings(f"+experiment={NAME}")
    jobs = sweep(parse([f"+experiment={NAME}", "quick=true,false"]))
    assert [to_settings(composed(job, [CONFIGS])).rounds for job in jobs] == [20, 500]


@pytest.mark.parametrize("text", ["quick=true", f"+experiment={NAME} quick=2", f"+experiment={NAME} +quick={NAME}"])
def test_quick_is_true_or_false_and_needs_an_experiment(text: str) -> None:
    with pytest.raises(SettingsError, match=r"quick=.*\+experiment=NAME"):
        settings(*text.split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_commands_in_the_comments_compose(path: Path) -> None:
    """Of a sweep the first and the last run."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n")
    for line in re.findall(r"^# (python launch\.py .+)$", text, re.MULTILINE):
        options = cli._options(shlex.split(line)[2:])
        values = parse(options.overrides)
        jobs = sweep(values) if options.multirun else [values]
        some = [jobs[0], *jobs[1:][-1:]]
        check_sweep([to_settings(composed(job, [CONFIGS])) for job in some], some)
