"""Synthetic(alpha, beta): the moments of its generator, its clients, and how runs use them."""

import numpy as np
import pytest
from support import settings_of

from pflsim.config.checks import check
from pflsim.data.dataset import Dataset, check_dataset
from pflsim.data.sources.synthetic import load
from pflsim.errors import SettingsError


def of(data: Dataset, client: int) -> tuple[np.ndarray, np.ndarray]:
    rows = data.clients == client
    return data.x[rows], data.y[rows]


def test_inputs_have_the_papers_means_and_variances() -> None:
    data = load(alpha=0.5, beta=2.0, clients=300)
    check_dataset(data, "it")
    assert data.kind == "tables" and data.input_shape == (60,) and data.num_classes == 10
    large = [x for x, _ in (of(data, k) for k in range(300)) if len(x) > 500]
    assert len(large) > 20
    variances = np.mean([x.var(0) for x in large], axis=0)
    assert np.allclose(variances, np.arange(1, 61) ** -1.2, rtol=0.1)
    centres = np.stack([of(data, k)[0].mean(0) for k in range(300)])
    assert abs(centres.mean(1).std() - 2.0) < 0.3, "B_k has the standard deviation beta"
    assert abs((centres - centres.mean(1, keepdims=True)).std() - 1) < 0.05, "v_k varies by 1 around B_k"


def test_sizes_follow_the_authors_lognormal_and_nine_tenths_train() -> None:
    data = load(clients=600)
    sizes = np.bincount(data.clients)
    assert sizes.min() >= 50 and abs(np.log(np.maximum(sizes - 50, 1)).mean() - 4) < 0.3
    assert abs(np.median(sizes) - 50 - np.exp(4)) < 12
    assert np.array_equal(np.bincount(data.clients[: data.train_size]), (0.9 * sizes).astype(int))


def test_labels_are_those_of_a_linear_model_per_client() -> None:
    """With alpha=beta=0, a linear model of a client explains its labels, and not those of another one."""
    from sklearn.linear_model import LogisticRegression

    data = load(alpha=0.0, beta=0.0, clients=12)
    (x, y), (other, labels) = sorted((of(data, k) for k in range(12)), key=lambda part: len(part[1]))[-2:]
    model = LogisticRegression(C=100, max_iter=2000).fit(x, y)
    assert model.score(x, y) > 0.97 and model.score(other, labels) < 0.6


def test_alpha_shifts_all_weights_of_a_client() -> None:
    """A common shift of W and b changes no label, so alpha alone leaves them as they are."""
    one, other = load(alpha=0.0, clients=3), load(alpha=1.0, clients=3)
    assert np.array_equal(one.x, other.x) and (one.y == other.y).mean() > 0.999


def test_a_client_is_a_function_of_the_seed_and_its_number() -> None:
    few, many = load(clients=3), load(clients=6)
    assert all(np.array_equal(a, b) for a, b in zip(of(few, 2), of(many, 2), strict=True))
    assert not np.array_equal(few.x[:9], load(clients=3, seed=1).x[:9])


@pytest.mark.parametrize("words", ["", "partition=iid split.test_by=clients", "partition=by_client"])
@pytest.mark.slow
def test_clients_that_mix_models_are_refused(words: str) -> None:
    with pytest.raises(SettingsError, match=r"split\.test_by=clients"):
        check(settings_of("data=synthetic", "model=tabular_mlp", *words.split()))
