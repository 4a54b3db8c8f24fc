"""Pinning of batches; of the next one while the loop works with the one before."""

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

# How long the end of the program, and a fork, wait for a batch that is being pinned.
EXIT_SECONDS = 15.0


class Pinner:
    """Pins batches for a device, the next one on a thread from the first `pin_ahead` to `close`.

    A signal handler may raise in any method: a batch may then be pinned twice.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._pid = os.getpid()
        self._jobs: SimpleQueue[PinJob | None] = SimpleQueue()
        self._threads = Threads()
        self._job: PinJob | None = None
        # Of the latest job, even if that is forgotten.
        self._done: Latch | None = None
        _pinners.add(self)

    def in_threads(self) -> tuple[Any, str | None]:
        """Return what a thread calls first that pins its batches itself, and the device."""
        return names.settle_pinning(self._device), self._device

    def pin(self, item: Any, batch: Any) -> Any:
        """Return the batch of an item, pinned: on the thread if begun there, or else here."""
        job = self._job
        if job is not None and job.item is item and self.wait() and job.is_pinned:
            return job.batch
        return names.pin(batch, self._device)

    def pin_ahead(self, item: Any, batch: Any) -> None:
        """Have the thread pin the batch of an item."""
        if not self._threads.begun:
            try:
                work = partial(_work, self._jobs, self._device, names.settle_pinning(self._device))
                self._threads.add("cseq-pin", work)
                self._threads.start()
            # The system has no more threads, or the interpreter is ending.
            except RuntimeError:
                self._threads = Threads()
                return
        self._job = PinJob(item, batch)
        # No handler runs between these two lines.
        self._done = self._job.done
        self._jobs.put(self._job)

    def forget(self) -> None:
        """Keep no batch."""
        self._job = None

    def wait(self, seconds: float = -1.0) -> bool:
        """Wait until nothing is being pinned; return whether that is so, in this process."""
        done = self._done
        return done is None or (self._pid == os.getpid() and done.wait(seconds))

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._jobs.put(None)
        self._job = None

    __del__ = close


class PinJob:
    """A batch that is pinned on the thread."""

    def __init__(self, item: Any, batch: Any) -> None:
        self.item, self.batch = item, batch
        self.is_pinned, self.done = False, Latch()


def _work(jobs: SimpleQueue[PinJob | None], device: str | None, settle: Any) -> None:
    """Run the thread; it keeps no batch while it waits for the next one."""
    settle()
    while (job := jobs.get()) is not None:
        # The loop pins it again, which raises the exception there.
        with contextlib.suppress(BaseException):
            job.batch = names.pin(job.batch, device)
            job.is_pinned = True
        job.done.set()
        del job


_pinners: weakref.WeakSet[Pinner] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """Keep the process from ending, or being forked, in a call of the device's library.

    A copy of the process would have its locks as they are there, and no thread to release them.
    """
    for pinner in list(_pinners):
        pinner.wait(EXIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all)
