"""Selectors, fusion units, thresholds, snapshots, and bytes of messages against closed forms."""

from typing import Any

import pytest
import torch
from torch import nn

from pflsim.config.validate import checked
from pflsim.errors import SettingsError
from pflsim.messages import Message, Prototypes, Uplink, payload_bytes
from pflsim.params import BODY, HEAD, NET, NOTHING, Selector, Threshold, load, resolve_threshold, snapshot, units
from pflsim.types import Unit


class Odd(nn.Module):
    """Names that lie: `bn` is a convolution, `thing` is batch normalisation, `body2` is not in `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Module()
        self.net.body = nn.Sequential()
        self.net.body.bn = nn.Conv2d(1, 2, 3)
        self.net.body.thing = nn.BatchNorm2d(2)
        self.net.body2 = nn.Linear(2, 2)
        self.net.head = nn.Linear(2, 3)
        self.net.register_buffer("table", torch.zeros(2))
        self.net.register_buffer("passing", torch.zeros(2), persistent=False)
        self.other = nn.Linear(1, 1)


CONV = ("net.body.bn.weight", "net.body.bn.bias")
NORM = ("net.body.thing.weight", "net.body.thing.bias")
STATS = ("net.body.thing.running_mean", "net.body.thing.running_var")
BODY2 = ("net.body2.weight", "net.body2.bias")
LAST = ("net.head.weight", "net.head.bias")


@pytest.mark.parametrize(
    ("selector", "parameters", "buffers"),
    [
        (NOTHING, (), ()),
        (NET, CONV + NORM + BODY2 + LAST, ("net.table", *STATS)),
        (BODY, CONV + NORM, STATS),
        (HEAD, LAST, ()),
        (Selector(("net.head", "net.body")), CONV + NORM + LAST, STATS),  # the module's order, not the selector's
        (Selector(("net.head.bias",)), LAST[1:], ()),
        (Selector(("net",), "without"), CONV + BODY2 + LAST, ("net.table",)),
        (Selector(("net",), "only"), NORM, STATS),
        (Selector(("",), "without"), CONV + BODY2 + LAST + ("other.weight", "other.bias"), ("net.table",)),
        (Selector(("nowhere",)), (), ()),
    ],
)
def test_selectors(selector: Selector, parameters: tuple[str, ...], buffers: tuple[str, ...]) -> None:
    """Norms by class, whole path components, persistent floating point buffers only (no counter)."""
    assert selector.parameters(Odd()) == parameters
    assert selector.buffers(Odd()) == buffers


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(3), nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.RMSNorm(3)]
)
def test_every_norm_is_one(norm: nn.Module) -> None:
    assert Selector(("",), "without").parameters(nn.Sequential(norm)) == ()
    assert "weight" in Selector(("",), "only").parameters(norm)  # also when it is the module itself


def layout(by: Any, selector: Selector = NET) -> tuple[Unit, ...]:
    module = Odd()
    return units(module, selector.parameters(module), selector.buffers(module), by)


def test_units_by_module() -> None:
    assert layout("module", BODY) == (Unit("net.body.bn", CONV), Unit("net.body.thing", NORM, STATS))
    assert [u.name for u in layout("module")] == ["net.body.bn", "net.body.thing", "net.body2", "net.head"]


def test_units_by_tensor() -> None:
    """A norm's statistics go with its weight, once."""
    alone = {u.name: u for u in layout("tensor")}
    assert tuple(alone) == CONV + NORM + BODY2 + LAST
    assert alone[NORM[0]] == Unit(NORM[0], NORM[:1], STATS)
    assert alone[NORM[1]] == Unit(NORM[1], NORM[1:])


def test_the_model_as_one_unit() -> None:
    assert layout("model") == (Unit("model", CONV + NORM + BODY2 + LAST, ("net.table", *STATS)),)
    assert layout("model", NOTHING) == layout("module", NOTHING) == layout("tensor", NOTHING) == ()


@pytest.mark.parametrize("by", ["module", "tensor", "model"])
def test_units_are_a_partition_of_what_is_shared(by: Any) -> None:
    """Nothing that travels is left without a unit, and nothing is fused twice."""
    module = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, affine=False), Odd())
    everything = Selector(("",))
    parameters, buffers = everything.parameters(module), everything.buffers(module)
    laid = units(module, parameters, buffers, by)
    assert sorted(key for unit in laid for key in unit.keys) == sorted(parameters + buffers)
    assert all(unit.parameters for unit in laid)
    if by == "module":
        assert laid[0].buffers[:4] == ("0.running_mean", "0.running_var", "2.running_mean", "2.running_var")


FOUR = tuple(Unit(name, (f"{name}.weight",)) for name in ("net.body.a", "net.body.b", "net.header", "net.head"))


@pytest.mark.parametrize(
    ("threshold", "units_before"),
    [(0, 0), (4, 4), (1, 1), (0.0, 0), (1.0, 4), (0.5, 2), (0.374, 1), (0.375, 2), ("body", 3)],
)
def test_thresholds(threshold: Threshold, units_before: int) -> None:
    """An integer is a count and 1.0 is everything; `net.header` is not in `net.head`."""
    assert resolve_threshold(threshold, FOUR) == units_before


def test_threshold_errors() -> None:
    for wrong in (-1, 1.5, -0.1, float("nan"), "head", True):
        with pytest.raises(SettingsError, match=r"method\.r=.*body"):
            checked("method.r", Threshold, wrong)
    with pytest.raises(SettingsError, match=r"4 fusion units .*net.body.a.* 0 to 4"):
        resolve_threshold(5, FOUR)


def test_snapshot_never_aliases() -> None:
    module = nn.Linear(3, 2)
    taken = snapshot({**module.state_dict(keep_vars=True), "view": module.weight[0]})
    kept = {name: tensor.clone() for name, tensor in taken.items()}
    with torch.no_grad():
        module.weight.add_(1)
        module.bias.mul_(0)
    assert all(torch.equal(taken[name], kept[name]) for name in kept)
    assert not any(tensor.requires_grad for tensor in taken.values())
    assert taken["view"].untyped_storage().nbytes() == 3 * 4


def test_load_copies_into_the_modules_own_tensors() -> None:
    module = nn.BatchNorm1d(2)
    weight, bias = module.weight, module.bias.detach().clone()
    values = {"weight": torch.tensor([3.0, 4.0]), "running_mean": torch.tensor([1.0, 2.0])}
    load(module, values)
    values["weight"].zero_()
    assert module.weight is weight and weight.tolist() == [3.0, 4.0] and weight.requires_grad
    assert module.running_mean is not None and module.running_mean.tolist() == [1.0, 2.0]
    assert torch.equal(module.bias, bias)


def test_load_errors() -> None:
    with pytest.raises(KeyError, match="nobody"):
        load(nn.Linear(2, 2), {"nobody": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"bias: the module has shape \(2,\), the message \(1,\)"):
        load(nn.Linear(2, 2), {"bias": torch.zeros(1)})  # would broadcast


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.float16, 2)])
def test_weights_and_extra_by_element_size(dtype: torch.dtype, size: int) -> None:
    weights = {"w": torch.zeros(3, 5, dtype=dtype), "b": torch.zeros((), dtype=dtype)}
    assert payload_bytes(Message(weights=weights)) == 16 * size
    assert payload_bytes(Message(weights=weights, extra={"e": torch.zeros(7, dtype=torch.uint8)})) == 16 * size + 7


def test_a_view_costs_what_it_shows() -> None:
    base = torch.zeros(1000)
    assert payload_bytes(Message(weights={"slice": base[:3], "spread": base[:1].expand(5)})) == 8 * 4


@pytest.mark.parametrize("held", [0, 1, 4, 10])
def test_prototypes_of_the_classes_held(held: int) -> None:
    width = 17
    counts = torch.zeros(10, dtype=torch.int64)
    counts[torch.arange(held)] = torch.arange(1, held + 1)
    assert payload_bytes(Message(prototypes=Prototypes(torch.zeros(10, width), counts))) == held * (width + 1) * 4


def test_numbers_are_eight_bytes_and_sections_add_up() -> None:
    prototypes = Prototypes(torch.zeros(2, 3), torch.tensor([1, 0]))
    message = Uplink({"w": torch.zeros(2)}, prototypes, {"e": torch.zeros(1)}, {"a": 1, "b": 2.5}, 0, 5)
    assert payload_bytes(message) == 8 + 16 + 4 + 16
