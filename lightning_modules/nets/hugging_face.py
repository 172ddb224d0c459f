"""Classifiers of Hugging Face transformers."""

from __future__ import annotations

import torch
from torch import nn


def load(num_classes: int, *, path: str) -> nn.Module:
    """Load a classifier of images or of token sequences from a folder; a head for other classes is drawn anew.

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
    return kind.from_pretrained(
        path, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, local_files_only=True
    )
