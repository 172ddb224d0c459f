"""A recurrent net for next-token prediction."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from torch import Tensor, nn

from lightning_modules.nets.net import Net
from pflsim.config.validate import Width
from pflsim.data.dataset import Kind


class CharLSTM(Net):
    """Predicts the next token at each position: an embedding and LSTM layers, the field's model for Shakespeare.

    Source: McMahan et al. (2017), "stacked character-level LSTM", with an embedding of 8 and two layers of 256 units.

    Args:
        input_shape: [length] of a sequence.
        num_classes: number V of different tokens, whose scores are predicted.
        embedding: width of the embedding.
        width: units of an LSTM layer, D.
        layers: number of LSTM layers.
        vocabulary: V of the inputs; None: that of the data.
    """

    inputs: ClassVar[tuple[Kind, ...]] = ("token sequences",)
    stackable: ClassVar[bool] = False

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        embedding: Width = 8,
        width: Width = 256,
        layers: Annotated[int, Ge(1), Le(100)] = 2,
        vocabulary: int | None = None,
    ):
        assert vocabulary is not None, "filled in from the data"
        body = _Recurrent(vocabulary, embedding, width, layers)
        super().__init__(body, nn.Linear(width, num_classes), (input_shape[0], width), num_classes)


class _Recurrent(nn.Module):
    """Maps tokens [B, length] to features [B, length, D]."""

    def __init__(self, vocabulary: int, embedding: int, width: int, layers: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        features: Tensor = self.lstm(self.tokens(tokens))[0]
        return features
