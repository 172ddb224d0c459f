"""A small transformer for token sequences."""

import math
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from lightning_modules.nets.net import Net
from pflsim.config.validate import Chance, Width
from pflsim.data.dataset import Kind
from pflsim.errors import SettingsError


class TextTransformer(Net):
    """Classifies token sequences: embedding and learned positions, encoder layers, and a mean over the tokens.

    Token 0 is padding: attention and the mean ignore it. An encoder layer normalises before attention and before a
    feed-forward network of width 2·`width` with ReLU.

    Args:
        input_shape: [length] of a sequence.
        num_classes: C.
        width: of the embedding and of the features, D.
        heads: attention heads; they divide `width`.
        layers: number of encoder layers.
        dropout: probability of dropout after attention and after the feed-forward network.
        vocabulary: number V of different tokens; None: that of the data.

    Raises:
        SettingsError: a setting is out of range.
    """

    inputs: ClassVar[tuple[Kind, ...]] = ("token sequences",)

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        width: Width = 32,
        heads: Width = 2,
        layers: Annotated[int, Ge(1), Le(100)] = 2,
        dropout: Chance = 0.0,
        vocabulary: int | None = None,
    ):
        if width % heads:
            raise SettingsError(f"model.heads={heads} must divide model.width={width}")
        assert vocabulary is not None, "filled in from the data"
        body = _Encoder(vocabulary, input_shape[0], width, heads, layers, dropout)
        super().__init__(body, nn.Linear(width, num_classes), (width,), num_classes)


class _Encoder(nn.Module):
    """Maps tokens [B, length] to features [B, D]."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(_Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != 0
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, present)
        weights = present.unsqueeze(-1).to(x.dtype)
        return (self.norm(x) * weights).sum(-2) / weights.sum(-2).clamp(min=1)


class _Layer(nn.Module):
    """An encoder layer: x [B, length, D] → [B, length, D]."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.drop: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        x = x + self.drop(self.out(self._attention(self.norm1(x), present)))
        return x + self.drop(self.fc2(torch.relu(self.fc1(self.norm2(x)))))

    def _attention(self, x: Tensor, present: Tensor) -> Tensor:
        """Return softmax(QKᵀ/√d)·V of each head, over the positions with a token."""
        # q, k, v [B, heads, length, d]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        # finite, so that a sequence of padding alone gives no NaN
        scores = scores.masked_fill(~present[:, None, None, :], torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
