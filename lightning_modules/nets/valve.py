"""GPFL's conditional valve: features transformed under a condition."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ConditionalValve(nn.Module):
    """Computes ReLU((γ + 1)·f + β), where γ and β depend on a condition (GPFL eqs. 3, 4).

    γ and β each have their own layers: fully connected, ReLU, layer normalisation.

    Args:
        width: D, of the features and of the condition.
    """

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Map features [B, D] and a condition [D] to [B, D]."""
        return functional.relu((self.gamma(condition) + 1) * features + self.beta(condition))
