"""A small vision transformer with random weights, for adapters."""

from __future__ import annotations

from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification


def vit(num_classes: int) -> PreTrainedModel:
    """Return a ViT of 4 layers of width 128 for images [1, 28, 28], with 0.8 M parameters."""
    config = ViTConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, image_size=28,
        patch_size=7, num_channels=1,
    )  # fmt: skip
    config.num_labels = num_classes
    return ViTForImageClassification(config)
