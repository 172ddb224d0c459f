"""Classifiers of Hugging Face transformers."""

from typing import Any

import torch
from torch import nn


def load(num_classes: int, *, path: str) -> nn.Module:
    """Load a classifier of images or of token sequences from a folder; layers that are not in it are drawn anew.

    Their parameters are the attribute `drawn` of the module.

    Args:
        num_classes: C.
        path: folder with the config and the weights, as `save_pretrained` writes them.
    """
    from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a report of the head that is drawn anew
    config = AutoConfig.from_pretrained(path, num_labels=num_classes, local_files_only=True)
    images = type(config) in AutoModelForImageClassification._model_mapping  # type: ignore[operator]
    kind = AutoModelForImageClassification if images else AutoModelForSequenceClassification
    model, found = kind.from_pretrained(
        path, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, local_files_only=True,
        output_loading_info=True,
    )  # fmt: skip
    model.drawn = {parameter for name, parameter in model.named_parameters() if name in found["missing_keys"]}
    return model


def drawn_parameters(net: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a net with a pretrained transformers model that are not pretrained.

    If it is not known which parameters were loaded, the trainable ones outside of the base model count as such.
    """
    parts: list[Any] = [part for part in net.modules() if hasattr(part, "base_model_prefix")]
    outside = {p for p in net.parameters() if p.requires_grad}.difference(*(p.base_model.parameters() for p in parts))
    return getattr(parts[0], "drawn", outside) if parts else set()
