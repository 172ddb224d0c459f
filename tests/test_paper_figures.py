"""What is kept of the papers' figures: every experiment has its file, whose rows are runs that can be made."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pflsim.analysis.compare.paper import differences, paper_table
from pflsim.analysis.compare.planned import planned
from pflsim.analysis.compare.published import read_published
from pflsim.analysis.results import Run
from pflsim.analysis.results.settings import run_settings
from pflsim.config.checks import check
from pflsim.config.compose import CONFIGS, composed, composing, plain

EXPERIMENTS = sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml"))
SILENT = {"fedalp_figure4", "fedfcd_figure5", "fedfcd_figure6", "fedfcd_figure7"}
SILENT |= {"pfedla_figure5", "pfedla_figure6", "pfedpm_figure3_femnist"}
"""Figures without printed values."""


def test_every_experiment_has_its_file() -> None:
    assert sorted(p.stem for p in (CONFIGS / "experiment").glob("*.toml")) == EXPERIMENTS
    assert {name for name in EXPERIMENTS if not read_published(name).rows} == SILENT


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_are_in_range(name: str) -> None:
    published = read_published(name)
    assert published.notes or published.rows
    labels = [row.label for row in published.rows]
    assert len(set(labels)) == len(labels)
    most = 1 if published.unit == "fraction" else 100
    for row in published.rows:
        assert most / 5 < row.value < most
        assert row.std is None or 0 < row.std < most / 8


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_of_a_row_makes_its_settings(name: str) -> None:
    """Hydra composes what was worked out from the files without it."""
    done: set[str] = set()
    for row in read_published(name).rows:
        plan = planned(row.experiment or name, row.settings, CONFIGS)
        command = plan.command()
        if command in done:
            continue
        done.add(command)
        with composing([CONFIGS]):
            settings = plain(composed(shlex.split(command)[2:], [CONFIGS]))
        check(settings)
        known = {part: settings.names[part] for part in ("method", "data", "model")}
        run = SimpleNamespace(config=asdict(settings), method=known["method"], summary=known)
        own = run_settings(cast(Run, run))
        assert differences(own, plan.settings()) == []
        assert own.keys() == plan.settings().keys()
    assert {command for command, _ in paper_table(name, []).missing} == done


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_settings_file_leaves_figures_to_the_other(name: str) -> None:
    """One place for a number: none of the paper's stands in the comments as well."""
    path: Path = CONFIGS / "experiment" / f"{name}.yaml"
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    words: Any = re.findall(r"\d+\.\d{2,}", "\n".join(line for line in comments if "launch.py" not in line))
    assert not set(map(float, words)) & {row.value for row in read_published(name).rows}
    assert f"# python launch.py compare --experiment {name}" in comments
