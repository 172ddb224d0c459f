"""Regressions that see the rows of a table in one place: pooled, one for each client, and mixed models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pflsim.analysis.mixed_models import fit_logistic_mixed
from pflsim.config.names import nearest
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, shard
from pflsim.errors import RunError, SettingsError
from pflsim.progress import doing
from pflsim.types import SPLITS, Split

PENALTIES = (*np.geomspace(1e-3, 1e3, 13).tolist(),)
"""Ridge penalties λ to choose from: λ / 2 · |w|² is added to the loss summed over rows; the intercept is free."""
PLAIN = 1.0
"""The penalty without validation rows."""

Predict = Callable[..., np.ndarray]
"""Returns log-probabilities [n, C], or values [n, T], from inputs [n, D] and the clients of the rows [n].

That of a mixed model also takes `Rows` of one client that is unknown, of which all rows are then.
"""


@dataclass(frozen=True)
class Rows:
    """Rows of a split.

    Args:
        x: inputs without an intercept, [n, D].
        y: classes [n], or values [n, T].
        clients: [n].
    """

    x: np.ndarray
    y: np.ndarray
    clients: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "clients")))

    def of(self, chosen: np.ndarray) -> Rows:
        """Return the rows that a mask [n] or row numbers choose."""
        return Rows(self.x[chosen], self.y[chosen], self.clients[chosen])


@dataclass(frozen=True)
class Baselines:
    """What baselines are fitted to: the rows of a run.

    Args:
        names: the column of the table that each input is of.
        rows: of all clients by split.
        trained: the number of clients that train, which are the first ones.
        classes: C; 0: values are predicted.
    """

    names: tuple[str, ...]
    rows: dict[Split, Rows]
    trained: int
    classes: int

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition, trained: int) -> Baselines:
        """Return the rows of a run, without the first category of each column, and inputs that do not vary."""
        encoder, names = dataset.encoder, [*dataset.encoder.numbers]
        for name, categories in zip(encoder.categories, encoder.fitted[0].known, strict=True):
            names += ["", *[name] * (len(categories) - 1)]
        shards, rows = [shard(dataset, partition, client) for client in range(partition.clients)], dict[Split, Rows]()
        for split in SPLITS:
            parts = [own.split(split) for own in shards]
            x, y = (np.concatenate([getattr(part, key).numpy() for part in parts]) for key in ("x", "y"))
            rows[split] = Rows(x.astype(np.float64), y, np.repeat(np.arange(len(parts)), [*map(len, parts)]))
        known = rows["train"].x[rows["train"].clients < trained]
        used = np.flatnonzero((np.array(names) != "") & (np.ptp(known, axis=0) > 0))
        for split, own in rows.items():
            rows[split] = replace(own, x=own.x[:, used])
        classes = dataset.num_classes if dataset.task == "classification" else 0
        return cls(tuple(names[n] for n in used), rows, trained, classes)

    def check_mixed(self, slopes: Sequence[str]) -> None:
        """Check that there can be a mixed model.

        Raises:
            SettingsError: a slope is no input, or there are more than two classes or several targets.
        """
        y = self.rows["train"].y
        if self.classes > 2 or (not self.classes and y.shape[1] > 1):
            what = f"{self.classes} classes" if self.classes else f"{y.shape[1]} targets"
            raise SettingsError(f"--models mixed: expected two classes or one target, found {what}; leave mixed out")
        if unknown := [name for name in slopes if name not in self.names]:
            raise SettingsError(f"--slopes {unknown[0]}: no input that varies; {nearest(unknown[0], {*self.names})}")

    def fit(self, name: str, slopes: Sequence[str] = ()) -> tuple[Predict, str]:
        """Return a baseline that is fitted to the training rows, and a warning, or "".

        Args:
            name: pooled, local or mixed.
            slopes: columns of a mixed model whose effects differ between clients.

        Raises:
            RunError: a mixed model cannot be fitted.
        """
        if name == "mixed":
            return self._mixed(slopes)
        val = self._of_trained("val")
        fits = {each: self._ridge(name == "local", each) for each in (PENALTIES if len(val.y) else (PLAIN,))}
        best = min(fits, key=lambda penalty: self.losses(fits[penalty](val.x, val.clients), val.y).sum())
        return fits[best], "" if len(val.y) else f"the ridge penalty is {PLAIN:g}, as there are no validation rows"

    def losses(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the cross-entropy in nats, or the squared error, of each row, [n]."""
        return -scores[np.arange(len(y)), y] if self.classes else ((scores - y) ** 2).mean(1)

    def _of_trained(self, split: Split) -> Rows:
        rows = self.rows[split]
        return rows.of(rows.clients < self.trained)

    def _ridge(self, local: bool, penalty: float) -> Predict:
        """Return a regression on all training rows, or one on those of each client."""
        train = self._of_trained("train")
        groups = train.clients if local else np.zeros_like(train.clients)
        doing(f"fitting {'local' if local else 'pooled'} regressions with a penalty of {penalty:.2g}")
        counts = np.bincount(train.y, minlength=self.classes) + 1 if self.classes else np.ones(1)
        shares = counts / counts.sum()
        models = {group: self._regression(train.of(groups == group), penalty, shares) for group in np.unique(groups)}

        def predict(x: np.ndarray, clients: np.ndarray) -> np.ndarray:
            own = clients if local else np.zeros_like(clients)
            found = np.full((len(x), self.classes or train.y.shape[1]), np.nan)
            for group in np.unique(own):
                if group in models:
                    found[own == group] = models[group](x[own == group])
            return found

        return predict

    def _regression(self, rows: Rows, penalty: float, shares: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return a linear or (multinomial) logistic regression.

        If rows lack a class, its probability is not 0: the `shares` of the classes in all rows count as one row.
        """
        from sklearn.linear_model import LogisticRegression, Ridge

        if not self.classes:
            line = Ridge(penalty).fit(rows.x, rows.y)
            return lambda x: line.predict(x).reshape(len(x), -1)
        found, n = np.unique(rows.y), len(rows.y)
        model = LogisticRegression(C=1 / penalty, solver="newton-cholesky")  # lbfgs takes 50 times as long
        model = model.fit(rows.x, rows.y) if len(found) > 1 else None

        def predict(x: np.ndarray) -> np.ndarray:
            p = np.zeros((len(x), self.classes))
            p[:, found] = model.predict_proba(x) if model else 1.0
            p = p if len(found) == self.classes else (n * p + shares) / (n + 1)
            return np.log(p.clip(np.finfo(float).tiny))

        return predict

    def _mixed(self, slopes: Sequence[str]) -> tuple[Predict, str]:
        """Return a mixed model with a random intercept and slopes of clients, and why it is doubtful."""
        train = self._of_trained("train")
        doing("fitting the mixed model")
        vary = [0, *(1 + n for n, name in enumerate(self.names) if name in slopes)]

        def with_ones(x: np.ndarray) -> np.ndarray:
            return np.column_stack([np.ones(len(x)), x])

        x, known = with_ones(train.x), self.trained
        if self.classes:
            model = fit_logistic_mixed(x, x[:, vary], train.y.astype(float), train.clients)

            def predict(x: np.ndarray, clients: np.ndarray, few: Rows | None = None) -> np.ndarray:
                x, own, its = with_ones(x), np.where(clients < known, clients, -1), model
                if few:
                    own, ones = np.zeros_like(clients), with_ones(few.x)
                    its = model.updated(ones, ones[:, vary], few.y.astype(float))
                p = its.probabilities(x, x[:, vary], own)
                return np.log(np.column_stack([1 - p, p]).clip(np.finfo(float).tiny))

            converged = model.converged
        else:
            line = _linear_mixed(x, x[:, vary], train.y[:, 0].astype(float), train.clients)
            fixed, effects, ratio, converged = line
            effects = np.vstack([effects, np.zeros((1, len(vary)))])  # of clients that are unknown

            def predict(x: np.ndarray, clients: np.ndarray, few: Rows | None = None) -> np.ndarray:
                x = with_ones(x)
                own = effects[np.where(clients < known, clients, -1)]
                if few:  # the mode: D Zᵀ (Z D Zᵀ + σ² I)⁻¹ (y − X β)
                    z = (ones := with_ones(few.x))[:, vary]
                    left = few.y[:, 0] - ones @ fixed
                    own = left @ np.linalg.solve(z @ ratio @ z.T + np.eye(len(z)), z @ ratio)
                return (x @ fixed + (x[:, vary] * own).sum(1))[:, None]

        doubt = "the mixed model did not converge; leave out slopes, or inputs that tell the classes apart"
        return predict, "" if converged else doubt


def _linear_mixed(
    x: np.ndarray, z: np.ndarray, y: np.ndarray, clients: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Return a linear mixed model by REML.

    Returns:
        Coefficients [D], random effects [K, Q], their covariance by the variance of the residuals [Q, Q], and whether
        it converged.

    Raises:
        RunError: statsmodels fails.
    """
    from statsmodels.regression.mixed_linear_model import MixedLM

    mean, std = y.mean(), y.std() or 1.0  # the optimiser depends on the unit
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = MixedLM((y - mean) / std, x, clients, z).fit(reml=True)
            random_effects = model.random_effects
    except (ValueError, np.linalg.LinAlgError) as error:
        raise RunError(
            f"the mixed model cannot be fitted ({error}); leave out slopes, or inputs that repeat"
        ) from error
    effects = np.array([np.asarray(random_effects[client]) for client in range(clients.max() + 1)])
    fixed = np.asarray(model.fe_params) * std
    fixed[0] += mean
    return fixed, effects * std, np.asarray(model.cov_re) / model.scale, bool(model.converged)
