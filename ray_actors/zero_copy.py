"""Serialises messages so that Ray transfers their tensors without copies."""

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; torch allocates tensors at multiples of it."""


class ZeroCopyMessage:
    """Wraps an object with tensors; the receiver gets the object itself, not the wrapper.

    Ordinary pickling copies a tensor into the pickle, the pickle into the object store, and the tensor out of the
    store for every receiver. Here each tensor is an out-of-band buffer (pickle protocol 5): Ray writes it directly
    into the store, and receivers on the node share that memory.

    Args:
        content: any object that can be pickled; tensors on the CPU.

    Notes:
        Received tensors have the same memory layout, because the last bits of a sum may depend on it; tensors with
        gaps become contiguous. Do not write to received tensors: other receivers share them. They occupy the object
        store as long as they live, so copy what you keep beyond the call (`load`, anchors and server tables do).
    """

    def __init__(self, content: Any):
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        pickled, buffers = io.BytesIO(), []
        pickler = _Pickler(pickled, protocol=5, buffer_callback=buffers.append)
        pickler.dump(self.content)
        return _unpack, (pickled.getvalue(), buffers)


class _Pickler(pickle.Pickler):
    """Pickles tensors as byte arrays, which protocol 5 passes out of band."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        if torch.ops.aten.is_non_overlapping_and_dense(obj):
            flat = obj.detach().as_strided((obj.numel(),), (1,))
        else:
            obj = obj.detach().clone(memory_format=torch.contiguous_format)
            flat = obj.reshape(-1)
        content = flat.view(torch.uint8).numpy()  # as bytes, because NumPy has no bfloat16
        return _tensor, (content, obj.dtype, tuple(obj.shape), obj.stride())


def _tensor(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return the bytes as a tensor that is aligned as torch aligns its own.

    The last bits of a matrix product depend on the alignment. Ray aligns buffers below 2 kB to 8 bytes only, so only
    small tensors are copied.
    """
    found = torch.from_numpy(content)
    aligned = found if found.data_ptr() % ALIGNMENT == 0 else found.clone()
    return aligned.view(dtype).as_strided(shape, stride)


def _unpack(pickled: bytes, buffers: Sequence[pickle.PickleBuffer]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # receivers must not write
        return pickle.loads(pickled, buffers=buffers)
