"""How messages travel on Ray: their tensors as bytes beside the pickle, not in it."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: the memory of every new tensor begins at a multiple of it."""


class ZeroCopyMessage:
    """Something with tensors in it that arrives at the other end as what it was, not as a parcel.

    Pickled as it stands, a tensor is copied into the pickle, which is copied into the object store, and copied out of
    it by everyone who receives it. In a parcel it is a buffer beside the pickle (protocol 5): it is written into the
    store at once, and a receiver's tensor is that memory, which all processes of the machine map.

    Args:
        content: messages, of any type of pickle; tensors on the CPU.

    Notes:
        Received tensors lie in memory as they did, for the last bits of a sum may depend on it; those with gaps become
        contiguous. Nobody may write to them: it would change what the others have received. They hold their place in
        the store for as long as they live, so that what is kept beyond the call is copied (`load`, anchors, and the
        tables of servers do).
    """

    def __init__(self, content: Any):
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        pickled, buffers = io.BytesIO(), []
        pickler = _Pickler(pickled, protocol=5, buffer_callback=buffers.append)
        pickler.dump(self.content)
        return _unpack, (pickled.getvalue(), buffers)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays of bytes, which protocol 5 leaves outside."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        if _without_gaps(obj):
            flat = obj.detach().as_strided((obj.numel(),), (1,))
        else:
            obj = obj.detach().clone(memory_format=torch.contiguous_format)
            flat = obj.reshape(-1)
        content = flat.view(torch.uint8).numpy()  # bytes, since NumPy does not know all types (bfloat16)
        return _tensor, (content, obj.dtype, tuple(obj.shape), obj.stride())


def _tensor(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The bytes as a tensor.

    They lie where torch would have put them: products of matrices differ in the last bits with where these begin. Ray
    has small buffers (below 2 kB) at multiples of 8 only, so what is copied is small.
    """
    found = torch.from_numpy(content)
    aligned = found if found.data_ptr() % ALIGNMENT == 0 else found.clone()
    return aligned.view(dtype).as_strided(shape, stride)


def _without_gaps(tensor: Tensor) -> bool:
    """Whether its elements are all there is in a stretch of memory, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _unpack(pickled: bytes, buffers: Sequence[pickle.PickleBuffer]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # as is meant
        return pickle.loads(pickled, buffers=buffers)
