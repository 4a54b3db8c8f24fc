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

EXIT_SECONDS = 15.0  # how long the end, and a fork, wait for a batch that is being pinned


class Pinner:
    """Pins batches. Its thread, one at a time, runs from the first `begin` to `close`.

    A signal handler may raise in any method: a batch may then be pinned twice.

    Parameters
    ----------
    device : str or None
        See `DataLoader`.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._pid = os.getpid()
        self._jobs: SimpleQueue[PinJob | None] = SimpleQueue()
        self._threads = Threads()
        self._job: PinJob | None = None  # that was begun last, unless it is forgotten
        self._done: Latch | None = None  # of the job that was begun last
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

    def begin(self, item: Any, batch: Any) -> None:
        """Have the thread pin the batch of an item."""
        if not self._threads.begun:
            try:
                work = partial(_work, self._jobs, names.settle_pinning(self._device))
                self._threads.add("cseq-pin", work)
                self._threads.start()
            except RuntimeError:  # the system has no more threads, or the interpreter is ending
                self._threads = Threads()
                return
        self._job = PinJob(item, batch, self._device)
        self._done = self._job.done
        self._jobs.put(self._job)  # no handler runs between this and the line before

    def forget(self) -> None:
        """Keep no batch."""
        self._job = None

    def wait(self, seconds: float = -1.0) -> bool:
        """Wait until nothing is being pinned. False: not by then, or not in this process."""
        done = self._done
        return done is None or (self._pid == os.getpid() and done.wait(seconds))

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._jobs.put(None)
        self._job = None

    def __del__(self) -> None:
        self._jobs.put(None)


class PinJob:
    """A batch that is pinned on the thread."""

    def __init__(self, item: Any, batch: Any, device: str | None) -> None:
        self.item = item
        self.batch = batch
        self.device = device
        self.is_pinned = False
        self.done = Latch()


def _work(jobs: SimpleQueue[PinJob | None], settle: Any) -> None:
    """Run the thread; it keeps no batch while it waits for the next one."""
    settle()
    while (job := jobs.get()) is not None:
        with contextlib.suppress(BaseException):  # the loop pins it again, which raises it there
            job.batch = names.pin(job.batch, job.device)
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
