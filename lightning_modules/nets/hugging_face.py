"""Classifiers of Hugging Face transformers."""

from __future__ import annotations

import torch
from torch import nn


def load(num_classes: int, *, path: str) -> nn.Module:
    """Load a classifier of images or of token sequences from a folder; layers that are not in it are drawn anew.

    The names of what is drawn anew are in the attribute `drawn` of the module.

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
    model.drawn = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    return model


def drawn_parameters(net: nn.Module) -> set[nn.Parameter]:
    """Return the trainable parameters of a transformers model, or of a net that has some, that are not pretrained.

    If it is not known which were loaded, those are pretrained that belong to the base model of a transformers model.
    """
    parts = [part for part in net.modules() if hasattr(part, "base_model_prefix")]
    if not parts:
        return set()
    names = getattr(parts[0], "drawn", None)
    if names is None:
        pretrained = {p for part in parts for p in part.base_model.parameters()}  # type: ignore[union-attr]
        return {p for p in net.parameters() if p.requires_grad} - pretrained
    return {p for name, p in parts[0].named_parameters() if name in names and p.requires_grad}
