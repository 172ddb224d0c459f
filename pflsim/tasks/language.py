"""Next-token prediction: the loss of each token, and metrics from sums over tokens."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pflsim.data.dataset import IGNORED

METRICS = ("nll", "perplexity", "token_accuracy", "tokens")
"""Of a client: the mean loss of a token in nats, its exponential, the share of tokens with the highest score, and the
number of predicted tokens."""


def token_losses(logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Return −log softmax_y(logits) of each position in nats; 0 where no token is predicted."""
    predicted = targets != IGNORED
    found = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(predicted, found, 0.0)


def token_sums(logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B 3"]:
    """Return of each row the number of right predictions, the summed loss, and the number of predicted tokens.

    A prediction from scores that are not finite is wrong.
    """
    right = (logits.argmax(-1) == targets) & logits.isfinite().all(-1)
    parts = right, token_losses(logits, targets), targets != IGNORED
    return torch.stack([part.double().sum(-1) for part in parts], -1)


def token_metrics(right: float, loss: float, tokens: float) -> dict[str, float]:
    """Return the metrics of a client by name; without predicted tokens, all but their number are undefined."""
    if not tokens:
        return {"tokens": 0.0}
    nll = loss / tokens
    perplexity = math.inf if nll > 700 else math.exp(nll)  # NaN stays NaN
    return dict(zip(METRICS, (nll, perplexity, right / tokens, float(tokens)), strict=True))
