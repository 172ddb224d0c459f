"""Attentive mixing, the message passing of FedAMP and pFedCFR: nearer clients receive larger weights."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional

from pflsim.errors import SettingsError
from pflsim.fusion.blocks import Rows, Workspace, blocks, products_device
from pflsim.fusion.means import Stack

SELF_WEIGHT_TOLERANCE = 1e-9
"""Tolerance for negative self weights due to rounding."""


def squared_distances(flat: Rows) -> Float64[Tensor, " N N"]:
    """Return the squared Euclidean distances between all pairs of rows.

    `d_nm = ‖w_n − w_m‖²`

    Args:
        flat: [N, P] or N rows, one flattened unit per client; distances of several tensors may be added.

    Returns:
        [N, N] float64, symmetric, with a zero diagonal. Permuting the rows permutes the result exactly.

    Notes:
        Differences are computed before squaring, in float64. `‖w_n‖² + ‖w_m‖² − 2·w_n·w_m` would lose the digits of
        small differences between large vectors. It takes 1.5 times as long as the matrix product (0.39 s against 0.26 s
        for N = 100, P = 600,000 on one core). Only one block of columns is held in float64.
    """
    rows, device, on = len(flat), flat[0].device, products_device(flat)
    pairs = torch.zeros(rows * (rows - 1) // 2, dtype=torch.float64, device=on)
    for block in blocks(flat, on):
        pairs += functional.pdist(block).square()
    upper = torch.zeros(rows, rows, dtype=torch.float64, device=device)
    row, column = torch.triu_indices(rows, rows, offset=1, device=device)
    upper[row, column] = pairs.to(device)
    return upper + upper.T


def attention_weights(distances: Float[Tensor, " N N"], *, alpha: float, sigma: float) -> Float64[Tensor, " N N"]:
    """Return the weight of each client (column) for each receiver (row) from their squared distances.

    pFedCFR eq 10 with `A(x) = 1 − e^{−x/σ}`; FedAMP's message passing if the unit is the whole model.

    `ζ_nm = α·A'(d_nm)`, `A'(x) = e^{−x/σ}/σ` for m ≠ n; `ζ_nn = 1 − Σ_{m≠n} ζ_nm`

    Args:
        distances: [N, N] squared distances; the diagonal is ignored.
        alpha: α ≥ 0, the step size of the mixing.
        sigma: σ > 0, the squared distance over which attention falls by a factor e.

    Returns:
        [N, N] float64, non-negative, with row sums 1. A negative self weight is set to zero and its row divided by its
        sum; `check_self_weight` excludes that unless the setting `clamp` permits it.
    """
    zeta = (alpha / sigma) * torch.exp(distances.double() / -sigma)
    zeta = zeta.fill_diagonal_(0.0)
    own = 1.0 - zeta.sum(1)

    zeta = zeta + torch.diag(own.clamp(min=0.0))
    return torch.where((own < 0)[:, None], zeta / zeta.sum(1, keepdim=True), zeta)


def check_self_weight(clients: int, alpha: float, sigma: float, clamp: bool = False) -> None:
    """Check that no self weight can become negative: `(N−1)·α/σ ≤ 1`.

    The bound is reached when all clients are identical, as before the first round.

    Args:
        clients: N.
        alpha: α of pFedCFR eq 10.
        sigma: σ of pFedCFR eq 10.
        clamp: whether negative self weights are clamped, which permits any bound.

    Raises:
        SettingsError: the bound is exceeded without `clamp`, or α/σ is not finite.
    """
    if not math.isfinite(clients * (alpha / sigma)):
        raise SettingsError(f"method.alpha={alpha} over method.sigma={sigma} is not finite: use a smaller method.alpha")
    bound = (clients - 1) * alpha / sigma
    if not clamp and bound > 1.0 + SELF_WEIGHT_TOLERANCE:
        raise SettingsError(
            "attentive mixing would give negative self weights: expected (N-1)*alpha/sigma <= 1; "
            f"N={clients}, alpha={alpha:g}, sigma={sigma:g} give {bound:.4g}. Use method.alpha <= "
            f"{sigma / max(clients - 1, 1):g}, a larger method.sigma, or method.clamp=true"
        )


def mix(weights: Float[Tensor, " R K"], stack: Stack) -> list[Float[Tensor, " *shape"]]:
    """Mix K clients' tensors for R receivers.

    `out_r = Σ_m ζ_rm · stack_m`

    Args:
        weights: [R, K] ζ, used as float64.
        stack: [K, *shape], or a list of K tensors.

    Returns:
        R tensors [*shape] in the dtype and on the device of the stack. No two share memory.

    Notes:
        Accumulates in float64. Only one block of columns is held in float64.
    """
    rows = [tensor.reshape(-1) for tensor in stack]
    mixed = [torch.empty_like(stack[0], memory_format=torch.contiguous_format) for _ in weights]
    device = products_device(rows)
    zeta, outputs, start = weights.to(device, torch.float64), [tensor.view(-1) for tensor in mixed], 0
    products = Workspace(len(mixed), len(rows[0]), torch.float64, device)
    for block in blocks(rows, device):
        width = block.shape[1]
        for output, row in zip(outputs, torch.mm(zeta, block, out=products.columns(width)), strict=True):
            output[start : start + width] = row
        start += width
    return mixed
