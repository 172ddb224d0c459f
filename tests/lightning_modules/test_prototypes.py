"""Class means: one pass over everything, the same whatever the batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lightning_modules.prototypes import class_means
from pflsim.data.federated import FORWARD_BATCH, Examples


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_against_numpy(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORWARD_BATCH, "cpu", batch_size)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, size=(11, 1, 2, 3)).astype(np.uint8), np.array([0, 2, 2, 0, 4, 4, 4, 0, 2, 4, 0])
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 2, 1).double()
    found = class_means(lambda v: layer(v.double()), Examples(torch.from_numpy(x), torch.from_numpy(y)), 5)
    assert found.counts.tolist() == [4, 0, 3, 0, 4]
    features = layer(torch.from_numpy(x).double() / 255).detach().flatten(1).numpy()
    for j in (0, 2, 4):
        np.testing.assert_allclose(found.means[j].numpy(), features[y == j].mean(0), rtol=1e-5, atol=1e-7)
    assert not found.means.requires_grad
