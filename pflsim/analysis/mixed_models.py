"""The logistic mixed model: random intercepts, and slopes, of clients, by Laplace's approximation.

The logit of row j of client i is x_j·β + z_j·b_i, where b_i = Λ u_i, u_i ~ N(0, I), and Λ is lower triangular. As in
Bates et al. (2015), "Fitting linear mixed-effects models using lme4", with `nAGQ=1`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.optimize import minimize
from scipy.special import expit

NODES = 30
"""Nodes of the quadrature for clients that are unknown."""
STEPS, TOLERANCE = 100, 1e-10
"""Newton steps for the modes, and the largest step at which they have converged."""
MAX_GRADIENT = 1e-5
"""The largest derivative of the mean log-likelihood per row of a fit that has converged."""
MAX_ERROR = 10.0
"""The largest standard error of a coefficient, in logits: it is larger if inputs separate the classes."""


@dataclass(frozen=True)
class LogisticMixedModel:
    """A fitted model.

    Args:
        coefficients: β [D].
        factor: Λ [Q, Q], the Cholesky factor of the covariance of the random effects.
        effects: b at its conditional mode, [K, Q].
        deviance: −2 log L.
        converged: whether the likelihood has a maximum, and the optimiser has found it.
    """

    coefficients: np.ndarray
    factor: np.ndarray
    effects: np.ndarray
    deviance: float
    converged: bool

    @property
    def covariance(self) -> np.ndarray:
        """The covariance of the random effects, [Q, Q]."""
        return self.factor @ self.factor.T

    def probabilities(self, x: np.ndarray, z: np.ndarray, clients: np.ndarray) -> np.ndarray:
        """Return the probability of class 1 for rows: at the conditional mode of the client's random effects.

        For a client that is unknown, the probability is integrated over the random effects.

        Args:
            x: [n, D].
            z: [n, Q].
            clients: the number of the client of each row, [n]; −1: unknown.
        """
        fixed, known = x @ self.coefficients, clients >= 0
        nodes, weights = hermegauss(NODES)
        spread = np.linalg.norm(z @ self.factor, axis=1)  # z·b of an unknown client is one normal variable
        integrated = expit(fixed[:, None] + spread[:, None] * nodes) @ (weights / weights.sum())
        return np.where(known, expit(fixed + (z * self.effects[clients]).sum(1)), integrated)

    def updated(self, x: np.ndarray, z: np.ndarray, y: np.ndarray) -> LogisticMixedModel:
        """Return the model for one client that was unknown, whose effects are at their conditional mode on its rows."""
        one = np.zeros(len(y), int)
        return replace(self, effects=_modes(x @ self.coefficients, z @ self.factor, y, one[:1], one)[0] @ self.factor.T)


def fit_logistic_mixed(x: np.ndarray, z: np.ndarray, y: np.ndarray, clients: np.ndarray) -> LogisticMixedModel:
    """Return the maximum of the likelihood over coefficients and covariance.

    Args:
        x: [n, D] with a column of ones.
        z: [n, Q], the columns whose effects differ between clients.
        y: classes 0 and 1, [n].
        clients: the number of the client of each row, [n], from 0 to K − 1; each has rows.
    """
    order = np.argsort(clients, kind="stable")
    x, z, y, rows = x[order], z[order], y[order], clients[order]
    first, width, lower = np.flatnonzero(np.diff(rows, prepend=-1)), x.shape[1], np.tril_indices(z.shape[1])

    def unpacked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        factor = np.zeros((z.shape[1], z.shape[1]))
        factor[lower] = values[width:]
        return values[:width], factor

    def mean_loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        beta, factor = unpacked(values)
        a = z @ factor
        u, value = _modes(x @ beta, a, y, first, rows)
        mu = expit(x @ beta + (a * u[rows]).sum(1))
        w, residuals = mu * (1 - mu), y - mu
        hessian = _hessian(a, w, first)
        inverse = np.linalg.inv(hessian)
        value = value.sum() - np.linalg.slogdet(hessian)[1].sum() / 2
        solved = np.einsum("nkl,nl->nk", inverse[rows], a)  # H⁻¹ a of each row
        # of −½ log det H: its derivative by the logit of each row, and by u, which moves with the parameters
        of_logit = -w * (1 - 2 * mu) * (solved * a).sum(1) / 2
        moves = np.einsum("kij,kj->ki", inverse, np.add.reduceat(a * of_logit[:, None], first))[rows]
        each = residuals + of_logit - w * (a * moves).sum(1)
        by_factor = z.T @ (each[:, None] * u[rows] + residuals[:, None] * moves - w[:, None] * solved)
        return -value / len(y), -np.concatenate([x.T @ each, by_factor[lower]]) / len(y)

    start = np.concatenate([np.zeros(width), np.eye(z.shape[1])[lower] / 2])
    found = minimize(mean_loss, start, jac=True, method="BFGS", options={"gtol": MAX_GRADIENT / 10, "maxiter": 1000})
    beta, factor = unpacked(found.x)
    effects = _modes(x @ beta, z @ factor, y, first, rows)[0] @ factor.T
    mu = expit(x @ beta + (z * effects[rows]).sum(1))
    variances = np.linalg.pinv(x.T @ (x * (mu * (1 - mu))[:, None]), rcond=1e-12, hermitian=True).diagonal()
    converged = bool(np.abs(found.jac).max() < MAX_GRADIENT and variances.max() < MAX_ERROR**2)
    return LogisticMixedModel(beta, factor, effects, 2 * len(y) * float(found.fun), converged)


def _hessian(a: np.ndarray, w: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return minus the second derivative of the log density by u of each client, [K, Q, Q]."""
    return np.eye(a.shape[1]) + np.add.reduceat(w[:, None, None] * a[:, :, None] * a[:, None], first)


def _modes(
    fixed: np.ndarray, a: np.ndarray, y: np.ndarray, first: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the u [K, Q] of the highest log density of y and u, and the log density [K], by Newton's method.

    Args:
        fixed: the part x·β of the logits, [n].
        a: z Λ, [n, Q].
        y: [n].
        first: the first row of each client, [K].
        rows: the client of each row, [n], ascending.
    """

    def density(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = fixed + (a * u[rows]).sum(1)
        return logits, np.add.reduceat(y * logits - np.logaddexp(0, logits), first) - (u * u).sum(1) / 2

    u = np.zeros((len(first), a.shape[1]))
    logits, value = density(u)
    for _ in range(STEPS):
        mu = expit(logits)
        slope = np.add.reduceat(a * (y - mu)[:, None], first) - u
        step = np.linalg.solve(_hessian(a, mu * (1 - mu), first), slope[..., None])[..., 0]
        while np.any(worse := density(u + step)[1] < value - TOLERANCE):  # a Newton step can go too far
            step[worse] /= 2
        u = u + step
        logits, value = density(u)
        if np.abs(step).max() < TOLERANCE:
            break
    return u, value
