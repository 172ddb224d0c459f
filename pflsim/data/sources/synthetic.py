"""Synthetic(alpha, beta) of FedProx (Li et al. 2020, arXiv:1812.06127, section 5.1)."""

import numpy as np

from pflsim.config.settings import Count
from pflsim.config.validate import NonNegative
from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished
from pflsim.seeding import numpy_generator

FEATURES, CLASSES = 60, 10


def load(
    *, alpha: NonNegative = 1.0, beta: NonNegative = 1.0, clients: Count = 30, seed: int = 0, standardize: bool = False
) -> Dataset:
    """Draw a table for each client, with a linear model of its own. Use partition=by_client.

    Client k has int(exp(N(4, 2²))) + 50 examples, of which 90% are for training:

        u_k ~ N(0, alpha²)    W_k [60, 10], b_k [10] ~ N(u_k, 1)    y = argmax(softmax(x·W_k + b_k))
        B_k ~ N(0, beta²)     v_k [60] ~ N(B_k, 1)                  x ~ N(v_k, Σ), Σ diagonal, Σ_jj = j^-1.2

    Args:
        alpha: standard deviation of u_k. It changes no label; the models of clients differ also with alpha=0.
        beta: standard deviation of B_k: how much the inputs of the clients differ.
        clients: number of clients.
        seed: of the data; the run's seed does not change them. Client k has the same data for each number of clients.
        standardize: standardise each feature with mean and variance of the training part.

    Returns:
        x [n, 60] float32, 10 classes, and `clients` [n], the client of each example.

    Raises:
        SettingsError: a setting is out of range.

    Notes:
        The paper writes N(0, alpha) and N(0, beta). The authors' program (`generate_synthetic.py` of litian96/FedProx)
        takes both as standard deviations, as here; as variances, only values other than 0 and 1 would differ. u_k adds
        u_k·(1 + sum(x)) to the scores of all classes, so it changes no argmax.
    """
    drawn = [_client(alpha, beta, numpy_generator(seed, "synthetic", k)) for k in range(clients)]
    sizes = [len(y) for _, y in drawn]
    train = np.concatenate([np.arange(n) < int(0.9 * n) for n in sizes])
    order = np.argsort(~train, kind="stable")
    x, y = (np.concatenate(parts)[order] for parts in zip(*drawn, strict=True))
    owners = np.repeat(np.arange(clients), sizes)[order]
    return finished(Dataset("synthetic", x, y, CLASSES, int(train.sum()), owners), standardize)


def _client(alpha: float, beta: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw x [n, 60] float32 and y [n] int64 of a client."""
    n = int(rng.lognormal(4, 2)) + 50
    u, b_mean = rng.normal(0, alpha), rng.normal(0, beta)
    weights, bias = rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)
    deviations = np.arange(1, FEATURES + 1) ** -0.6
    x = rng.normal(rng.normal(b_mean, 1, FEATURES), deviations, (n, FEATURES))
    return x.astype(np.float32), (x @ weights + bias).argmax(axis=1)
