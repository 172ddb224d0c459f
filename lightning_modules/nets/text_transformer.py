"""A small transformer for token sequences: for classes, or for next tokens."""

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

    Token 0 is padding: attention and the mean ignore it. With `causal`, the net predicts the next token at each place,
    from the token there and those before it, and has no mean. An encoder layer normalises before attention and before a
    feed-forward network of width 2·`width` with ReLU.

    Args:
        input_shape: [length] of a sequence.
        num_classes: C.
        width: of the embedding and of the features, D.
        heads: attention heads; they divide `width`.
        layers: number of encoder layers.
        dropout: probability of dropout after attention and after the feed-forward network.
        causal: whether next tokens are predicted: features [B, length, D] and logits [B, length, V]; None: as the task
            says.
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
        causal: bool | None = None,
        vocabulary: int | None = None,
    ):
        if width % heads:
            raise SettingsError(f"model.heads={heads} must divide model.width={width}")
        assert vocabulary is not None, "filled in from the data"
        body = _Encoder(vocabulary, input_shape[0], width, heads, layers, dropout, bool(causal))
        features = (input_shape[0], width) if causal else (width,)
        super().__init__(body, nn.Linear(width, num_classes), features, num_classes)


class _Encoder(nn.Module):
    """Maps tokens [B, length] to features [B, D], or [B, length, D] if causal."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float, causal: bool):
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(_Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != 0
        seen = present[:, None, None, :]  # by each position, [B, 1, 1 or length, length]
        if self.causal:
            length = tokens.shape[1]
            seen = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, seen)
        if self.causal:
            return self.norm(x)
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

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.drop(self.out(self._attention(self.norm1(x), seen)))
        return x + self.drop(self.fc2(torch.relu(self.fc1(self.norm2(x)))))

    def _attention(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return softmax(QKᵀ/√d)·V of each head, over the positions that each position sees."""
        # q, k, v [B, heads, length, d]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        # finite, so that a sequence of padding alone gives no NaN
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
