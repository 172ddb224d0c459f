"""Steps of a stack that are captured once as a CUDA graph and replayed, without Python between their operations."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_modules.base import Batch
from pflsim.data.federated import Examples

CAPTURE_ERRORS = range(900, 909)
"""The codes of CUDA's errors of captures, such as cudaErrorStreamCaptureUnsupported."""
CHUNK = 64
"""Steps whose row numbers are copied to the device at once."""

log = logging.getLogger(__name__)


class ReplayedStep:
    """A stack's training step that is a fixed sequence of operations on tensors at fixed addresses.

    A counter on the device selects the rows of each step, so nothing is copied to or from the device between steps.

    Args:
        step: takes a step with a batch of inputs [n, B, ...] and labels [n, B], and returns its loss terms, each [n].
        pool: the clients' examples.
        state: the tensors that `step` changes.
        shape: n and B.
    """

    def __init__(
        self, step: Callable[[Batch], Sequence[Tensor]], pool: Examples, state: Sequence[Tensor], shape: torch.Size
    ):
        self.step, self.pool, self.shape = step, pool, shape
        device = pool.y.device
        self.rows = torch.zeros(CHUNK, shape.numel(), dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        with _unchanged(state), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            first = self._terms()  # also compiles the step
        self.terms = first.new_zeros(CHUNK, *first.shape)
        self.replay = captured(self._take, [*state, self.at, self.terms])

    def run(self, rows: Tensor) -> Tensor:
        """Take steps.

        Args:
            rows: row numbers of the pool, [steps, n, B], with at most `CHUNK` steps.

        Returns:
            The loss terms, [steps, terms, n].
        """
        rows = rows.flatten(1)
        if self.rows.is_cuda:  # the CPU does not wait for copies from pinned memory
            rows = rows.contiguous().pin_memory()
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        self.at.zero_()
        for _ in range(len(rows)):
            self.replay()
        return self.terms[: len(rows)].clone()

    def _take(self) -> None:
        self.terms.index_copy_(0, self.at, self._terms()[None])
        self.at.add_(1)

    def _terms(self) -> Tensor:
        inputs, labels = self.pool.batch(self.rows.index_select(0, self.at).flatten())
        inputs, labels = (part.view(*self.shape, *part.shape[1:]) for part in (inputs, labels))
        terms = self.step((inputs, labels))
        return torch.stack([term.reshape(-1) for term in terms])


def captured(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that replays a step as a CUDA graph; on a CPU, or if it cannot be captured, the step itself.

    The first replay is compared with the step. They must be equal to the bit.

    Args:
        step: a fixed sequence of operations.
        state: the tensors that it changes; they are left as they were.
    """
    device = state[0].device
    if device.type != "cuda":
        return step
    with _unchanged(state) as before, torch.random.fork_rng(devices=[device]):
        random = torch.cuda.get_rng_state(device)
        _beside(step)
        expected = [tensor.clone() for tensor in state]
        _reset(state, before)
        graph = torch.cuda.CUDAGraph()
        try:
            # a capture that fails leaves its stream behind
            with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph):
                step()
            torch.cuda.set_rng_state(random, device)
            graph.replay()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", 900) not in CAPTURE_ERRORS:
                raise
            log.warning("training steps run without a CUDA graph, since they cannot be captured: %s", error)
            return step
        if not all(map(torch.equal, state, expected)):
            log.warning("training steps run without a CUDA graph, since its result differs")
            return step
    return graph.replay


def _beside(step: Callable[[], None]) -> None:
    """Run a step on another stream, which libraries need to allocate their memory before a capture."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        step()
    current.wait_stream(stream)


@contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Restore tensors at the end of the block, which gets copies of them."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield before
    finally:
        _reset(tensors, before)


def _reset(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
