"""From named tensors to stacks and back, unit by unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.fusion.attentive import attention_weights, squared_distances
from pflsim.fusion.layerwise import collaborate, flat_rows, mix_unit, stack
from pflsim.types import Unit

UNIT = Unit("bn", ("bn.weight", "bn.scale"), ("bn.mean",))


def clients(count: int = 4, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [
        {
            "bn.weight": torch.randn(2, 3, generator=g).to(dtype),
            "bn.scale": torch.randn((), generator=g).to(dtype),
            "bn.mean": torch.randn(3, generator=g).to(dtype),
            "other": torch.randn(5, generator=g).to(dtype),
        }
        for _ in range(count)
    ]


def distances(weights: list[dict[str, Tensor]]) -> Tensor:
    return sum((squared_distances(flat_rows(weights, key)) for key in UNIT.parameters), torch.zeros(4, 4))


def test_rows_are_flat_and_views() -> None:
    weights = clients()
    rows = flat_rows(weights, "bn.weight")
    for row, tensors in zip(rows, weights, strict=True):
        np.testing.assert_array_equal(row.numpy(), tensors["bn.weight"].numpy().ravel())
        assert row.data_ptr() == tensors["bn.weight"].data_ptr()
    assert [tuple(row.shape) for row in flat_rows(weights, "bn.scale")] == [(1,)] * 4


def test_mix_golden() -> None:
    """The whole way in NumPy: distances over parameters, weights of eq. 10, mixed parameters and buffers."""
    weights = clients(dtype=torch.float64)
    zeta = attention_weights(distances(weights), alpha=2.0, sigma=9.0)
    received = mix_unit(weights, UNIT, zeta)

    rows = np.stack([np.append(w["bn.weight"].numpy().ravel(), w["bn.scale"].numpy()) for w in weights])
    expected_zeta = 2.0 / 9.0 * np.exp(-((rows[:, None] - rows[None]) ** 2).sum(-1) / 9.0)
    np.fill_diagonal(expected_zeta, 0)
    np.fill_diagonal(expected_zeta, 1 - expected_zeta.sum(1))
    for n, tensors in enumerate(received):
        assert list(tensors) == ["bn.weight", "bn.scale", "bn.mean"]
        for key, tensor in tensors.items():
            expected = sum(expected_zeta[n, m] * w[key].numpy() for m, w in enumerate(weights))
            np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-14)


def test_buffers_do_not_move_the_weights() -> None:
    weights = clients()
    moved = [w | {"bn.mean": w["bn.mean"] + n} for n, w in enumerate(weights)]
    zetas = [collaborate(w, [UNIT], alpha=2.0, sigma=9.0)[1]["bn"] for w in (weights, moved)]
    assert torch.equal(*zetas)
    torch.testing.assert_close(zetas[0], attention_weights(distances(weights), alpha=2.0, sigma=9.0))


def test_nothing_is_shared_or_changed() -> None:
    weights = clients()
    kept = [{k: v.clone() for k, v in w.items()} for w in weights]
    received = mix_unit(weights, UNIT, torch.eye(4, dtype=torch.float64))
    pointers = {t.untyped_storage().data_ptr() for tensors in (*received, *weights) for t in tensors.values()}
    assert len(pointers) == 4 * 3 + 4 * 4
    assert all(t.untyped_storage().nbytes() == t.nbytes for tensors in received for t in tensors.values())
    for tensors in received:
        for tensor in tensors.values():
            tensor.zero_()
    assert all(torch.equal(w[k], v) for w, before in zip(weights, kept, strict=True) for k, v in before.items())


def test_a_missing_tensor_is_named() -> None:
    weights = clients()
    del weights[2]["bn.scale"]
    for call in (
        lambda: stack(weights, "bn.scale"),
        lambda: flat_rows(weights, "bn.scale"),
        lambda: mix_unit(weights, UNIT, torch.eye(4)),
    ):
        with pytest.raises(KeyError, match=r"bn\.scale"):
            call()


def test_shapes_that_differ_are_named() -> None:
    weights = clients()
    weights[3]["bn.weight"] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"bn\.weight.*\(2, 3\), \(2, 4\)"):
        flat_rows(weights, "bn.weight")
