"""Frozen parameters: constants that a host holds once, and that are neither trained, sent nor saved with clients."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import KINDS, check_loaded, prepared, same, slow_except
from torch import nn

import pflsim
from lightning_modules.contract.checks import inline, rounds, states
from lightning_modules.nets.frozen import Frozen, frozen
from pflsim.config.components import target_of
from pflsim.errors import SettingsError

SMALL = ("data=digits", "clients=3", "partition=dirichlet", "split.validation=0.2", "executor=inline")
WIDTH = 23
"""Of no other tensor in a test, so that copies can be counted."""
METHODS = slow_except({"ditto"}, [*KINDS, "apfl", "moon"])


class Three(nn.Module):
    """Three layers, the first of which is to be constant."""

    scale = 1.0

    def __init__(self, num_classes: int):
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, num_classes)
        self.a.weight.data.mul_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.b(torch.relu(self.a(x.flatten(1))))))


class Backbone(Three):
    """With a frozen layer."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.a.requires_grad_(False)


class Constants(Three):
    """With buffers instead of the layer's parameters."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        for name, value in [*self.a.named_parameters()]:
            delattr(self.a, name)
            self.a.register_buffer(name, value.detach())


class Unused(Backbone):
    """All that is not frozen in the body is not used."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.b.requires_grad_(False)
        self.more = nn.Linear(3, 3)


def _after(made: Any) -> Any:
    """Every client's private state after three rounds."""
    executor = inline(made)
    rounds(executor, (1, 2, 3), range(3))
    return states(executor)


@pytest.mark.parametrize("method", METHODS)
def test_training_equals_that_with_buffers_instead(method: str) -> None:
    args = (*SMALL, f"method={method}", "lockstep=false", "buffers=local")
    ours, named, theirs = (
        prepared(*args, *model)
        for model in (
            (f"model={target_of(Backbone)}",), (f"model={target_of(Three)}", "freeze=[a]"),
            (f"model={target_of(Constants)}",),
        )
    )  # fmt: skip
    found, again, expected = (_after(made) for made in (ours, named, theirs))
    assert same(found, again)
    assert same(found, {client: {key: own[key] for key in found[client]} for client, own in expected.items()})
    assert not any(".a." in key for key in found[0]) and any("net.body.a." in key for key in expected[0])


@pytest.mark.slow
def test_a_body_without_gradients_trains_in_lockstep_too() -> None:
    args = (*SMALL, f"model={target_of(Unused)}", "head=fc", "method=fedrep")
    torch.testing.assert_close(*(_after(prepared(*args, f"lockstep={way}")) for way in ("false", "true")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_host_holds_one_copy_in_lockstep_too(method: str) -> None:
    def copies() -> int:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter, Frozen)]
        return len({t.data_ptr() for t in tensors if WIDTH in t.shape and 64 in t.shape and t.device.type == "cpu"})

    before, ends = copies(), []
    for lockstep in ("false", "true"):
        made = prepared(*SMALL, f"method={method}", f"model={target_of(Backbone)}", f"lockstep={lockstep}")
        executor = inline(made)
        reports = rounds(executor, (1, 2, 3), range(3))
        assert copies() - before == 1  # that of the host
        ends.append(states(executor))
        small = 4 * sum(value.numel() for value in made.factory.build().shared_tensors().values())
        if method == "fedavg":
            assert {report.up_bytes for report in reports} == {small} and small == 4 * (8 * WIDTH + 8 + 8 * 10 + 10)
        del made, executor
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-4)


def test_copies_of_the_net_share_them_after_a_conversion() -> None:
    module = prepared(*SMALL, "method=ditto", f"model={target_of(Backbone)}").factory.build()
    module.double().to(memory_format=torch.channels_last)
    ours, copies = module.net.body.a, module.personal.body.a
    assert ours.weight is copies.weight and ours.weight.dtype == torch.float64 == module.net.head.weight.dtype
    assert isinstance(module.net.original().a.weight, nn.Parameter)


NOTHING_LEFT = "fedavg:net fedavg:body,head fedbabu:body fedrep:head fedper:body fedas:body.* lg_fedavg:head ditto:bdy"


@pytest.mark.parametrize(("method", "freeze"), [case.split(":") for case in NOTHING_LEFT.split()])
@pytest.mark.slow
def test_nothing_left_to_train_or_send(method: str, freeze: str, refused: Callable[..., str]) -> None:
    assert "fr" in refused(*SMALL, f"method={method}", f"freeze=[{freeze}]", "progress=none")


@pytest.mark.slow
def test_a_run_saves_them_once_and_is_resumed_and_loaded_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*SMALL, "progress=none", "checkpoint.every=1", f"run_dir={tmp_path / 'run'}"]
    run = pflsim.run(method="ditto", model=Backbone, overrides=overrides, rounds=2)
    assert [path.name for path in run.folder.rglob("frozen*")] == ["frozen_0.safetensors"]
    assert not any(b"net.body.a.weight" in path.read_bytes() for path in run.folder.rglob("*.pt"))
    longer = pflsim.run(
        method="ditto", model=Backbone, overrides=[*overrides[:-1], f"run_dir={tmp_path / 'l'}"], rounds=3
    )
    assert pflsim.resume(run, rounds=3).per_client().equals(longer.per_client())

    monkeypatch.setattr(Three, "scale", 2.0)  # the user's weights have changed
    check_loaded(run, 0, 2)
    original = pflsim.load_model(run, 1).client.net.original()
    assert torch.equal(original.a.weight, frozen(pflsim.load_model(longer).client)["net.body.a.weight"])
    with pytest.raises(SettingsError, match="body.a.weight"):
        pflsim.resume(run, rounds=4)
