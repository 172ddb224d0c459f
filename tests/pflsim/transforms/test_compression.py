"""What transforms of uplinks send, keep and count, against values computed by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsim.errors import SettingsError
from pflsim.transforms.base import Sender, Size, Transform
from pflsim.transforms.compression import Chain, Quantize, RandomK, Sign, TopK

SENDER = Sender(0, 1, 2)
CHANGE = [3, -1, 0.5, -4]
ONE = {"w": torch.tensor(CHANGE, dtype=torch.float64)}


def played(transform: Transform, *changes: list[float]) -> tuple[list[float], list[float], int]:
    """What is sent and kept after the last of these changes of one tensor, and the bytes."""
    memory, sent, size = transform.memory(ONE), {}, Size(0)
    for change in changes:
        sent, memory, size = transform({"w": torch.tensor(change, dtype=torch.float64)}, memory, SENDER)
    return sent["w"].tolist(), memory["w"].tolist() if memory else [], size.nbytes


@pytest.mark.parametrize(
    ("transform", "changes", "expected"),
    [
        (TopK(share=0.5), [CHANGE], ([3, 0, 0, -4], [0, -1, 0.5, 0], 9)),
        (TopK(share=0.5), [CHANGE, [0, -1, 0.2, 0]], ([0, -2, 0.7, 0], [0, 0, 0, 0], 9)),
        (TopK(share=0.5, feedback=False), [[2, 1, -1, 1]], ([2, 1, 0, 0], [], 9)),
        (TopK(share=1e-9), [[1, -1, 1, -1]], ([1, 0, 0, 0], [0, -1, 1, -1], 5)),
        (Sign(), [CHANGE], ([2.125, -2.125, 2.125, -2.125], [0.875, 1.125, -1.625, -1.875], 5)),
        (Transform(feedback=False), [CHANGE], (CHANGE, [], 16)),
        (Quantize(bits=3), [[0, 0, 0, 0]], ([0, 0, 0, 0], [], 6)),
        (
            Chain(parts=[{"topk": {"share": 0.25}}, {"quantize": {"bits": 2}}]),
            [CHANGE],
            ([0, 0, 0, -4], [3, -1, 0.5, 0], 6),
        ),
    ],
)
def test_golden_values(transform: Transform, changes: Any, expected: Any) -> None:
    for found, value in zip(played(transform, *changes), expected, strict=True):
        assert found == pytest.approx(value, abs=1e-15)


def test_quantisation_and_random_values_are_unbiased() -> None:
    """Means and variances of many rounds, within four standard errors; a multiple of the step has no variance."""
    draws = 4000
    cases: dict[Any, list[float]] = {
        Quantize(bits=3): [1 / 3, 1 / 3, 5 / 12, 0],
        RandomK(share=0.5, feedback=False): [value**2 for value in CHANGE],
        Chain(parts=[{"random_k": {"share": 0.5}}], feedback=False): [value**2 for value in CHANGE],
    }
    for transform, variances in cases.items():
        sent = torch.stack([transform(ONE, {}, Sender(0, 0, t))[0]["w"] for t in range(draws)])
        for values, mean, variance in zip(sent.unbind(1), CHANGE, variances, strict=True):
            assert abs(float(values.mean()) - mean) <= 4 * math.sqrt(variance / draws) + 1e-12
            assert float(values.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / draws), abs=1e-12)


def test_streams_are_those_of_client_and_round() -> None:
    for transform in (Quantize(bits=2), RandomK(share=0.5)):
        memory = transform.memory(ONE)
        found = [transform(ONE, memory, Sender(0, *at))[0]["w"].tolist() for at in ((1, 1), (1, 1), (1, 2), (2, 1))]
        many = [transform(ONE, memory, Sender(0, 1, t))[0]["w"].tolist() for t in range(9)]
        assert found[0] == found[1] and len({*map(tuple, many)}) > 1


PARTS: dict[str, Any] = {"topk": {"share": 0.05}, "quantize": {"bits": 8}}


@pytest.mark.parametrize(
    ("transform", "values", "tensors", "size"),
    [
        (TopK(share=0.05), 7510, 4, 2443),
        (Quantize(), 7510, 4, 7526),
        (Chain(parts=[{name: own} for name, own in PARTS.items()]), 7510, 4, 1331),
        (Sign(), 6500, 2, 821),
        (Transform(), 582_026, 8, 2_328_104),
        (TopK(), 582_026, 8, 46_568),
        (Quantize(), 582_026, 8, 582_058),
        (Sign(), 582_026, 8, 72_786),
        (Chain(parts=[{"topk": {"share": 0.01}}, {"quantize": {"bits": 8}}]), 582_026, 8, 29_137),
        (RandomK(share=0.07), 100, 1, 28),
    ],
)
def test_sizes(transform: Transform, values: int, tensors: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [values - tensors + 1, *[1] * (tensors - 1)]
    change = {str(at): torch.randn(n, generator=generator, dtype=torch.float64) for at, n in enumerate(lengths)}
    assert transform(change, transform.memory(change), SENDER)[2].nbytes == size


@pytest.mark.parametrize("transform", [TopK(share=0.2), RandomK(share=0.2), Sign(), Quantize(feedback=True)])
def test_what_is_not_sent_is_kept(transform: Transform) -> None:
    """Over rounds, what was sent and what is left are the sum of the changes; TopK leaves the least."""
    generator = torch.Generator().manual_seed(1)
    memory, total = {}, dict[str, Tensor]()
    for t in range(6):
        change = {k: torch.randn(s, generator=generator).double() for k, s in (("a", (3, 4)), ("b", (5,)))}
        memory = memory or transform.memory(change)
        before = {k: change[k] + memory[k] for k in change}
        sent, memory, _ = transform(change, memory, Sender(0, 0, t))
        total = {k: total.get(k, 0) + change[k] - sent[k] for k in change}
        assert all(torch.allclose(total[k], memory[k], rtol=0, atol=1e-14) for k in change)
        if isinstance(transform, TopK):
            norms = [sum(float(v.square().sum()) for v in some.values()) for some in (memory, before)]
            assert norms[0] <= (1 - 4 / 17) * norms[1]
            assert all(torch.equal(sent[k] + memory[k], before[k]) for k in change)


@pytest.mark.parametrize(
    "parts",
    [
        [{"top": {}}], [{"topk": {"shar": 1}}], [{"topk": {"share": 2}}], [{"quantize": {"feedback": True}}], [],
        [{"topk": {}}, {"sign": {}}], [{"topk": {}}, {"random_k": {}}],
    ],
)  # fmt: skip
def test_wrong_parts_are_refused(parts: Any) -> None:
    with pytest.raises(SettingsError, match="uplink.parts"):
        Chain(parts=parts)
