"""A small vision transformer with random weights, for adapters."""

from __future__ import annotations

from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification


def vit(num_classes: int, width: int = 128, layers: int = 4) -> PreTrainedModel:
    """Return a ViT for images [1, 28, 28], by default with 0.8 M parameters; 12 layers of width 384 have 21 M."""
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * width,
        image_size=28, patch_size=7, num_channels=1,
    )  # fmt: skip
    config.num_labels = num_classes
    return ViTForImageClassification(config)
