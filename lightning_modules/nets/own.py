"""A user's own module as a `Net`: one of its submodules becomes the head, and the rest is the body."""

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_modules.nets.frozen import thaw
from lightning_modules.nets.net import Net
from pflsim.config.components import FILLED_IN, TARGET, bind, common_of, is_own_model, variants_of
from pflsim.config.names import nearest
from pflsim.config.settings import Settings
from pflsim.data.dataset import Kind
from pflsim.errors import SettingsError
from pflsim.seeding import seeded_global

_used = WeakSet[nn.Module]()
"""Modules whose head was replaced."""


class Called(nn.Module):
    """Calls a module that takes a mapping of tensors, or returns an object with `logits`, with and for one tensor.

    Args:
        module: the module.
        fields: names of its inputs, which are stacked in one tensor [B, fields, ...]; empty: it takes the tensor.
    """

    def __init__(self, module: nn.Module, fields: tuple[str, ...]):
        super().__init__()
        self.module, self.fields = module, fields

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output, or its logits."""
        named = dict(zip(self.fields, inputs.unbind(1), strict=True)) if self.fields else {}
        output = self.module(**named) if named else self.module(inputs)
        return getattr(output, "logits", output)


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
        module = _with(copy.body, self.head_name, copy.head)
        return module.module if isinstance(module, Called) else module

    def name_of(self, key: str) -> str:
        """Return the name in the user's module of a key of the net's state_dict."""
        part, _, rest = key.partition(".")
        name = rest if part == "body" else f"{self.head_name}.{rest}".removeprefix(".")
        return name.removeprefix("module.") if isinstance(self.body, Called) else name


def _with(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """Return the module with another submodule of that name."""
    owner, _, last = name.rpartition(".")
    if not name:
        return part
    setattr(module.get_submodule(owner), last, part)
    return module


def own_net(
    make: Callable[..., nn.Module],
    head: str | None,
    input_shape: tuple[int, ...],
    num_classes: int,
    /,
    vocabulary: int | None = None,
    fields: tuple[str, ...] = (),
    **settings: Any,
) -> Net:
    """Build a user's module and return it as a `Net`.

    Args:
        make: class of the module, or a function that returns it.
        head: name of the submodule that becomes the head; None: the last `nn.Linear`.
        input_shape: shape of one example.
        num_classes: C.
        vocabulary: number of different tokens; None: inputs are no tokens.
        fields: names of inputs, see `Called`.
        settings: keyword arguments of `make`; `input_shape`, `num_classes` and `vocabulary` are added if it has them.

    Raises:
        SettingsError: the result is no module, has no such head, or computes something else than its head does.
    """
    where = f"model={make.__module__}.{getattr(make, '__qualname__', type(make).__name__)}"
    filled = zip(FILLED_IN, (input_shape, num_classes, vocabulary), strict=True)
    known = inspect.signature(make).parameters
    added = {name: value for name, value in filled if name in known and value is not None}
    module = make(**{**added, **settings})
    if isinstance(module, Net) and head is None:
        return module
    if not isinstance(module, nn.Module):
        raise SettingsError(f"{where} returns {type(module).__name__}; expected a torch.nn.Module")
    if any(hasattr(part, "_orig_mod") for part in module.modules()):
        raise SettingsError(f"{where} returns a compiled module (torch.compile); return the module itself")
    if module in _used:
        raise SettingsError(f"{where} returns the same module twice; make a new one, or return copy.deepcopy of it")
    _used.add(module)
    name = _head_name(module, head, where)
    inputs = torch.zeros(2, *input_shape, dtype=torch.get_default_dtype() if vocabulary is None else torch.int64)
    with torch.no_grad():
        if fields:
            module, name = Called(module, fields), f"module.{name}"
        module.eval()
        if any(is_lazy(parameter) for parameter in module.parameters()):
            module(inputs)  # draws their initial weights
        with seeded_global(0, "trial"):
            inputs = inputs.normal_() if vocabulary is None else torch.randint_like(inputs, vocabulary)
        with seeded_global(0, "trial"):
            scores = module(inputs.clone())
        if hasattr(scores, "logits"):
            module, name, scores = Called(module, ()), f"module.{name}", scores.logits
        if not isinstance(scores, Tensor):
            raise SettingsError(f"{where} returns {type(scores).__name__}; expected one tensor of scores [B, C]")
        # a model of next tokens may have more of them than the data
        net = OwnNet(module, name.removesuffix("."), (), scores.shape[-1] if scores.ndim > 2 else num_classes).eval()
        features, again = _output(net.body, inputs), _output(net, inputs)
        same = again is not None and torch.allclose(again, scores, rtol=1e-5, atol=1e-6, equal_nan=True)
        if features is None or not same:
            third = _output(net, inputs)
            if again is not None and third is not None and not torch.allclose(again, third, equal_nan=True):
                raise SettingsError(f"{where}: in evaluation mode, its scores change from call to call")
            raise SettingsError(
                f"{where}: its head {name} is not the last step of forward; call it once and return its output, or "
                "name another head with head=NAME"
            )
        net.train().feature_shape = tuple(features.shape[1:])
        if any(parameter.dim() == 4 for parameter in net.parameters()):
            copy = deepcopy(net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            net.channels_last = _output(copy, inputs) is not None
    return net


own_net.inputs = get_args(Kind)  # type: ignore[attr-defined]


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
            raise SettingsError(f"{where} has no nn.Linear; name the head: head=NAME; {nearest('', names)}")
        return linear[-1]
    if head not in names:
        raise SettingsError(f"head={head}: {where} has no such submodule; {nearest(head, names)}")
    return head


def bind_models(settings: Settings, kind: Any) -> tuple[partial[Net], ...]:
    """Import a model for each variant and fill in its settings.

    Args:
        settings: of the run; `model` and `head` matter.
        kind: what a `Net` must be, see `pflsim.config.components.resolve`.

    Raises:
        SettingsError: a target does not exist, or is no model.
    """
    return tuple(_bound(variant, settings, kind) for variant in variants_of(settings.model))


def bind_common(settings: Settings, client: partial[Any], kind: Any) -> tuple[partial[Net], ...]:
    """Return the model of the common net, as `bind_models` does; () if the method's client has none."""
    has = getattr(client.func, "common_net", False)
    return (_bound(common_of(settings.model), settings, kind),) if has else ()


def _bound(node: Mapping[str, Any], settings: Settings, kind: Any) -> partial[Net]:
    own, head = is_own_model(str(node.get(TARGET))), settings.head
    made = bind(node, "model", None if own else kind)
    if made.func.__module__.startswith(__package__ or "") and "causal" in inspect.signature(made.func).parameters:
        asked = made.keywords.get("causal")
        made = partial(made, causal=settings.task.name == "language_model" if asked is None else asked)
    if head is not None and not own:
        raise SettingsError(f"head={head}: model={node[TARGET]} defines its head; leave head out")
    return partial(own_net, made.func, head, **made.keywords) if own else made
