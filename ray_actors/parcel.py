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


class Parcel:
    """Something with tensors in it that arrives at the other end as what it was, not as a parcel.

    Pickled as it stands, a tensor is copied into the pickle, which is copied into the object store, and copied out of
    it by everyone who receives it. In a parcel it is a buffer beside the pickle (protocol 5): it is written into the
    store at once, and a receiver's tensor is that memory, which all processes of the machine map.

    Args:
        content: messages, of any type of pickle; tensors on the CPU.

    Notes:
        Received tensors are contiguous, whatever they were, and nobody may write to them: it would change what the
        others have received. They hold their place in the store for as long as they live, so that what is kept beyond
        the call is copied (`load`, anchors, and the tables of servers do).
    """

    def __init__(self, content: Any):
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        pickled, buffers = io.BytesIO(), []
        _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(self.content)
        return _unpack, (pickled.getvalue(), buffers)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays of bytes, which protocol 5 leaves outside."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        flat = obj.detach().reshape(-1).contiguous()  # bytes, since NumPy does not know all types (bfloat16)
        return _tensor, (flat.view(torch.uint8).numpy(), obj.dtype, tuple(obj.shape))


def _tensor(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).view(shape)


def _unpack(pickled: bytes, buffers: Sequence[pickle.PickleBuffer]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # as is meant
        return pickle.loads(pickled, buffers=buffers)
