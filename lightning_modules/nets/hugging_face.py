"""Models of Hugging Face transformers: classifiers, and models of next tokens."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_modules.nets.frozen import Frozen
from pflsim.errors import SettingsError


def load(
    num_classes: int, *, path: str, dtype: Literal["float32", "bf16"] = "float32", causal: bool | None = None
) -> nn.Module:
    """Load a model of images or of token sequences from a folder; layers that are not in it are drawn anew.

    Their parameters are the attribute `drawn` of the module.

    Args:
        num_classes: C of a classifier.
        path: folder with the config and the weights, as `save_pretrained` writes them.
        dtype: type of frozen parameters, `float32` or `bf16`; all others are float32.
        causal: whether next tokens are predicted; None: as the task says.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
        logging,
    )

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a report of the head that is drawn anew
    labels = {"use_cache": False} if causal else {"num_labels": num_classes}
    config = AutoConfig.from_pretrained(path, **labels, local_files_only=True)
    images = type(config) in AutoModelForImageClassification._model_mapping  # type: ignore[operator]
    kind: Any = AutoModelForImageClassification if images else AutoModelForSequenceClassification
    kind = AutoModelForCausalLM if causal else kind
    # "auto" is the type of the file, so that one in bfloat16 is never in memory as float32
    kept = "auto" if dtype == "bf16" and not images else torch.float32
    model, found = kind.from_pretrained(
        path, config=config, dtype=kept, ignore_mismatched_sizes=True, local_files_only=True, output_loading_info=True
    )
    model.frozen_bf16 = dtype == "bf16"
    model.drawn = {parameter for name, parameter in model.named_parameters() if name in found["missing_keys"]}
    return model


def drawn_parameters(net: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a net with a pretrained transformers model that are not pretrained.

    If it is not known which parameters were loaded, the trainable ones outside of the base model count as such.
    """
    parts: list[Any] = [part for part in net.modules() if hasattr(part, "base_model_prefix")]
    outside = {p for p in net.parameters() if p.requires_grad}.difference(*(p.base_model.parameters() for p in parts))
    return getattr(parts[0], "drawn", outside) if parts else set()


def lower_frozen(net: Any) -> None:
    """Store the frozen parameters of a net in bfloat16 if `dtype` of its model says so, and all others in float32.

    Each layer casts its inputs to the type of its parameters, as the adapters of PEFT do; features are float32. A layer
    that trains a parameter keeps its frozen ones in float32, since its operations need one type.

    Raises:
        SettingsError: no parameter is frozen.
    """
    if not any(getattr(part, "frozen_bf16", False) for part in net.modules()):
        return
    if not any(isinstance(value, Frozen) for value in net.buffers()):
        raise SettingsError(
            "model.dtype=bf16 needs frozen parameters: set lora={r: 8} or freeze=[body], or leave it out"
        )
    for part in net.modules():
        lower = torch.float32 if any(True for _ in part.parameters(recurse=False)) else torch.bfloat16
        for value in _floating(part):
            value.data = value.data.to(lower if isinstance(value, Frozen) else torch.float32)
        part.register_forward_pre_hook(_cast_inputs)
    net.body.register_forward_hook(_cast_features)


def _floating(part: nn.Module) -> list[Tensor]:
    tensors = *part.parameters(recurse=False), *part.buffers(recurse=False)
    return [value for value in tensors if value.is_floating_point()]


def _cast_inputs(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    own = [value.dtype for value in _floating(part) if isinstance(value, Frozen | nn.Parameter)]
    return tuple(x.to(own[0]) if own and isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _cast_features(part: nn.Module, inputs: tuple[Any, ...], features: Any) -> Any:
    return features.to(torch.promote_types(features.dtype, torch.float32)) if isinstance(features, Tensor) else features
