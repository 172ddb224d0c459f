"""Contradictions within a run's settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pflsim.config.checks import CHOICES, check, check_sweep
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError


def settings_with(**changes: Any) -> Settings:
    """Default settings with some changed; `eval__every` is eval.every."""
    settings = Settings()
    for name, value in changes.items():
        group, _, key = name.rpartition("__")
        if group:
            settings = replace(settings, **{group: replace(getattr(settings, group), **{key: value})})
        else:
            settings = replace(settings, **{name: value})
    return settings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local_epochs": 3},
        {"local_steps": 3},
        {"fraction": 0.05},
        {"momentum": 0.0, "weight_decay": 0.0, "seed": 2**63 - 1},
        {"placement__clients_per_actor": 1},
        {"placement__actors": 10},
        {"placement__device": "cuda", "placement__gpus": 1},
        {"placement__gpus": 1, "placement__actors_per_gpu": "auto"},
        {"placement__gpus": 1, "placement__cpu_actors": 2, "placement__actors": 3, "placement__gpu_speed": 0.5},
        {"placement__gpus": 0, "placement__cpu_fallback": True, "placement__actors_per_gpu": "auto"},
        {"placement__gpus": 2, "placement__device": "cpu", "placement__actors_per_gpu": 3},
        {"trace__rounds": [1, 20]},
        {"checkpoint__every": 0, "checkpoint__keep": 1},
        {"names": {"experiment": "a", "quick": "a"}},
        {"names": {"experiment": "a"}},
        {"eval__holdout_clients": 9, "eval__finetune_epochs": 0},
    ],
)
def test_what_is_right(changes: dict[str, Any]) -> None:
    check(settings_with(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_epochs": 1, "local_steps": 1}, "both say how long"),
        ({"clients": 0}, "clients=0: expected a whole number of at least 1"),
        ({"rounds": -1}, "rounds=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"eval__holdout_clients": 10}, "eval.holdout_clients=10 of clients=10 leaves nobody .* at most 9"),
        ({"eval__holdout_clients": -1}, "eval.holdout_clients=-1: expected a number of at least 0"),
        ({"eval__finetune_epochs": -1}, "eval.finetune_epochs=-1: expected a number of at least 0"),
        ({"fraction": 0.05, "eval__holdout_clients": 5}, "fraction=0.05 of 5 clients selects nobody"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"local_epochs": 0}, "local_epochs=0"),
        ({"lr": 0.0}, "lr=0.0: expected a number above 0"),
        ({"lr": math.nan}, "lr=nan: expected a finite number"),
        ({"lr": -math.inf}, "lr=-inf: expected a finite number"),
        ({"momentum": math.nan}, "momentum=nan: expected a finite number"),
        ({"lr_decay": -0.5}, "lr_decay=-0.5"),
        ({"lr_decay": math.inf}, "lr_decay=inf"),
        ({"momentum": 1.0}, r"momentum=1.0: expected a number in \[0, 1\)"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"weight_decay": -1e-9}, "weight_decay=-1e-09"),
        ({"fraction": 0.0}, r"fraction=0.0 is not in \(0, 1\]"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"fraction": 0.01}, "selects nobody"),
        ({"fraction": math.nan}, "fraction=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"run_dir": ""}, "run_dir= is empty"),
        ({"executor": "rai"}, "executor=rai: did you mean ray"),
        ({"eval__on": "al"}, "eval.on=al: did you mean all"),
        ({"eval__every": 0}, "eval.every=0"),
        ({"eval__batch_size": 0}, "eval.batch_size=0"),
        ({"checkpoint__every": -1}, "checkpoint.every=-1"),
        ({"checkpoint__keep": -1}, "checkpoint.keep=-1"),
        ({"placement__clients_per_actor": "many"}, "placement.clients_per_actor=many: expected auto or"),
        ({"placement__clients_per_actor": 0}, "placement.clients_per_actor=0"),
        ({"placement__clients_per_actor": 2, "placement__actors": 2}, "contradict each other"),
        ({"placement__actors": 11}, "placement.actors=11 is more than clients=10"),
        ({"placement__actors": 0}, "placement.actors=0"),
        ({"placement__threads": 0}, "placement.threads=0"),
        ({"placement__cpus": 0}, "placement.cpus=0"),
        ({"placement__gpus": -1}, "placement.gpus=-1"),
        ({"placement__actors_per_gpu": 0}, "placement.actors_per_gpu=0"),
        ({"placement__device": "cuda"}, "placement.gpus=0: no actor would be given a GPU"),
        ({"placement__actors_per_gpu": "all"}, "actors_per_gpu=all: expected auto or a whole number from 1 to 1000"),
        ({"placement__actors_per_gpu": 1001}, "actors_per_gpu=1001: expected auto or a whole number from 1 to 1000"),
        ({"placement__cpu_actors": -1}, "placement.cpu_actors=-1: expected a number of at least 0"),
        ({"placement__cpu_actors": 1}, "cpu_actors=1 with placement.gpus=0: all actors are on CPUs"),
        ({"placement__gpu_speed": 0.0}, "placement.gpu_speed=0.0: expected a number above 0"),
        ({"placement__gpu_speed": math.inf}, "placement.gpu_speed=inf: expected a finite number"),
        (
            {"placement__gpus": 1, "placement__cpu_actors": 3, "placement__actors": 3},
            "cpu_actors=3 of placement.actors=3 leaves none for the GPUs",
        ),
        (
            {"placement__gpus": 1, "placement__cpu_actors": 1, "placement__clients_per_actor": 2},
            "cpu_actors=1 and placement.clients_per_actor=2 contradict",
        ),
        (
            {"placement__gpus": 1, "placement__cpu_actors": 1, "placement__actors_per_gpu": "auto"},
            "cpu_actors=1 with placement.actors_per_gpu=auto: .* depend on what is measured",
        ),
        (
            {"placement__gpus": 1, "placement__device": "cuda", "placement__cpu_fallback": True},
            "device=cuda and placement.cpu_fallback=true contradict",
        ),
        (
            {"placement__gpus": 1, "placement__device": "cpu", "placement__actors_per_gpu": "auto"},
            "actors_per_gpu=auto measures .* give a number",
        ),
        ({"placement__object_store_mb": 1}, "placement.object_store_mb=1"),
        ({"trace__rounds": [-1]}, "round -1 is not one of 1 to 20"),
        ({"trace__rounds": [1, 21]}, "round 21 is not"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        check(settings_with(**changes))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", list(CHOICES))
def test_choices_are_accepted_and_nothing_else(name: str) -> None:
    key = name.replace(".", "__")
    for choice in CHOICES[name]:
        gpus = {"placement__gpus": 1} if choice == "cuda" else {}
        check(settings_with(**{key: choice}, **gpus))
    with pytest.raises(SettingsError, match="valid: "):
        check(settings_with(**{key: "zzz"}))


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        check(settings_with(lr=-1.0, rounds=0, executor="x"))
    assert len(str(caught.value).splitlines()) == 3


def test_runs_of_a_sweep_do_not_share_a_folder() -> None:
    check_sweep([settings_with(), settings_with()])
    check_sweep([settings_with(run_dir="a"), settings_with(run_dir="b")])
    with pytest.raises(SettingsError, match="run_dir=a is the folder of 2 runs"):
        check_sweep([settings_with(run_dir="a"), settings_with(), settings_with(run_dir="a")])


def test_a_quick_form_belongs_to_its_experiment() -> None:
    for names in ({"quick": "b"}, {"quick": "b", "experiment": "a"}):
        with pytest.raises(SettingsError, match=r"\+quick=b .*\+experiment=b"):
            check(settings_with(names=names))
