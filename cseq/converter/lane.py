"""A queue of copies to a device, with the memory that they still read."""

from __future__ import annotations

import importlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cseq.converter import Event, Tensor


# The strided tensors that make up a sparse one: only these know of streams.
PARTS = {
    "sparse_coo": ("_indices", "_values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def parts(tensor: Tensor) -> list[Tensor]:
    """List the strided tensors that make up a tensor."""
    names = PARTS.get(str(tensor.layout).removeprefix("torch."), ())
    return [getattr(tensor, name)() for name in names] or [tensor]


class Lane:
    """A CUDA stream: a queue of copies to a device, concurrent with its other work."""

    # Whether the memory that is copied has to be page-locked: a lane of the tests does without.
    pins = True

    def __init__(self, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._read: deque[tuple[Event, list[Tensor]]] = deque()

    def active(self) -> AbstractContextManager[object]:
        """Make the stream this thread's current one, and its device the current device."""
        context: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return context

    def can_fetch(self, tensor: Tensor) -> bool:
        """Ask CUDA, which knows torch's page-locked memory and the mappings of `PageLocks`."""
        return bool(tensor.is_pinned())

    def send(self, tensor: Tensor) -> Tensor:
        """Copy without waiting."""
        return tensor.to(self._device, non_blocking=True)

    def record(self, read: list[Tensor]) -> Event:
        """Record an event; a host thread that waits for it sleeps rather than spins.

        Until it is passed, the tensors that were read are kept, with the arrays they lie on.
        """
        event: Event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        if read:
            self._read.append((event, read))
        return event

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the current stream wait, and tell torch's allocator that it uses the tensors.

        Otherwise this lane's next copies could get the memory of a tensor that the user has
        dropped, while the user's kernels still read it.
        """
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            for part in parts(tensor):
                part.record_stream(current)

    def collect(self) -> None:
        """Free memory of this process that other processes no longer use."""
        self._torch.cuda.ipc_collect()

    def reap(self, *, wait: bool = False) -> None:
        """Release memory that is no longer read; with `wait`, wait for all copies."""
        while self._read:
            if wait:
                self._read[0][0].synchronize()
            elif not self._read[0][0].query():  # type: ignore[no-untyped-call]
                return
            self._read.popleft()
