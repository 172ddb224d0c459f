"""What a run changes in its model before a method gets it: initial weights, adapters and frozen parameters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.nets.frozen import freeze
from lightning_modules.nets.hugging_face import drawn_parameters, lower_frozen
from lightning_modules.nets.net import Net
from lightning_modules.nets.own import OwnNet
from pflsim.config.components import foreign
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError, reading
from pflsim.records.trace import write_tensors


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes a net in place when it is called with it.

    Args:
        weights: a file of initial weights; None: those that the model has.
        strict: refuse weights that do not fit; else list in `Net.notes` what does not.
        lora: arguments of `peft.LoraConfig`, with `targets` for `target_modules`; empty: no adapters.
        freeze: see `lightning_modules.nets.frozen.freeze`.
        head: whether the head is trained, with adapters and task=language_model; None: as without them.
    """

    weights: str | None = None
    strict: bool = True
    lora: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    head: bool | None = None

    @classmethod
    def of(cls, settings: Settings) -> Adjustments:
        """Return those of a run."""
        lora, language = dict(settings.lora), settings.task.name == "language_model"
        head = bool(lora.pop("head", False)) if lora and language else None
        return cls(settings.pretrained.weights, settings.pretrained.strict, lora, tuple(settings.freeze), head)

    def __call__(self, net: Net) -> None:
        """Load weights, then add adapters, then freeze parameters.

        Raises:
            SettingsError: one of them does not fit the net.
        """
        if self.weights is not None:
            load_weights(net, self.weights, self.strict)
        if self.lora:
            add_adapters(net, self.lora)
        if self.head and {*net.head.parameters()} & {*net.body.parameters()}:
            raise SettingsError("lora.head=true: the head and the embedding are one parameter; leave it out")
        if self.head is False:
            net.head.requires_grad_(False)
        freeze(net, self.freeze)
        lower_frozen(net)


def load_weights(net: Net, path: str, strict: bool) -> None:
    """Copy the tensors of a file into a net, by their names in the user's module.

    Args:
        net: changed in place.
        path: a safetensors file, or a state that `torch.save` has written.
        strict: whether the file must have all tensors of the net, in their shapes, and no others.

    Raises:
        SettingsError: the file cannot be read or does not fit.
    """
    from safetensors.torch import load_file

    own = {net.name_of(key) if isinstance(net, OwnNet) else key: t for key, t in net.state_dict(keep_vars=True).items()}
    with reading(f"pretrained.weights={path}", "a safetensors file, or a state_dict saved by torch.save"):
        saved = load_file(path) if path.endswith(".safetensors") else torch.load(path, "cpu", weights_only=True)
        if not all(isinstance(value, Tensor) for value in saved.values()):
            raise TypeError("it has other values than tensors")
        fits = {name for name, value in saved.items() if name in own and own[name].shape == value.shape}
    loaded = {own[name] for name in fits}  # a tied parameter has several names, and files have one or all
    missing = sorted(name for name, value in own.items() if value not in loaded)
    parts = {"missing": missing, "unexpected": sorted({*saved} - fits)}
    found = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
    if found and strict:
        raise SettingsError(f"pretrained.weights={path} does not fit ({found}); pretrained.strict=false loads the rest")
    net.notes = (f"pretrained.weights={path}: {found}",) if found else ()
    with torch.no_grad():
        for name in [name for name in own if name in fits]:
            own[name].copy_(saved[name])


def add_adapters(net: Net, lora: Mapping[str, Any]) -> None:
    """Add LoRA adapters to the body's linear layers, and freeze its other parameters.

    `Conv1D` of transformers is a linear layer too. The head, and layers that were not in the weights of a pretrained
    transformers model, stay as they are; a head whose weight is one of the body's too is frozen with it.

    Raises:
        SettingsError: PEFT refuses the arguments, or the body has no such layers.
    """
    foreign(f"lora={dict(lora)}")  # its arguments can name modules
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D  # a linear layer with the weight [in, out]

    drawn, parts = drawn_parameters(net.body), dict(net.body.named_modules())
    transposed = [name for name, part in parts.items() if isinstance(part, Conv1D)]
    linear = [name for name, part in parts.items() if isinstance(part, nn.Linear | Conv1D)]
    options = {"fan_in_fan_out": bool(transposed), **lora}
    wanted = "arguments of peft.LoraConfig, and targets among the linear layers of the body"
    with warnings.catch_warnings(), reading(f"lora={dict(lora)}", wanted):
        warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # PEFT sets it for each layer, and warns of it
        config = LoraConfig(target_modules=options.pop("targets", linear), **options)
        inject_adapter_in_model(config, net.body)
    for parameter in drawn:
        parameter.requires_grad_(True)
    for name, part in parts.items():
        if name and drawn.intersection(part.parameters(recurse=False)):
            net.body.set_submodule(name, part)  # without an adapter


def save_adapters(net: OwnNet, model: Any, folder: Path) -> bool:
    """Write adapters, and what was trained besides them, as `peft.PeftModel.from_pretrained` reads them.

    Args:
        net: the net.
        model: its original module, which is changed.
        folder: to write to.

    Returns:
        Whether there are adapters; False for those of a PEFT model, and if all are merged into layers.
    """
    found: list[Any] = [part.peft_config for part in net.modules() if hasattr(part, "peft_config")]
    if not found or hasattr(model, "get_base_model"):
        return False
    from peft import get_peft_model_state_dict

    config, of_peft = copy(found[0]["default"]), ("lora_", ".base_layer.", ".modules_to_save.")
    model.peft_config = {"default": config}
    own = {net.name_of(key).rpartition(".")[0] for key in net.state_dict() if not any(part in key for part in of_peft)}
    saved: dict[str, Any] = {name: part for name, part in model.named_modules() if name.endswith((*own,))}  # as in PEFT
    for name, part in saved.items():
        if hasattr(part, "get_base_layer"):  # PEFT reads either an adapter or a module
            merged = deepcopy(part)  # its frozen parameters are those of the net
            merged.merge()
            model.set_submodule(name, merged.get_base_layer())
    tensors = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    config.target_modules = {key.partition(".lora_")[0] for key in tensors if ".lora_" in key}
    if not config.target_modules:
        return False
    tensors |= {key: value for key, value in model.state_dict().items() if key.rpartition(".")[0] in saved}
    config.modules_to_save = sorted({*own, *(config.modules_to_save or ())})
    config.base_model_name_or_path = getattr(model, "name_or_path", None)
    config.save_pretrained(folder)
    tensors = {f"base_model.model.{key}": value for key, value in tensors.items()}
    write_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    return True


def adapter_matrices(module: Any, matrix: str, plain: bool = False) -> tuple[str, ...]:
    """Return the state_dict keys of the trained matrices "A" or "B" of PEFT's LoRA adapters.

    Args:
        module: a client.
        matrix: which.
        plain: whether adapters may have nothing else, such as a bias or the magnitudes of DoRA.

    Raises:
        SettingsError: there are none, or they have something else.
    """
    names = tuple(name for name, _ in module.named_parameters() if f"lora_{matrix}" in name.split("."))
    if not names:
        method = module.training_settings.method
        raise SettingsError(f"method={method} needs a model with adapters; set lora={{r: 8}}, or give a PEFT model")
    parts = [name for name, _ in module.named_parameters() if ".lora_" in name] if plain else []
    if other := [name for name in parts if not re.search(r"\.lora_([AB]|embedding_[AB])\b(?!.*bias)", name)]:
        method = module.training_settings.method
        raise SettingsError(f"method={method} is defined for adapters of A and B alone; {other[0]} is another part")
    return names
