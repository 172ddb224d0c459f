"""Server optimisers use the mean change of the clients' models as a gradient: FedAvgM and FedOpt."""

from jaxtyping import Float
from torch import Tensor

from pflsim.fusion import ServerOptimizer
from pflsim.types import Tensors


def server_step(
    choice: ServerOptimizer, change: Float[Tensor, " *shape"], moments: Tensors, number: int
) -> tuple[Float[Tensor, " *shape"], Tensors]:
    """Return the step that a server optimiser adds to one tensor of the model, and its moments after the step.

    With the mean change Δ = Σ_i p_i·(x_i − x):

    FedAvgM (Hsu et al. 2019): `u ← β·u + Δ`, step `η·u`; with Nesterov's momentum `η·(Δ + β·u)`.

    FedOpt (Reddi et al. 2021, Algorithm 2): `m ← β₁·m + (1 − β₁)·Δ`, step `η·m / (√v + τ)`, and

    - FedAdagrad: `v ← v + Δ²`
    - FedAdam: `v ← β₂·v + (1 − β₂)·Δ²`
    - FedYogi: `v ← v − (1 − β₂)·Δ²·sign(v − Δ²)`

    Args:
        choice: the optimiser, other than none, and its settings.
        change: Δ.
        moments: u, or m and v, before the step; empty before the first one.
        number: of this step, from 1.

    Returns:
        The step [*shape], and the moments in the dtype of the change.

    Notes:
        v takes Δ², as in the program of Reddi et al.; earlier versions of the paper print the square of m. With
        `bias_correction` FedAdam's and FedYogi's step has the factor √(1 − β₂ᵗ)/(1 − β₁ᵗ) in step t, as in Adam.
    """
    momentum = choice.name == "fedavgm"
    lr = choice.lr or (1.0 if momentum else 0.01)
    beta1 = (0.0 if choice.name == "fedadagrad" else 0.9) if choice.beta1 is None else choice.beta1
    beta2 = choice.beta2
    if momentum:
        u = beta1 * moments["u"] + change if moments else change
        return lr * (change + beta1 * u if choice.nesterov else u), {"u": u}
    square = change.square()
    m, v = (moments["m"], moments["v"]) if moments else (change.new_zeros(()), change.new_full((), choice.v0))
    m = beta1 * m + (1 - beta1) * change
    if choice.name == "fedadagrad":
        v = v + square
    elif choice.name == "fedadam":
        v = beta2 * v + (1 - beta2) * square
    else:
        v = v - (1 - beta2) * square * (v - square).sign()
    if choice.bias_correction and choice.name != "fedadagrad":
        lr *= (1 - beta2**number) ** 0.5 / (1 - beta1**number)
    return lr * m / (v.sqrt() + choice.tau), {"m": m, "v": v}
