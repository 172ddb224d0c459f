"""GPFL's conditional valve: features transformed as a condition says."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ConditionalValve(nn.Module):
    """ReLU((γ + 1)·f + β) with γ and β made of a condition (GPFL eqs. 3, 4).

    γ and β each come from a generator of their own: a fully connected layer, ReLU, layer normalisation.

    Args:
        width: D, of the features and of the condition.
    """

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Features [B, D] under a condition [D] → [B, D]."""
        return functional.relu((self.gamma(condition) + 1) * features + self.beta(condition))
