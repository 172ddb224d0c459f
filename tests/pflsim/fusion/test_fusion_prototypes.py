"""Prototype fusion against a plain double loop in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pflsim.fusion.prototypes import fuse_prototypes
from pflsim.messages import Prototypes


@pytest.mark.parametrize("weighting", ["samples", "uniform", "printed"])
def test_class_by_class_over_those_who_hold_it(weighting: str) -> None:
    rng = np.random.default_rng(1)
    means, counts = rng.normal(size=(5, 4, 3)), rng.integers(0, 4, size=(5, 4))
    counts[:, 2] = 0  # a class that nobody holds
    means[counts == 0] = np.nan  # the row of a missing class means nothing
    sent = [Prototypes(torch.from_numpy(m), torch.from_numpy(c)) for m, c in zip(means, counts, strict=True)]
    fused = fuse_prototypes(sent, weighting)  # type: ignore[arg-type]
    for j in range(4):
        total, weight = np.zeros(3), 0.0
        for i in range(5):
            if counts[i, j] > 0:
                w = 1 if weighting == "uniform" else counts[i, j]
                total, weight = total + w * means[i, j], weight + w
        assert int(fused.counts[j]) == counts[:, j].sum()
        if weighting == "printed":  # 1/|ℵ_j| too (pFedPM eq. 7)
            weight *= (counts[:, j] > 0).sum()
        if weight:
            np.testing.assert_allclose(fused.means[j].numpy(), total / weight, rtol=1e-12)
    assert torch.isfinite(fused.means).all()


def test_one_client_is_the_identity_and_nothing_is_changed() -> None:
    means, counts = torch.randn(3, 2), torch.tensor([2, 1, 5])
    copy = means.clone()
    fused = fuse_prototypes([Prototypes(means, counts)])
    assert torch.equal(fused.means, copy) and torch.equal(means, copy) and torch.equal(fused.counts, counts)


def test_different_shapes_are_refused() -> None:
    one, other = (Prototypes(torch.zeros(2, d), torch.ones(2)) for d in (3, 4))
    with pytest.raises(RuntimeError, match="equal size"):
        fuse_prototypes([one, other])
