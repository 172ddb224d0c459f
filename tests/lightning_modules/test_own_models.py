"""Modules of a user as networks: body and head, the check before a run, and runs with them."""

import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from ray import cloudpickle
from safetensors.torch import save_file
from support import agree, check_loaded, inline, prepared, rounds, slow_except, states

import pflsim
from lightning_modules.nets.own import OwnNet, own_net
from pflsim.cli import main
from pflsim.config.settings import Eval, Settings, TaskChoice
from pflsim.engine.execution import ReplyTask, TrainTask
from pflsim.errors import SettingsError
from pflsim.records.own_code import own_modules
from pflsim.records.saved_settings import saved_settings

TWO = ["clients=2", "partition=iid", "method=fedavg"]
NUMBERS = itertools.count()
MINE = """
    import random
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F
    from lightning_modules.nets.net import Net

    class Two(nn.Module):
        def __init__(self, width=16, num_classes=10):
            super().__init__()
            self.a, self.fc = nn.Linear(64, width), nn.Linear(width, num_classes)
        def features(self, x): return torch.relu(self.a(x.flatten(1)))
        def forward(self, x): return self.fc(self.features(x))
    class Conv(nn.Module):
        def __init__(self, num_classes, *, width=4, act=nn.ReLU):
            super().__init__()
            self.conv, self.norm, self.drop = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Dropout(0.3)
            self.act = act()
            self.classifier = nn.Sequential(nn.Linear(width * 9, 8), nn.ReLU(), nn.Linear(8, num_classes))
        def forward(self, x):
            x = F.max_pool2d(self.act(self.norm(self.conv(x))), 2)
            return self.classifier(self.drop(x.view(x.size(0), -1)))
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = nn.LazyLinear(8), nn.Linear(8, 10)
        def forward(self, x): return self.last(self.body(x.flatten(1)))
    def make(width: int = 8, **more): return Two(width, **more)
    def untyped_number(): return 3

    class Log(Two):
        def forward(self, x): return F.log_softmax(super().forward(x), 1)
    class Twice(Two):
        def forward(self, x): return self.fc(self.features(x)) + self.fc(self.features(x))
    class Wide(Two):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(784, 16)
    class Seven(Two):
        def __init__(self): super().__init__(num_classes=7)
    class Pair(Two):
        def forward(self, x): return super().forward(x), x
    class Headless(nn.Module):
        def forward(self, x): return x.flatten(1)[:, :10]
    class Branch(Two):
        def features(self, x):
            found = super().features(x)
            return found * 2 if found.mean() > 0.5 else found
    class Batch(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)
            self.fc = nn.Linear(72, 10)
        def forward(self, x): return self.fc(self.norm(self.conv(x)).flatten(1))
    class Float16(Two):
        def __init__(self):
            super().__init__()
            self.half()
    class Squeezed(Two):
        def features(self, x): return super().features(x.squeeze())
    class Auxiliary(Two):
        def forward(self, x): return (super().forward(x), x) if self.training else super().forward(x)
    class Complex(Two):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(16, 16, dtype=torch.cfloat))
        def features(self, x): return (super().features(x).to(torch.cfloat) @ self.w).abs()
    def compiled() -> nn.Module: return torch.compile(Two())
    class Noisy(Two):
        def features(self, x): return F.dropout(super().features(x), 0.5)
    class Late(Two):
        def __init__(self):
            super().__init__()
            self.a.weight.register_post_accumulate_grad_hook(print)
    class Reloaded(Two):
        # its layer negates the weights of old versions
        _version = 2
        def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
            if local_metadata.get("version") != 2:
                state[prefix + "scale"] = -state[prefix + "scale"]
            super()._load_from_state_dict(state, prefix, local_metadata, *rest)
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.register_buffer("share", torch.tensor(0.5))
            self.fc.load_state_dict({"bias": torch.from_numpy(np.full(10, 0.25, "f"))}, strict=False)
        def features(self, x): return super().features(x) * self.scale * self.share
    class Drifts(Two):
        def get_extra_state(self): return "text"
        def set_extra_state(self, state): pass
    class Halves(Reloaded):
        def _load_from_state_dict(self, state, prefix, *rest):
            super()._load_from_state_dict({**state, prefix + "scale": state[prefix + "scale"] / 2}, prefix, *rest)
    class Moves(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.ones(1))
            self.register_buffer("learnt", torch.ones(1))
        def features(self, x):
            if self.training: self.seen += 1
            if self.training and torch.is_grad_enabled(): self.learnt += 1
            return super().features(x)
    class Faint(Two):
        def features(self, x): return super().features(x) + 1e-5 * len(x)
    class Single(Faint):
        # its float32 constant leaves no better precision
        def features(self, x): return super().features(x) @ torch.eye(16)
    class Wide16(Two):
        def features(self, x):
            found = super().features(x)
            if found.dtype == torch.bfloat16 and not self.training: raise TypeError("no bfloat16")
            return found
    class HookedTensor(Two):
        def features(self, x):
            f = super().features(x)
            if f.requires_grad: f.register_hook(lambda g: -g)
            return f
    class HookedParameter(Two):
        def __init__(self):
            super().__init__()
            self.a.weight.register_hook(lambda g: g.clamp(-9, 9))
    class Shared(Two):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = nn.ModuleList([nn.Linear(16, 16)] * 2), nn.Linear(16, 10)
        def features(self, x):
            x = super().features(x)
            for block in self.blocks: x = block(x)
            return x
        def forward(self, x): return self.last(self.features(x))
    class Tied(Two):
        def __init__(self):
            super().__init__()
            self.c, self.last = nn.Linear(16, 10), nn.Linear(16, 10)
            self.last.weight = self.c.weight
        def features(self, x):
            x = super().features(x)
            return x + self.c(x).sum(1, keepdim=True)
        def forward(self, x): return self.last(self.features(x))
    class Overlapping(Two):
        def __init__(self):
            super().__init__()
            self.back, self.last = nn.Linear(16, 64), nn.Linear(64, 10)
            self.back.weight = nn.Parameter(self.a.weight.data.T)
        def forward(self, x): return self.last(self.back(self.features(x)))
    class Halved(Two):
        def features(self, x): return super().features(x.mul_(0.5))
    class Counting(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
        def features(self, x):
            self.calls += 1
            return super().features(x) * (1 + self.calls)
    class LayerDrop(Two):
        def features(self, x): return super().features(x) * (random.random() > 0.1 or not self.training)
    class Still(Two):
        # a mode that is set without returning the module, and a buffer and a parameter that are not used yet
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))
            self.register_buffer("empty", torch.full((2,), torch.nan))
        def train(self, mode=True): super().train(mode)
    with torch.random.fork_rng(): two = Two()
    def same(): return two
    class Orthogonal(Two):
        def __init__(self, num_classes=10):
            super().__init__(num_classes=num_classes)
            nn.utils.parametrizations.orthogonal(self.a), nn.utils.parametrizations.orthogonal(self.fc)
    class Narrow(Net):
        def __init__(self, input_shape, num_classes):
            super().__init__(nn.Flatten(), nn.Linear(64, num_classes), (32,), num_classes)
"""


RUN = ("executor=inline", "rounds=1", "clients=2", "partition=iid", "progress=quiet", "run_dir=run")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of models in the working directory."""
    name = f"own_models_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(dedent(MINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def run(*overrides: str) -> int:
    return main([*RUN, *overrides])


def imported(mine: str, name: str) -> type[torch.nn.Module]:
    sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    return getattr(importlib.import_module(mine), name)


@pytest.mark.parametrize(("name", "head"), [("Two", None), ("Conv", None), ("Conv", "classifier"), ("Two", "")])
def test_a_wrapped_module_computes_the_same(mine: str, name: str, head: str | None) -> None:
    cls = imported(mine, name)
    torch.manual_seed(1)
    net = own_net(cls, head, (1, 8, 8), 10)
    torch.manual_seed(1)
    module = cls(num_classes=10)
    assert isinstance(net, OwnNet)
    assert {*net.original().state_dict()} == {*module.state_dict()}
    x = torch.randn(5, 1, 8, 8)
    for mode in (True, False):
        results = []
        for one in (net.train(mode), net.original().train(mode), module.train(mode)):
            torch.manual_seed(2)
            results.append(one(x))
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])
    assert net.head(net.body(x)).shape == (5, 10) and net.body(x).shape == (5, *net.feature_shape)


def test_views_of_maps_switch_channels_last_off(mine: str) -> None:
    assert not own_net(imported(mine, "Conv"), None, (1, 8, 8), 10).channels_last
    assert own_net(imported(mine, "Batch"), None, (1, 8, 8), 10).channels_last


def test_weights_of_lazy_layers_depend_on_the_seed(mine: str) -> None:
    initial = (prepared(*TWO, f"model={mine}.Lazy", f"seed={seed}").federation.initial for seed in (0, 0, 1))
    found = [values["net.body.body.weight"] for values in initial]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


REASONS = {
    **dict.fromkeys(("Log", "Twice"), ["head fc"]),
    "Wide": ["2x64 and 784x16"],
    "Seven": ["[1, 7]", "[1, 10]"],
    "Narrow": ["[1, 64]", "[1, 32]"],
    "Pair": ["tuple"],
    "Headless": ["no nn.Linear", "head="],
    "Squeezed": ["8x8"],
    "untyped_number": ["returns int", "nn.Module"],
    "Auxiliary": ["tuple", "Tensor"],
    "Complex": ["w is", "complex64"],
    "compiled": ["torch.compile"],
    "Late": ["a.weight", "register_hook"],
    "Drifts": ["body._extra_state", "is a str"],
    "Halves": ["loaded differs"],
    "Noisy": ["evaluation"],
    "Overlapping": ["a.weight", "back.weight", "memory"],
    "Halved": ["evaluation", "input in place"],
    "Counting": ["evaluation", "call to call"],
    "same": ["same module twice"],
    "Faint": ["evaluation", "batch"],
    "Batch": ["track_running_stats=True"],
    "Float16": ["model.float()"],
}


@pytest.mark.parametrize(("name", "reasons"), slow_except([*REASONS.items()][::5], REASONS.items()))
def test_models_that_are_refused(mine: str, name: str, reasons: list[str], refused: Callable[..., str]) -> None:
    before = torch.get_rng_state()
    error = refused(*RUN, f"model={mine}.{name}")
    assert "model=" in error and name in error and all(reason in error for reason in reasons), error
    assert not Path("run").exists() and torch.equal(torch.get_rng_state(), before)


LINEAR = "model=torch.nn.Linear model.in_features=3 model.out_features=10"


@pytest.mark.parametrize(
    "changes", ["head=fd", "model.widht=3", "model.width=x", "model.width=-1", "model.variants=[{hed:a}]", LINEAR]
)
def test_wrong_settings_of_own_models(mine: str, changes: str, refused: Callable[..., str]) -> None:
    assert "model" in refused(*RUN, f"model={mine}.Two", *changes.split())


@pytest.mark.parametrize("name", ["Branch", "HookedTensor", "HookedParameter", "Shared", "LayerDrop"])
@pytest.mark.slow
def test_what_cannot_be_stacked_trains_one_by_one(mine: str, name: str) -> None:
    found = prepared(*TWO, f"model={mine}.{name}")
    assert len(found.warnings) == 1 and not found.factory.stacks
    assert prepared(*TWO, f"model={mine}.Two").factory.stacks
    with pytest.raises(SettingsError, match=f"^lockstep=true: model={name}"):
        prepared(*TWO, f"model={mine}.{name}", "lockstep=true")


def test_a_parameter_of_body_and_head_is_shared_with_both_or_not_at_all(mine: str) -> None:
    assert prepared(*TWO, f"model={mine}.Tied", "method=fedavg")
    with pytest.raises(SettingsError, match="fedrep .*head"):
        prepared(*TWO, f"model={mine}.Tied", "method=fedrep")


def test_buffers_that_training_changes_travel(mine: str) -> None:
    """With L2GD, both rounds of the trial are aggregation rounds, without training."""
    for method, constant in (("fedavg", set()), ("l2gd method.p=0.99 method.lam=0.1", {"net.body.learnt"})):
        made = prepared("clients=2", "partition=iid", f"model={mine}.Moves", *f"method={method}".split())
        assert made.factory.constants == constant and "net.body.seen" in made.federation.initial


@pytest.mark.parametrize("method", ["fedavg", "per_fedavg"])
def test_buffers_may_be_undefined_parameters_unused_and_train_may_return_nothing(mine: str, method: str) -> None:
    assert prepared(*TWO, f"model={mine}.Still", f"method={method}").factory.constants == {"net.body.empty"}


def test_a_model_that_computes_in_float32_inside_may_round(mine: str) -> None:
    prepared(*TWO, f"model={mine}.Single")


def test_states_keep_the_versions_of_layers_and_constants_do_not_travel(mine: str) -> None:
    """And what a model loads when it is built is its start, without a warning of torch."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = prepared(*TWO, f"model={mine}.Reloaded")
    assert not warned and (made.federation.initial["net.head.bias"] == 0.25).all()
    assert made.factory.constants == {"net.body.share"} and "net.body.share" not in made.federation.initial
    moon = inline(prepared(*TWO, "method=moon", f"model={mine}.Reloaded"))
    moon.fuse(moon.run(TrainTask(1), moon.send((0, 1))))
    executor = inline(made)
    executor.host.states[0] = {**executor.host.states[0], "net.body.scale": torch.full((16,), 3.0)}
    with executor.host._client(ReplyTask(), 0, "open"):
        assert executor.host.module.get_parameter("net.body.scale").unique().item() == 3


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["optimizer=torch.optim.Rprop", "optimizer.options={capturable: true}"], "optimizer=torch.optim.Rprop"),
        (["method=fedas", "model=tabular_mlp", "model.hidden=[]", "data=wine"], "method=fedas .*align"),
        (["method=ditto", "model=MINE.HookedParameter"], "model=HookedParameter: .*copy"),
        (["precision=bf16", "model=MINE.Wide16"], "precision=bf16: .*no bfloat16"),
    ],
)
def test_what_cannot_train_is_refused_before_the_first_round(mine: str, changes: list[str], key: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(SettingsError, match=f"^{key}"):
        prepared(*TWO, *(change.replace("MINE", mine) for change in changes))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("target", ["torch.hub.load", "torch.load", "torch.zeros"])
def test_functions_of_libraries_are_not_called(here: Path, target: str, refused: Callable[..., str]) -> None:
    refused(*RUN, f"model={target}", "model.repo_or_dir=x", "model.model=x", "model.f=x", "model.shape=3")


@pytest.mark.parametrize("method", ["fedrep", "fedproto"])
@pytest.mark.slow
def test_an_own_model_is_loaded(mine: str, method: str) -> None:
    """With the weights in the user's own class."""
    assert run(f"model={mine}.Conv", "model.width=5", f"method={method}", "data=digits") == 0
    check_loaded(replace(pflsim.load("run")[0], trusted=True), 0)
    with pytest.raises(SettingsError, match=f"{mine}.Conv.*trusted"):
        pflsim.load_model("run", 0)
    net = pflsim.load_model("run", 0, trusted=True).client.net
    assert isinstance(net, OwnNet) and type(net.original()).__name__ == "Conv"


@pytest.mark.slow
def test_a_model_with_branches_is_loaded_but_not_exported(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"model={mine}.Branch", "method=local") == 0
    capsys.readouterr()
    assert main(["export", "run", "--client", "0", "--trusted"]) == 2
    error = capsys.readouterr().err
    assert "local with model=Branch" in error and error.count("\n") == 1 and not Path("run/export").exists()
    assert pflsim.load_model("run", 0, trusted=True)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.slow
def test_records_and_resume_know_own_modules(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    assert run(f"model={mine}.Two", "model.width=9") == 0
    assert json.loads(Path("run/summary.json").read_text())["model"] == "Two"
    assert json.loads(Path("run/environment.json").read_text())["own_modules"] == {mine: f"../{mine}.py"}
    assert own_modules(Settings(task=TaskChoice(loss=f"{mine}.Two"))) == {mine: tmp_path / f"{mine}.py"}
    assert own_modules(Settings(eval=Eval(metrics=[{f"{mine}.Two": {}}]))) == {mine: tmp_path / f"{mine}.py"}
    assert saved_settings(Path("run")).model["width"] == 9
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.delitem(sys.modules, mine)
    assert mine in refused("resume=../run")


@pytest.mark.parametrize(
    ("method", "as_object"), slow_except([("fedavg", True)], [("fedavg", True), ("fedfcd", False)])
)
def test_parametrized_models_are_sent_to_actors(method: str, as_object: bool, mine: str) -> None:
    """They compute the same there; FedFCD's server trains a copy of the head."""
    model = imported(mine, "Orthogonal")
    given = model() if as_object else model
    made, ends = prepared(*TWO[:2], f"method={method}", "lockstep=false", model=given), list[Any]()
    sent = cloudpickle.loads(cloudpickle.dumps((made.factory, made.rule, made.federation)))
    for factory, rule, federation in ((made.factory, made.rule, made.federation), sent):
        executor = inline(replace(made, factory=factory, rule=rule, federation=federation))
        rounds(executor, 2, 2)
        ends.append((states(executor), executor.server_state()))
    agree(*ends)


OWN_METHODS = """
from lightning_modules.base import ClientModule
from lightning_modules.methods.fedrep import FedRep

class NoSuper(ClientModule):
    def __init__(self, net, training):
        self.net = net

class OneTerm(FedRep):
    def objective(self, batch):
        return {**super().objective(batch), "size": self.net.body(batch[0]).square().mean()}

class OwnLoss(FedRep):
    def objective(self, batch):
        return {"own": self.net(batch[0]).square().mean()}

class OwnLosses(OwnLoss):
    def head_objective(self, batch):
        return self.objective(batch)

class Fails(ClientModule):
    def __init__(self, net, training):
        super().__init__(net, training)
        {}["missing"]

class Silent(ClientModule):
    def reply(self, shard):
        return {}["missing"]
"""


@pytest.mark.parametrize(
    ("name", "line", "where"),
    [("NoSuper", 7, "building a client of"), ("Fails", 24, "building a client of"), ("Silent", 28, "^method=")],
)
def test_an_error_in_an_own_method_names_its_line(name: str, line: int, where: str, here: Path) -> None:
    module = f"own_{name.lower()}"
    (here / f"{module}.py").write_text(OWN_METHODS)
    with pytest.raises(SettingsError, match=rf"{where} ?{name} .*fails.*{module}\.py, line {line}"):
        prepared(*TWO, f"method={module}.{name}")


def test_an_own_loss_reaches_every_phase_or_a_warning_says_so(here: Path) -> None:
    (here / "own_losses.py").write_text(OWN_METHODS)
    (warning,) = prepared(*TWO, "method=own_losses.OwnLoss").warnings
    assert "phase head" in warning and "head_objective" in warning and "OwnLoss.objective" in warning
    assert not prepared(*TWO, "method=own_losses.OneTerm").warnings
    assert not prepared(*TWO, "method=own_losses.OwnLosses").warnings


@pytest.mark.slow
def test_pretrained_weights_by_the_user_s_names(mine: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    torch.manual_seed(5)
    saved = imported(mine, "Conv")(num_classes=10).state_dict()
    torch.save(saved, tmp_path / "whole.pt")
    save_file({**saved, "classifier.2.bias": torch.zeros(3), "other": torch.zeros(1)}, tmp_path / "part.safetensors")
    args = (*TWO, f"model={mine}.Conv", "head=classifier")
    made = prepared(*args, f"pretrained.weights={tmp_path / 'whole.pt'}")
    assert all(torch.equal(saved[name], t) for name, t in made.factory.build().net.original().state_dict().items())

    part = f"pretrained.weights={tmp_path / 'part.safetensors'}"
    wrong = "missing: classifier.2.bias; unexpected: classifier.2.bias, other"
    assert wrong in refused(*RUN, *args[2:], f"model={mine}.Conv", part)
    made = prepared(*args, part, "pretrained.strict=false")
    assert "unexpected: classifier.2.bias, other" in made.warnings[0]
    assert torch.equal(made.factory.build().net.get_parameter("head.0.weight"), saved["classifier.0.weight"])
    refused(*RUN, f"model={mine}.Conv", "pretrained.weights=none.pt")
