"""FedPAC: alignment with global class means, and heads mixed by the weights of small quadratic programs."""

from functools import partial
from itertools import combinations
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import backward, batches, close, examples, features, gradient, mean, plus, scores, slope, started, values
from support import ALL, BATCH_NORM, World, after, play, same, states, world

from lightning_modules.methods.fedpac import FedPAC
from lightning_modules.methods.fedrep import FedRep
from lightning_modules.training import Training
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedpac import FedPAC as Server
from pflsim.servers.fedpac import head_weights

SIZES = (2, 7, 20, 9)
"""Client 0 has two classes of three."""
LR, HEAD_LR, LAM = 0.2, 0.6, 1.5
TRAINING = Training(lr=LR, batch_size=4)


def fedpac(rule: Server | None = None, training: Training = TRAINING, model: Any = None, **settings: Any) -> World:
    return world(partial(FedPAC, **settings), rule or Server(), training=training, model=model, sizes=SIZES)


# Equations ----------------------------------------------------------------------------------------------------------


def class_means(z: np.ndarray, y: np.ndarray) -> dict[int, np.ndarray]:
    return {k: z[y == k].mean(0) for k in set(y.tolist())}


def statistics(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """V and H, class by class."""
    variance, h = 0.0, np.zeros((3, z.shape[1]))
    for k, mu in class_means(z, y).items():
        p = (y == k).mean()
        h[k] = p * mu
        variance += p * (z[y == k] ** 2).sum(1).mean() - p**2 * mu @ mu
    return variance / len(y), h


def program(i: int, v: np.ndarray, h: np.ndarray) -> np.ndarray:
    """P_i, entry by entry."""
    g = np.array([[((h[i] - a) * (h[i] - b)).sum() for b in h] for a in h])
    return np.diag(v) + g


def weights_by_hand(p: np.ndarray) -> np.ndarray:
    """The minimiser of αᵀPα over the simplex: the best of those of all its faces."""
    best, lowest = np.zeros(len(p)), np.inf
    for size in range(1, len(p) + 1):
        for chosen in map(list, combinations(range(len(p)), size)):
            found = np.linalg.solve(p[np.ix_(chosen, chosen)], np.ones(size))
            alpha = np.zeros(len(p))
            alpha[chosen] = found / found.sum()
            if (alpha >= 0).all() and alpha @ p @ alpha < lowest:
                best, lowest = alpha, alpha @ p @ alpha
    return best


def test_three_rounds_by_hand() -> None:
    """Client 0 alone has two of three classes: in round 2 the own mean stands for the third, in round 4 it stays."""
    with started(fedpac(lam=LAM, head_lr=HEAD_LR)) as executor:
        common = values(states(executor)[0])
        heads = [common[2:]] * 4
        means: dict[int, np.ndarray] = {}
        for t, cohort in ((1, (0,)), (2, ALL), (3, (1, 2, 3)), (4, (0,))):
            trained, sent = play(executor, t, cohort)
            own, v, h, counted = dict[int, by_hand.Arrays](), [], [], []
            for client in cohort:
                (x, y), w = examples(executor, client), [*common[:2], *heads[client]]
                variance, weighted = statistics(features(w, x), y)
                v.append(variance)
                h.append(weighted)
                assert sent[client].numbers == {"variance": pytest.approx(variance, rel=1e-9)}
                close([sent[client].extra["weighted_means"].numpy()], [weighted])
                targets = {**class_means(features(w, x), y), **means}
                steps = list(batches(executor, client, t, epochs=2))
                for x, y in steps[: len(steps) // 2]:
                    w = [*w[:2], *plus(w, -HEAD_LR, gradient(w, x, y))[2:]]
                aligns = []
                for x, y in steps[len(steps) // 2 :]:
                    off = features(w, x) - [targets[k] for k in y.tolist()] if means else np.zeros((len(y), 5))
                    aligns.append(LAM * (off**2).mean())
                    step = backward(w, x, slope(scores(w, x), y), 2 * LAM * off / off.size)
                    w = [*plus(w, -LR, step)[:2], *w[2:]]
                losses = trained.reports[cohort.index(client)].losses
                assert losses.get("body/align", 0.0) == pytest.approx(np.mean(aligns), rel=1e-9)
                own[client] = w
                close(values(states(executor)[client]), w)
                x, y = examples(executor, client)
                counted.append((class_means(features(w, x), y), np.bincount(y, minlength=3)))
            for k in range(3):
                n = sum(counts[k] for _, counts in counted)
                if n:
                    means[k] = sum(counts[k] * found[k] for found, counts in counted if counts[k]) / n
            alphas = np.stack([weights_by_hand(program(i, np.array(v), np.array(h))) for i in range(len(cohort))])
            alphas *= alphas >= 1e-3
            for client, alpha in zip(cohort, alphas, strict=True):
                heads[client] = mean([own[c][2:] for c in cohort], alpha)
            common = [*mean([own[c] for c in cohort], [SIZES[c] for c in cohort])[:2], *common[2:]]
            mixing = executor.server_numbers()["alpha"].numpy()[np.ix_(cohort, cohort)]
            close([mixing], [alphas / alphas.sum(1, keepdims=True)], 1e-9)
            for k, found in means.items():
                close([executor.server.state.means.means[k].numpy()], [found])
            now = {client: [*common[:2], *heads[client]] for client in ALL}
            by_hand.evaluates(executor, t, lambda client, x, now=now: scores(now[client], x), "personal received")


@pytest.mark.parametrize("columns", [64, 2])
@pytest.mark.parametrize("wide", [30, 4])
def test_mixing_weights_meet_the_conditions_of_the_minimum(
    wide: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve clients, two of them without variance; with few numbers in H most P_i have no other full-rank part."""
    monkeypatch.setattr("pflsim.servers.fedpac.COLUMNS", columns)
    rng = np.random.default_rng(0)
    h, v = rng.normal(size=(12, 1, wide)) * 0.3, rng.random(12)
    v[:2] = 0
    found = head_weights(torch.from_numpy(v), torch.from_numpy(h)).numpy()
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)
    for i, alpha in enumerate(found):
        slopes = program(i, v, h) @ alpha
        assert (alpha >= 0).all() and (slopes - alpha @ slopes >= -1e-9).all()
        assert abs((slopes - alpha @ slopes) * alpha).max() < 1e-9


def test_weights_where_they_are_known() -> None:
    """Equal H: α_j ∝ 1/V_j, also without any variance; two clients; and one alone."""
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    equal = torch.ones(3, 2, 2, dtype=torch.float64)
    expected = torch.tensor([4 / 7, 2 / 7, 1 / 7], dtype=torch.float64).expand(3, 3)
    torch.testing.assert_close(head_weights(v, equal), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(head_weights(v * 0, equal), torch.full((3, 3), 1 / 3, dtype=torch.float64))
    h = torch.tensor([[[0.0, 0.0]], [[1.0, 2.0]]], dtype=torch.float64)
    own = (2 + 5) / (1 + 2 + 5), (1 + 5) / (1 + 2 + 5)
    expected = torch.tensor([[own[0], 1 - own[0]], [1 - own[1], own[1]]], dtype=torch.float64)
    torch.testing.assert_close(head_weights(v[:2], h), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(head_weights(v[:1], h[:1]), torch.ones(1, 1, dtype=torch.float64))


def test_small_weights_are_cut_but_never_all_of_them() -> None:
    v = torch.tensor([1.0, 1.0, 2000.0], dtype=torch.float64)
    alpha = Server().mixing_weights(v, torch.zeros(3, 1, 1, dtype=torch.float64))
    torch.testing.assert_close(alpha[0], torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    many = Server(min_weight=0.4).mixing_weights(v.expand(3) * 0 + 1, torch.zeros(3, 1, 1, dtype=torch.float64))
    assert many.isfinite().all() and (many.sum(1) - 1).abs().max() < 1e-12


# What must hold -----------------------------------------------------------------------------------------------------


class OwnHeads(Server):
    def mixing_weights(self, variances: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        return torch.eye(len(variances), dtype=torch.float64)


@pytest.mark.parametrize("model", [None, BATCH_NORM])
def test_without_alignment_and_mixing_it_is_fedrep(model: Any) -> None:
    """To the bit; with one of the two it is not."""
    training = Training(lr=0.1, batch_size=4, momentum=0.5, weight_decay=0.01)
    fedrep = world(partial(FedRep, head_epochs=1), FedAvgServer(), training=training, model=model, sizes=SIZES)
    expected = after(fedrep, fraction=0.75)
    alike = {"training": training, "model": model, "head_lr": None}
    assert same(after(fedpac(OwnHeads(), lam=0.0, **alike), fraction=0.75), expected)
    assert not same(after(fedpac(lam=0.0, **alike), fraction=0.75), expected)
    assert not same(after(fedpac(OwnHeads(), **alike), fraction=0.75), expected)
