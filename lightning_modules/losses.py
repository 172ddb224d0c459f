"""Differentiable loss terms, named as in the papers, and the mean loss of a net."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_modules.nets.net import evaluating
from lightning_modules.predictions import totals
from pflsim.data.federated import Examples
from pflsim.tasks.task import Criterion, cross_entropy, in_float32

__all__ = [
    "adaptive_discrepancy", "alignment", "cross_entropy", "example_losses", "inner_product", "kl",
    "maximum_mean_discrepancy", "mean_loss", "proximal", "soft_cross_entropy",
]  # fmt: skip
KERNEL_VARIANCES = (10, 15, 20, 50)
"""Variances σ of the Gaussian kernels of `maximum_mean_discrepancy`; those of FedCP's program."""


def proximal(pairs: Iterable[tuple[Tensor, Tensor]], coefficient: float) -> Float[Tensor, ""]:
    """Return coefficient/2 · Σ ‖w − a‖², a penalty towards anchors (FedProx eq. 2, pFedCFR eqs. 11 and 13).

    Args:
        pairs: parameter w and anchor a, of the same shape; only w gets a gradient.
        coefficient: μ, or λ/α.

    Raises:
        ValueError: there is no pair.
    """
    squares = [(w - a.detach()).square().sum() for w, a in pairs]
    if not squares:
        raise ValueError("a proximal term needs at least one parameter: give Anchor the names of the parameters")
    return torch.stack(squares).sum() * (coefficient / 2)


def inner_product(pairs: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, ""]:
    """Return Σ ⟨w, d⟩, whose gradient is d: a correction of each step (SCAFFOLD, FedDyn).

    Args:
        pairs: parameter w and direction d, of the same shape; only w gets a gradient.
    """
    return torch.stack([(w * d.detach()).sum() for w, d in pairs]).sum()


def alignment(
    features: Float[Tensor, "B D"],
    labels: Int[Tensor, " B"],
    means: Float[Tensor, "C D"],
    held: Bool[Tensor, " C"],
) -> Float[Tensor, ""]:
    """Return 1/B · Σ_b 1/D · ‖z_b − C̄_{y_b}‖², the distance of features to their class prototypes (FedFCD eq. 6).

    Args:
        features: z; they get a gradient.
        labels: y.
        means: C̄, one prototype per class.
        held: which classes have a prototype. Examples of other classes add 0 and count in B.
    """
    targets = torch.where(held[labels][:, None], means[labels], features.detach())
    return (features - targets).square().mean()


def example_losses(scores: Float[Tensor, "B C"], labels: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return −log softmax_y(scores), the cross-entropy of each example in nats."""
    return -in_float32(scores).log_softmax(1).gather(1, labels[:, None])[:, 0]


def kl(target_scores: Float[Tensor, "B C"], scores: Float[Tensor, "B C"]) -> Float[Tensor, ""]:
    """Return 1/B · Σ_b KL(t_b‖p_b) with t = softmax(target_scores) and p = softmax(scores); both get a gradient."""
    target, found = (in_float32(each).log_softmax(1) for each in (target_scores, scores))
    return (target.exp() * (target - found)).sum(1).mean()


def maximum_mean_discrepancy(x: Float[Tensor, "B D"], y: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
    """Return 1/B² · Σ_ab K(x_a, x_b) + K(y_a, y_b) − 2·K(x_a, y_b), the squared distance of two samples (FedCP).

    K(a, b) = Σ_σ exp(−‖a − b‖²/(2σ)) with σ in `KERNEL_VARIANCES`.
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
        return torch.stack([torch.exp(squares / (-2 * variance)) for variance in KERNEL_VARIANCES]).sum(0)

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()


def adaptive_discrepancy(x: Float[Tensor, "B D"], y: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
    """Return 1/B² · Σ_ab K(x_a, x_b) + K(y_a, y_b) − 2·K(x_a, y_b) with kernels as wide as the samples (FedPHP).

    K(a, b) = Σ_{k=0..4} exp(−‖a − b‖²/(s·2^k/4)). s is the mean of ‖a − b‖² over the pairs of different examples of
    both samples together; it gets no gradient.
    """
    both, size = in_float32(torch.cat((x, y))), len(x)
    squares = (both[:, None] - both).square().sum(2)  # by products, small distances are lost to rounding
    width = squares.detach().sum() / (len(both) ** 2 - len(both)) + 1e-8
    kernel = torch.stack([torch.exp(-squares / (width * 2**k / 4)) for k in range(5)]).sum(0)
    return (kernel[:size, :size] + kernel[size:, size:] - 2 * kernel[:size, size:]).mean()


def soft_cross_entropy(target: Float[Tensor, "B C"], scores: Float[Tensor, "B C"]) -> Float[Tensor, " B"]:
    """Return −Σ_c t_c · log softmax_c(scores) of each example.

    Args:
        target: t, probabilities.
        scores: logits.
    """
    return -(target * in_float32(scores).log_softmax(1)).sum(1)


def mean_loss(net: nn.Module, examples: Examples, criterion: Criterion | None = None) -> float:
    """Return the mean loss over all examples, in evaluation mode and without gradients; by default cross-entropy.

    With task=language_model, it is the mean over all predicted tokens.
    """
    with evaluating(net):
        _, loss, *tokens = totals(net, examples, criterion).tolist()
    return float(loss / (max(tokens[0], 1) if tokens else len(examples)))
