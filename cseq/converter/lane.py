"""A CUDA stream for copies to a device."""

from __future__ import annotations

import importlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cseq.converter import Event, Tensor


# The strided parts of a sparse tensor. Only strided tensors can record streams.
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
    """A CUDA stream for copies to a device. Tensors stay alive until they have been copied."""

    # Whether to page-lock memory before a copy. Tests set this to False.
    pins = True

    def __init__(self, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._read: deque[tuple[Event, list[Tensor]]] = deque()

    def active(self) -> AbstractContextManager[object]:
        """Make this stream current in this thread."""
        context: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return context

    def can_fetch(self, tensor: Tensor) -> bool:
        """Return True if the tensor's memory is page-locked."""
        return bool(tensor.is_pinned())

    def send(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor to the device."""
        return tensor.to(self._device, non_blocking=True)

    def record(self, read: list[Tensor]) -> Event:
        """Record an event that a thread can wait for without spinning.

        The tensors in `read` are kept alive until the event completes.
        """
        event: Event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        if read:
            self._read.append((event, read))
        return event

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the current stream wait for an event, and mark tensors as used by that stream.

        Otherwise, a tensor that the user drops could be overwritten while kernels are reading it.
        """
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            for part in parts(tensor):
                part.record_stream(current)

    def collect(self) -> None:
        """Free shared CUDA memory that other processes have released."""
        self._torch.cuda.ipc_collect()

    def reap(self, *, wait: bool = False) -> None:
        """Release memory that has been copied. If `wait` is set, wait for all copies first."""
        while self._read:
            if wait:
                self._read[0][0].synchronize()
            elif not self._read[0][0].query():  # type: ignore[no-untyped-call]
                return
            self._read.popleft()
