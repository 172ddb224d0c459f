"""What arrives is what was sent, and its tensors are the memory that was handed over."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.messages import Message, Prototypes, Uplink
from ray_actors.zero_copy import ZeroCopyMessage

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def sent(content: Any) -> tuple[bytes, list[bytes]]:
    """The pickle, and the buffers beside it as nobody may write to them."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(ZeroCopyMessage(content), protocol=5, buffer_callback=buffers.append)
    return pickled, [bytes(buffer.raw()) for buffer in buffers]


def received(content: Any) -> Any:
    pickled, buffers = sent(content)
    return pickle.loads(pickled, buffers=buffers)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (2, 3, 4)])
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = received(Message({"a": tensor})).weights["a"]
    assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def at(offset: int, content: bytes) -> memoryview:
    """The content in memory that begins so many bytes after a multiple of 64."""
    room = torch.zeros(len(content) + 128, dtype=torch.uint8).numpy()
    begin = -room.ctypes.data % 64 + offset
    room[begin : begin + len(content)] = list(content)
    return room.data[begin : begin + len(content)].toreadonly()


def test_where_memory_begins_does_not_depend_on_the_way() -> None:
    """Small buffers arrive from Ray at any multiple of 8, but on some of these a product has other last bits."""
    weight, vector = torch.linspace(-1, 1, 70).reshape(10, 7), torch.linspace(0, 3, 7).sin()
    pickled, buffers = sent({"w": weight, "t": weight.T.contiguous().T, "v": vector})
    for offset in range(0, 64, 8):
        moved = [at(offset, buffer) for buffer in buffers]
        found = pickle.loads(pickled, buffers=moved)
        for tensor in found.values():
            assert tensor.data_ptr() % 64 == 0
        assert found["t"].stride() == (1, 10)
        assert (found["w"].data_ptr() == np.frombuffer(moved[0], np.uint8).ctypes.data) == (offset == 0)
        assert torch.equal(found["w"] @ found["v"], weight @ vector) and torch.equal(found["t"], weight)


def test_strides_stay_where_there_are_no_gaps() -> None:
    whole = torch.arange(48.0).reshape(2, 4, 6)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    kept = {
        "t": whole[1].T,
        "p": whole.permute(2, 0, 1),
        "last": last,
        "one": last[:1],
        "plain": whole,
        "grey": torch.randn(3, 1, 5, 5).to(memory_format=torch.channels_last),
    }
    gaps = {"steps": whole[..., ::2], "same": whole[:1, 0].expand(5, 6), "none": whole[:0].permute(2, 0, 1)}
    found = received({**kept, **gaps})
    for name, tensor in {**kept, **gaps}.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride() if name in kept else found[name].is_contiguous(), name


def test_whole_uplinks_in_their_order() -> None:
    means = Prototypes(torch.randn(3, 2), torch.tensor([4, 0, 1]))
    ups = [
        Uplink({"w": torch.randn(2, 2), "b": torch.randn(2)}, means, {"e": torch.tensor(True)}, {"n": 2.5}, client=3),
        Uplink(client=1, num_examples=7),
    ]
    found = received(ups)
    about = [(type(up), up.client, up.num_examples, dict(up.numbers)) for up in found]
    assert about == [(Uplink, 3, 0, {"n": 2.5}), (Uplink, 1, 7, {})]
    assert list(found[0].weights) == ["w", "b"] and found[1].prototypes is None
    for name, tensor in {**ups[0].weights, **ups[0].extra}.items():
        assert torch.equal({**found[0].weights, **found[0].extra}[name], tensor)
    assert torch.equal(found[0].prototypes.means, means.means)
    assert torch.equal(found[0].prototypes.counts, means.counts)


def test_tensors_travel_beside_the_pickle_and_are_not_copied() -> None:
    """Every byte once: one that is in two messages is not sent twice, and the one received is the buffer itself."""
    large: Tensor = torch.randn(300, 300)
    pickled, buffers = sent([Message({"a": large}), Message({"b": large, "c": torch.ones(3)})])
    assert len(pickled) < 2000 and sorted(map(len, buffers)) == [12, large.nbytes]
    buffers = [at(0, buffer) for buffer in buffers]  # as Ray has large ones
    first, second = pickle.loads(pickled, buffers=buffers)
    assert first.weights["a"].data_ptr() == second.weights["b"].data_ptr()
    again, _ = pickle.loads(pickled, buffers=buffers)
    assert again.weights["a"].data_ptr() == first.weights["a"].data_ptr()
    assert torch.equal(first.weights["a"], large) and torch.equal(second.weights["c"], torch.ones(3))
