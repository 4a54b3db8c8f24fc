"""Pins batches in the background."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from functools import partial
from queue import SimpleQueue
from typing import Any

from cseq.adapters.torch import names
from cseq.threads import Latch, Threads

__all__ = ["Pinner"]

# Maximum time, in seconds, that an exit or a fork waits for a batch to be pinned.
EXIT_SECONDS = 15.0


class Pinner:
    """Pins batches for a device, in a thread that `pin_ahead` starts.

    If a signal handler raises, a batch may be pinned twice.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._pid = os.getpid()
        self._jobs: SimpleQueue[PinJob | None] = SimpleQueue()
        self._threads = Threads()
        self._job: PinJob | None = None
        # The latest job's latch, which is kept when the job is forgotten.
        self._done: Latch | None = None
        _pinners.add(self)

    def in_threads(self) -> tuple[Any, str | None]:
        """Return a setup function and the device, for worker threads that pin their batches."""
        return names.settle_pinning(self._device), self._device

    def pin(self, item: Any, batch: Any) -> Any:
        """Return an item's pinned batch. Pin it here unless the thread has already done so."""
        job = self._job
        if job is not None and job.item is item and self.wait() and job.is_pinned:
            return job.batch
        return names.pin(batch, self._device)

    def pin_ahead(self, item: Any, batch: Any) -> None:
        """Start pinning an item's batch in the background."""
        if not self._threads.begun:
            try:
                work = partial(_work, self._jobs, self._device, names.settle_pinning(self._device))
                self._threads.add("cseq-pin", work)
                self._threads.start()
            # For example, the interpreter may be shutting down.
            except RuntimeError:
                self._threads = Threads()
                return
        self._job = PinJob(item, batch)
        # No signal handler can run between the next two lines.
        self._done = self._job.done
        self._jobs.put(self._job)

    def forget(self) -> None:
        """Drop the latest batch that was pinned in the background."""
        self._job = None

    def wait(self, seconds: float = -1.0) -> bool:
        """Wait until no batch is being pinned. Return False on timeout or in a forked process."""
        done = self._done
        return done is None or (self._pid == os.getpid() and done.wait(seconds))

    def close(self) -> None:
        """Stop the thread without waiting for it."""
        self._jobs.put(None)
        self._job = None

    __del__ = close


class PinJob:
    """A batch to pin in the background."""

    def __init__(self, item: Any, batch: Any) -> None:
        self.item, self.batch = item, batch
        self.is_pinned, self.done = False, Latch()


def _work(jobs: SimpleQueue[PinJob | None], device: str | None, settle: Any) -> None:
    """Pin batches until the queue returns None. Do not keep a batch alive while waiting."""
    settle()
    while (job := jobs.get()) is not None:
        # If pinning fails, the trainer tries again and raises the exception.
        with contextlib.suppress(BaseException):
            job.batch = names.pin(job.batch, device)
            job.is_pinned = True
        job.done.set()
        del job


_pinners: weakref.WeakSet[Pinner] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """Delay an exit or a fork while a thread is calling into the device's library.

    A forked child would inherit the library's locks without the thread that releases them.
    """
    for pinner in list(_pinners):
        pinner.wait(EXIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all)
