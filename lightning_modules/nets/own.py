"""A user's own module as a `Net`: one of its submodules becomes the head, and the rest is the body."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_modules.nets.frozen import thaw
from lightning_modules.nets.net import Net
from pflsim.config.components import FILLED_IN, TARGET, bind, is_own_model, variants_of
from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.seeding import seeded_global


class OwnNet(Net):
    """A module of a user. The body is the module with an `Identity` in the place of its head.

    Args:
        module: maps inputs to the head's output; it becomes the body.
        head: name of the submodule that becomes the head; "" for the module itself.
        feature_shape: shape of one example's features.
        num_classes: C.
    """

    def __init__(self, module: nn.Module, head: str, feature_shape: tuple[int, ...], num_classes: int):
        part = module.get_submodule(head)
        super().__init__(_with(module, head, nn.Identity()), part, feature_shape, num_classes)
        self.head_name = head

    def original(self) -> nn.Module:
        """Return a copy of the user's module with its head in its place, and with its frozen parameters."""
        copy = deepcopy(self)
        thaw(copy)
        return _with(copy.body, self.head_name, copy.head)


def _with(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """Return the module with another submodule of that name."""
    owner, _, last = name.rpartition(".")
    if not name:
        return part
    setattr(module.get_submodule(owner), last, part)
    return module


def own_net(
    make: Callable[..., nn.Module], head: str | None, input_shape: tuple[int, ...], num_classes: int, /, **settings: Any
) -> Net:
    """Build a user's module and return it as a `Net`.

    Args:
        make: class of the module, or a function that returns it.
        head: name of the submodule that becomes the head; None: the last `nn.Linear`.
        input_shape: shape of one example.
        num_classes: C.
        settings: keyword arguments of `make`; `input_shape` and `num_classes` are added if it has them.

    Raises:
        SettingsError: the result is no module, has no such head, or computes something else than its head does.
    """
    where = f"model={make.__module__}.{make.__qualname__}"  # type: ignore[attr-defined]
    sizes, known = zip(FILLED_IN, (input_shape, num_classes), strict=True), inspect.signature(make).parameters
    module = make(**{**{name: size for name, size in sizes if name in known}, **settings})
    if isinstance(module, Net):
        return module
    if not isinstance(module, nn.Module):
        raise SettingsError(f"{where} returns {type(module).__name__}; expected a torch.nn.Module")
    if any(hasattr(part, "_orig_mod") for part in module.modules()):
        raise SettingsError(f"{where} returns a compiled module (torch.compile); return the module itself")
    name = _head_name(module, head, where)
    inputs = torch.empty(2, *input_shape)
    with torch.no_grad():
        if any(is_lazy(parameter) for parameter in module.eval().parameters()):
            module(inputs.zero_())  # draws their initial weights
        with seeded_global(0, "trial"):
            inputs.normal_()
        with seeded_global(0, "trial"):
            scores = module(inputs.clone())
        if not isinstance(scores, Tensor):
            raise SettingsError(f"{where} returns {type(scores).__name__}; expected one tensor of scores [B, C]")
        net = OwnNet(module, name, (), num_classes).eval()
        features, again = _output(net.body, inputs), _output(net, inputs)
        same = again is not None and torch.equal(again.nan_to_num(), scores.nan_to_num())
        if features is None or not same:
            raise SettingsError(
                f"{where}: its head {name} is not the last step of forward; call it once and return its output, or "
                "name another head with model.head=NAME"
            )
        net.train().feature_shape = tuple(features.shape[1:])
        if any(parameter.dim() == 4 for parameter in net.parameters()):
            copy = deepcopy(net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            net.channels_last = _output(copy, inputs) is not None
    return net


def _output(module: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return the tensor that a module returns; None if it fails."""
    try:
        with seeded_global(0, "trial"):
            output = module(inputs.clone())
    except Exception:
        return None
    return output if isinstance(output, Tensor) else None


def _head_name(module: nn.Module, head: str | None, where: str) -> str:
    names = dict(module.named_modules())
    if head is None:
        linear = [name for name, part in names.items() if isinstance(part, nn.Linear)]
        if not linear:
            raise SettingsError(f"{where} has no nn.Linear; name the head: model.head=NAME; {nearest('', names)}")
        return linear[-1]
    if head not in names:
        raise SettingsError(f"model.head={head}: {where} has no such submodule; {nearest(head, names)}")
    return head


def bind_models(node: Mapping[str, Any], kind: Any) -> tuple[partial[Net], ...]:
    """Import a model for each variant and fill in its settings.

    Args:
        node: the model's config, as `check_component` returns it.
        kind: what a `Net` must be, see `pflsim.config.components.resolve`.

    Raises:
        SettingsError: a target does not exist, or is no model.
    """
    found = list[partial[Net]]()
    for variant in variants_of(node):
        own = is_own_model(str(variant.get(TARGET)))
        made = bind(variant, "model", None if own else kind)
        found.append(partial(own_net, made.func, variant.get("head"), **made.keywords) if own else made)
    return tuple(found)
