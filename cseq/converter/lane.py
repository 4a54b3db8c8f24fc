"""A queue of copies to a device, and the memory that they still read."""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cseq.converter import Event, Tensor


class Lane:
    """A queue of copies to a device, concurrent with its other work.

    This class is for tests: the CPU is the device, and every copy is synchronous.
    """

    # Whether memory that copies start from is to be page-locked.
    pins = False

    def active(self) -> AbstractContextManager[object]:
        """Queue the work of this context on this lane."""
        return contextlib.nullcontext()

    def can_fetch(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """Return whether the device can read this CPU tensor: its memory is page-locked."""
        return True

    def send(self, tensor: Tensor) -> Tensor:
        """Begin to copy a CPU tensor to the device."""
        return tensor.clone()

    def record(self) -> Event:
        """Record an event after the copies that were begun."""
        return _Passed()

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the caller's further work on the device, but not the caller, wait for `event`."""

    def collect(self) -> None:
        """Free memory of this process that other processes do not use any more."""


class CudaLane(Lane):
    """A CUDA stream."""

    pins = True

    def __init__(self, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def active(self) -> AbstractContextManager[object]:
        """Make the stream this thread's current one, and its device the current device."""
        context: AbstractContextManager[object] = self._torch.cuda.stream(self._stream)
        return context

    def can_fetch(self, tensor: Tensor) -> bool:
        """Ask CUDA, which knows torch's page-locked memory and that of `PageLocks`."""
        return bool(tensor.is_pinned())

    def send(self, tensor: Tensor) -> Tensor:
        """Copy without waiting."""
        return tensor.to(self._device, non_blocking=True)

    def record(self) -> Event:
        """Record an event; a host thread that waits for it sleeps rather than spins."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def join(self, event: Event, tensors: list[Tensor]) -> None:
        """Make the current stream wait, and tell torch's allocator that it uses the tensors.

        Without the latter, this lane's next copies would get the memory of a tensor that the user
        has dropped, while the user's kernels still read it.
        """
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)

    def collect(self) -> None:
        """Call torch's collector, which also removes its file of reference counts."""
        self._torch.cuda.ipc_collect()


class _Passed:
    """The event of a lane whose copies are synchronous."""

    def query(self) -> bool:
        """Return whether the copies are done: always."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


def open_lane(device: str) -> Lane:
    """Open a lane to a device; ``'cpu'`` opens one for tests."""
    return Lane() if device == "cpu" else CudaLane(device)


class UnderWay:
    """Memory that a lane's copies still read, each piece with the event that ends its use."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Event, list[Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def hold(self, event: Event, tensors: list[Tensor]) -> None:
        """Keep tensors, and with them the arrays they lie on, until the event is passed."""
        if tensors:
            self._queue.append((event, tensors))

    def reap(self, *, wait: bool = False) -> None:
        """Release memory that is no longer read; with `wait`, wait for all copies."""
        while self._queue:
            if wait:
                self._queue[0][0].synchronize()
            elif not self._queue[0][0].query():
                return
            self._queue.popleft()
