"""A queue of copies to a device. It keeps the source memory alive."""

from __future__ import annotations

import importlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cseq.converter import Event, Tensor


# Methods that return a sparse tensor's strided parts. Only strided tensors can record streams.
PARTS = {
    "sparse_coo": ("_indices", "_values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that make up a tensor."""
    names = PARTS.get(str(tensor.layout).removeprefix("torch."), ())
    return [getattr(tensor, name)() for name in names] or [tensor]


class Lane:
    """A CUDA stream that copies data to a device while the device does other work."""

    # Whether memory must be page-locked before it is copied. A test lane sets this to False.
    pins = True

    def __init__(self, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._read: deque[tuple[Event, list[Tensor]]] = deque()

    def active(self) -> AbstractContextManager[object]:
        """Make this stream and its device current in this thread."""
        context: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return context

    def can_fetch(self, tensor: Tensor) -> bool:
        """Return True if torch's pool or `PageLocks` has page-locked the tensor's memory."""
        return bool(tensor.is_pinned())

    def send(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device without waiting."""
        return tensor.to(self._device, non_blocking=True)

    def record(self, read: list[Tensor]) -> Event:
        """Record an event. A host thread that waits for this event sleeps instead of spinning.

        Tensors in `read` and the arrays whose memory they share stay alive until the event occurs.
        """
        event: Event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        if read:
            self._read.append((event, read))
        return event

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the current stream wait for the event, and mark the tensors as used by that stream.

        Without the mark, the lane's next copies could overwrite a tensor that the user has dropped
        but that the user's kernels are still reading.
        """
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            for part in parts(tensor):
                part.record_stream(current)

    def collect(self) -> None:
        """Free this process's memory that other processes no longer use."""
        self._torch.cuda.ipc_collect()

    def reap(self, *, wait: bool = False) -> None:
        """Release memory that is no longer read. If `wait` is set, wait for all copies first."""
        while self._read:
            if wait:
                self._read[0][0].synchronize()
            elif not self._read[0][0].query():  # type: ignore[no-untyped-call]
                return
            self._read.popleft()
