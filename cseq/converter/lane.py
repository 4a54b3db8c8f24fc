"""A queue of copies to a device, and the memory that they still read."""

from __future__ import annotations

import importlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cseq.converter import Event, Tensor


class Lane:
    """A CUDA stream: a queue of copies to a device, concurrent with its other work."""

    # Whether memory that copies start from is to be page-locked: tests have a lane without.
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
        """Free memory of this process that other processes do not use any more."""
        self._torch.cuda.ipc_collect()


class UnderWay:
    """Memory that a lane's copies still read, each piece with the event that ends its use."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Event, list[Tensor]]] = deque()

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
