"""Fusions of parts: blocks, masked entries, layers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pflsim.fusion.attentive import attention_weights, squared_distances
from pflsim.fusion.blocks import COLUMNS, blocks
from pflsim.fusion.layerwise import collaborate, flat_rows, mix_unit
from pflsim.fusion.masks import collaboration, from_bits, grown, largest, mean_of_sharers, overlaps, sensitive, to_bits
from pflsim.messages import Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.servers.fedalp import FedALP
from pflsim.servers.fedamp import FedAMP
from pflsim.servers.fedavg import FedAvg
from pflsim.servers.fesem import FeSEM
from pflsim.servers.l2gd import L2GD
from pflsim.servers.pfedcfr import PFedCFR
from pflsim.servers.pfedhn import PFedHN
from pflsim.servers.pfedla import PFedLA
from pflsim.servers.pfedme import PFedMe
from pflsim.types import ClientInfo, Unit


@pytest.mark.parametrize("width", [0, 1, COLUMNS - 1, COLUMNS, COLUMNS + 1, 3 * COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_are_the_rows_from_left_to_right(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, width).to(dtype)
    for given in (rows, list(rows), rows.T.contiguous().T):
        found = [block.clone() for block in blocks(given)]
        assert all(block.dtype == torch.float64 and 0 < block.shape[1] <= COLUMNS for block in found)
        assert torch.equal(torch.cat([torch.zeros(3, 0), *found], dim=1), rows.double())


CLIENTS = 8
INITIAL = {"a.weight": torch.zeros(5, COLUMNS), "a.bias": torch.zeros(3), "b.weight": torch.zeros(4, 2)}
UNITS = (Unit("a", ("a.weight", "a.bias")), Unit("b", ("b.weight",)))
LAYOUTS = {
    "module": UNITS,
    "tensor": tuple(Unit(key, (key,)) for key in INITIAL),
    "model": (Unit("model", tuple(INITIAL)),),
}
RULES = [
    PFedLA(embedding=3, hidden=(4,)),
    PFedLA(embedding=3, hidden=(4,), k=1),
    FedAMP(),
    PFedCFR(r=1),
    FeSEM(groups=1),
    L2GD(),
    FedAvg(),
    PFedHN(hidden=(1,)),
    PFedMe(),
    FedALP(groups=1),
]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that comes of any operation."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            # A part of something larger is no new memory, and columns of a workspace are such parts.
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_no_stack_of_models_is_ever_made(rule: ServerRule[Any]) -> None:
    """Neither a hundred models nor one unit of theirs lie beside the models themselves."""
    federation = Federation(tuple(ClientInfo(i, i + 1) for i in range(CLIENTS)), INITIAL, LAYOUTS, rounds=2)  # type: ignore[arg-type]
    state = rule.init(federation)
    uplinks = [
        Uplink({key: torch.randn(value.shape) for key, value in INITIAL.items()}, client=i, num_examples=i + 1)
        for i in range(CLIENTS)
    ]
    with Largest() as largest:
        state = rule.fuse(state, uplinks)
        rule.downlinks(state, range(CLIENTS))
        rule.fuse(state, uplinks)
    assert 0 < largest.size <= CLIENTS * COLUMNS


# Masked entries -------------------------------------------------------------------------------------------------------


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def chosen(values: np.ndarray, count: int) -> set[int]:
    """The flat indices of the largest values; of equal ones the lowest."""
    flat = values.ravel()
    return set(sorted(range(flat.size), key=lambda e: (-flat[e], e))[:count])


def indices(mask: Tensor) -> set[int]:
    return set(np.flatnonzero(mask.numpy()).tolist())


def test_the_largest_entries_and_of_equal_ones_the_first() -> None:
    values = rng().integers(0, 4, (5, 7)).astype(float)
    for count in (0, 1, 8, 34, 35):
        found = largest(torch.from_numpy(values), count)
        assert found.shape == (5, 7) and indices(found) == chosen(values, count)


@pytest.mark.parametrize(("p", "alpha"), [(0.25, 0.8), (0.25, 0.3), (0.0, 1.0), (1.0, 1.0), (0.5, 0.0)])
def test_masks_grow_by_p_of_the_shared_entries_up_to_alpha(p: float, alpha: float) -> None:
    private, taken = torch.zeros(6, 9, dtype=torch.bool), set[int]()
    for step in range(8):
        change = rng(step).integers(0, 6, (6, 9)).astype(float)
        left = np.where(private.numpy(), -1, change)
        count = min(round(p * (54 - len(taken))), int(alpha * 54) - len(taken))
        taken |= chosen(left, max(count, 0))
        private = grown(private, torch.from_numpy(change), p, alpha)
        assert indices(private) == taken and len(taken) <= alpha * 54
    assert len(taken) == {0.8: 43, 0.3: 16, 0.0: 0, 1.0: 54 * (p > 0)}[alpha]


def test_an_unchanged_tensor_has_no_marks() -> None:
    start = rng().normal(size=(4, 5))
    end = start + rng(1).normal(size=(4, 5))
    for tau, count in ((0.0, 0), (0.33, 6), (1.0, 20)):
        found = sensitive(torch.from_numpy(start), torch.from_numpy(end), tau)
        assert indices(found) == chosen(abs((end - start) * end), count)
    assert not sensitive(torch.from_numpy(start), torch.from_numpy(start), 0.5).any()


def test_each_entry_is_the_uniform_mean_of_those_who_share_it() -> None:
    values, private = rng().normal(size=(3, 4, 5)), rng(1).random((3, 4, 5)) < 0.5
    private[:, 0, 0], old = True, rng(2).normal(size=(4, 5))
    sent = [torch.from_numpy(v[~m]) for v, m in zip(values, private, strict=True)]
    found = mean_of_sharers(sent, [torch.from_numpy(m) for m in private], torch.from_numpy(old))
    for e in np.ndindex(4, 5):
        own = [v[e] for v, m in zip(values, private, strict=True) if not m[e]]
        np.testing.assert_allclose(found[e], np.mean(own) if own else old[e], rtol=1e-14)
    assert found[0, 0] == old[0, 0]


def masks(count: int) -> list[dict[str, Tensor]]:
    shapes = {"a": (6, 5), "b": (7,)}
    return [{k: torch.from_numpy(rng(i).random(s) < 0.2 * (i + 1)) for k, s in shapes.items()} for i in range(count)]


def test_overlaps() -> None:
    found, flat = overlaps(masks(4)), [np.concatenate([m.numpy().ravel() for m in own.values()]) for own in masks(4)]
    for i, a in enumerate(flat):
        for j, b in enumerate(flat):
            np.testing.assert_allclose(found[i, j], 1 - (a ^ b).sum() / (a.sum() + b.sum()), rtol=1e-14)
    none = [{"a": torch.zeros(3, dtype=torch.bool)}] * 2
    assert not overlaps(none).any()


def test_collaborators_reach_a_threshold_that_rises() -> None:
    overlap = torch.tensor([[1, 0.2, 0.6, 0.4], [0.2, 1, 0.3, 0.5], [0.6, 0.3, 1, 0.1], [0.4, 0.5, 0.1, 1]]).double()
    for progress in (0.0, 0.3, 1.0, 1.5):
        threshold = 0.35 + progress * (0.6 - 0.35)
        found = collaboration(overlap, progress).numpy()
        for i in range(4):
            members = [j for j in range(4) if j == i or overlap[i, j] >= threshold]
            np.testing.assert_allclose(found[i], [(j in members) / len(members) for j in range(4)], rtol=1e-15)
    assert torch.equal(collaboration(overlap, 1.5), torch.eye(4).double())
    assert collaboration(overlap, 1.0)[0].tolist() == [0.5, 0, 0.5, 0]  # the largest overlap


def test_clients_with_equal_overlaps_stay_together() -> None:
    """Whatever the threshold; the mean of 0.1s is above 0.1."""
    assert torch.full((380,), 0.1, dtype=torch.float64).mean() != 0.1
    equal = torch.full((20, 20), 0.1, dtype=torch.float64)
    assert all((collaboration(equal, progress) == 1 / 20).all() for progress in (0.1, 1.0, 7.0))
    assert collaboration(torch.ones(1, 1).double(), 0.5).tolist() == [[1.0]]


def test_masks_as_bits() -> None:
    mask = torch.from_numpy(rng().random((3, 5, 2)) < 0.4)
    bits = to_bits(mask)
    assert bits.nbytes == 4 and torch.equal(from_bits(bits, (3, 5, 2)), mask)
    last = mask.new_tensor(rng().random((2, 3, 4, 4)) < 0.4).to(memory_format=torch.channels_last)
    assert torch.equal(from_bits(to_bits(last), last.shape), last)
    assert torch.equal(from_bits(to_bits(torch.tensor(True)), ()), torch.tensor(True))


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
