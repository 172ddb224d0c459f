"""Contradictions within a run's settings."""

import math
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from pflsim.config.checks import check, check_sweep, settings_from, varying_keys
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError


def settings_with(**changes: Any) -> Settings:
    """Default settings with some changed; `eval__every` is eval.every."""
    settings = Settings()
    for name, value in changes.items():
        group, _, key = name.rpartition("__")
        changed = replace(getattr(settings, group), **{key: value}) if group else value
        settings = replace(settings, **{group or name: changed})
    return settings


COMPONENTS = {
    "method": {
        "client": {"_target_": "lightning_modules.methods.fedavg.FedAvg"},
        "server": {"_target_": "pflsim.servers.fedavg.FedAvg"},
    },
    "data": {"_target_": "pflsim.data.sources.scikit_learn.digits"},
    "partition": {"_target_": "pflsim.data.partitions.iid"},
    "split": {"_target_": "pflsim.data.splits.official"},
    "model": {"_target_": "lightning_modules.nets.mlp.Mlp"},
}
CHOICES = {
    "buffers": ("aggregate", "local", "recalibrate"),
    "init": ("same", "per_client"),
    "executor": ("ray", "inline"),
    "progress": ("auto", "live", "plain", "quiet", "none"),
    "on_nonfinite": ("abort", "drop", "keep"),
    "lockstep": (True, False, "auto"),
    "eval__clients": ("all", "participants"),
    "participation__sampling": ("fixed", "poisson"),
    "participation__last": ("sampled", "all"),
    "placement__device": ("auto", "cpu", "cuda"),
    "placement__strategy": ("pack", "spread"),
}


def checked(**changes: Any) -> None:
    """Check each setting alone, then all against each other, as the command line does."""
    check(settings_from(asdict(settings_with(**changes)) | COMPONENTS))


BOUNDS = """
clients=0 rounds=-1 batch_size=0 local_steps=0 local_epochs=0 lr=0.0 lr=nan lr=-inf momentum=nan momentum=1.0
momentum=-0.1 lr_decay=-0.5 lr_decay=inf lr_decay=1e300 weight_decay=-1e-9 fraction=0.0 fraction=1.5 fraction=0.01
fraction=nan seed=-1 seed=9223372036854775808 on_client_error='ignore' on_client_error='retry(-1)'
run_dir='s3://me:secret@store/runs' faults.dropout=1.1 faults.straggler_work=1.0 eval.holdout_clients=10
eval.holdout_clients=-1 eval.finetune_epochs=-1 eval.every=0 eval.batch_size=0 checkpoint.every=-1 checkpoint.minutes=-1
checkpoint.keep=-1 placement.clients_per_actor='many' placement.clients_per_actor=0 placement.actors=11
placement.actors=0 placement.threads=0 placement.cpus=0 placement.gpus=-1 placement.actors_per_gpu=0
placement.actors_per_gpu='auto' placement.actors_per_gpu=1001 placement.object_store_mb=1 trace.rounds=[-1]
trace.rounds=[1,21] server_optimizer.lr=0.0 server_optimizer.beta1=1.0 server_optimizer.beta2=-0.1
eval.threshold=0.4 eval.threshold='half' eval.threshold='sensitivity:0.0' eval.threshold='sensitivity:1.1'
eval.sets=['other'] eval.sets=['all','all'] eval.all_examples=7 eval.severity=6
eval.severity=2 server_optimizer.v0=-1.0
server_optimizer.tau=0.0 eval.models=[] eval.holdout_clients=['a','b','a']
"""


@pytest.mark.parametrize("text", BOUNDS.split())
def test_values_out_of_bounds(text: str) -> None:
    key, _, value = text.partition("=")
    with pytest.raises(SettingsError, match=re.escape(key)) as caught:
        checked(**{key.replace(".", "__"): eval(value, {"nan": math.nan, "inf": math.inf})})
    assert len(str(caught.value).splitlines()) == 1 and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"local_epochs": 1, "local_steps": 1}, "local_epochs=1 .*local_steps=1"),
        ({"fraction": 0.05, "eval__holdout_clients": 5}, "fraction=0.05 .* 5 clients"),
        ({"participation__cycle": 11}, "participation.cycle=11 .* 10 clients"),
        ({"participation__cycle": 5, "fraction": 0.2}, "fraction=0.2 .* 2 clients"),
        ({"participation__cycle_rounds": 2}, "participation.cycle_rounds=2 .*participation.cycle"),
        ({"participation__spread": 1.0}, "participation.spread=1.0 .*fraction=1"),
        ({"participation__last": "all"}, "participation.last=all .*fraction=1"),
        ({"clock__spread": 0.5}, "clock.spread=0.5 .*clock.step_s"),
        ({"eval__clients": 6, "clients": 10, "eval__holdout_clients": 5}, "eval.clients=6: only 5 clients"),
        ({"eval__sets": ["others"], "eval__holdout_clients": 9}, "eval.sets=.others]: others needs"),
        ({"eval__sets": ["others"], "eval__severity": 2}, "eval.severity=2"),
        ({"eval__newcomer_rows": [10]}, "eval.newcomer_rows.*eval.holdout_clients"),
        ({"eval__newcomer_rows": [9, 9], "eval__holdout_clients": 1}, "eval.newcomer_rows"),
        ({"eval__models": ["global", "personal", "global"]}, "eval.models=.global,personal,global]"),
        ({"eval__models": ["global"], "eval__received": True}, "eval.received=true .*eval.models=.global]"),
        ({"eval__primary": "calibration_slope", "eval__mode": "max"}, "eval.primary=calibration_slope"),
        ({"lockstep": False, "lockstep_clients": 3}, "lockstep_clients=3"),
        ({"placement__clients_per_actor": 2, "placement__actors": 2}, "placement.actors .*clients_per_actor=2"),
        ({"server_optimizer__lr": 0.1}, "server_optimizer.lr=0.1 .*server_optimizer=none"),
        ({"server_optimizer__name": "fedadam", "server_optimizer__nesterov": True}, "server_optimizer.nesterov=True"),
        ({"placement__device": "cuda"}, "placement.device=cuda .*placement.gpus=0"),
    ],
)
def test_contradictions(changes: dict[str, Any], keys: str) -> None:
    with pytest.raises(SettingsError, match=keys):
        checked(**changes)


@pytest.mark.parametrize("key", list(CHOICES))
def test_choices_are_accepted_and_nothing_else(key: str) -> None:
    for choice in CHOICES[key]:
        needed = {"cuda": {"placement__gpus": 1}, "all": {"fraction": 0.5}}.get(choice, {})
        checked(**{key: choice}, **needed)
    with pytest.raises(SettingsError, match=f"expected .*{str(CHOICES[key][0]).lower()}.* or {CHOICES[key][-1]}"):
        checked(**{key: "zzz"})


def test_runs_of_a_sweep_do_not_share_a_folder() -> None:
    jobs = [{"x": [1], "method.mu": mu, "seed": seed} for mu, seed in ((0, 0), (1, 0), (1, 1))]
    assert varying_keys(jobs) == ["method.mu", "seed"]
    check_sweep([settings_with()] * 3, jobs)
    check_sweep([settings_with(run_dir=name) for name in "abc"], jobs)
    with pytest.raises(SettingsError, match=r"run_dir=a is .*run_dir='a/\$\{method.mu\}-\$\{seed\}'"):
        check_sweep([settings_with(run_dir="a"), settings_with(), settings_with(run_dir="a")], jobs)
