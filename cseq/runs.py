"""Runs of the managers, loaders and streams in this process.

When a run's generation number changes, all its iterators end, even in other threads and forked
processes.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cseq import tracing
from cseq._lock import end_daemons
from cseq.processes.launcher.forks import in_forked_children
from cseq.stage import HURRY
from cseq.threads import Latch, await_left, await_logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.engine.pool import Pool
    from cseq.engine.tickets.base import Tickets

__all__ = ["Run", "await_closings", "close_elsewhere", "on_close", "present"]

# Name of the threads that close runs whose owners were garbage-collected.
NAME = "cseq-close"
# How long to wait at interpreter exit for runs and threads to end.
EXIT_SECONDS = 15.0
# How long to wait at interpreter exit for pending log records.
LOG_SECONDS = 2.0
# How long `close` waits for a call in another thread to return.
LOCK_SECONDS = 5.0

K = TypeVar("K", bound="Tickets")


class Run(Generic[K]):
    """One run of a manager, from its start to its end.

    Attributes
    ----------
    lock : Lock
        The lock that protects the pool. See `RunState`.
    about : str
        A description of the data for reports.
    is_ended : bool
        Whether `close` was called.
    """

    def __init__(self, pool: Pool[K]) -> None:
        self.pool = pool
        self.lock = pool.run.lock
        self.is_ended = False
        self.about = ""
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[..., Any] | None = None
        _runs.add(self)
        tracing.record_if_asked()

    @property
    def is_ours(self) -> bool:
        """Whether this process started the run."""
        return os.getpid() == self._pid

    def close_with(self, owner: object) -> None:
        """Close the run when `owner` is garbage-collected."""
        self._finalizer = weakref.finalize(owner, close_elsewhere, self.close, self._pid)
        # At interpreter exit, `_close_all` closes the run instead.
        self._finalizer.atexit = False

    def interrupt(self) -> int:
        """End all existing iterators, even in other threads. Return the new generation."""
        generation = self.pool.run.interrupt()
        if self.is_ours:
            self.pool.notify_all()
        return generation

    def close(self, *, hurried: bool = False) -> None:
        """End all iterators. If this process started the run, also close the pool.

        The pool does not wait for busy workers if `hurried` is True or an exception is propagating
        (Ctrl-C).

        If this thread is in the middle of another call, the pool is closed after that call. The
        same applies if a call in another thread takes longer than `LOCK_SECONDS`.
        """
        self.pool.is_hurried = hurried or sys.exc_info()[0] is not None
        try:
            if not self.is_ended and self.is_ours:
                for call in on_close:
                    call(self)
        finally:
            self._end()

    def _end(self) -> None:
        self.is_ended = True
        self.interrupt()
        if self.is_ours and not self._close_pool():
            self.lock.put_off(partial(self.close, hurried=self.pool.is_hurried))
        elif self._finalizer is not None:
            # Detach the finalizer last, so that it can redo `close` after an interruption.
            self._finalizer.detach()

    def _close_pool(self) -> bool:
        """Close the pool. Return False if a call is in progress."""
        if self.lock.is_mine:
            return False
        with self.lock.hold(LOCK_SECONDS) as hold:
            if hold.has:
                self.pool.lanes.leave_traces()
                self.pool.close()
            return hold.has


_runs: weakref.WeakSet[Run[Any]] = weakref.WeakSet()
# Functions to call with each run just before it ends.
on_close: list[Callable[[Run[Any]], object]] = []
# One latch for each run that another thread is closing.
_closings: set[Latch] = set()


def present() -> list[Run[Any]]:
    """Return the active runs in this process."""
    return [run for run in list(_runs) if run.is_ours and not run.is_ended]


def close_elsewhere(close: Callable[[], object], pid: int) -> None:
    """Call `close` in another thread. Interpreter exit waits for this thread.

    Garbage collection can happen anywhere, so a finalizer must not block. In a process other than
    `pid`, do nothing.
    """
    if os.getpid() != pid:
        return
    closed = Latch()
    _closings.add(closed)
    # The thread pops `close`, so that no reference to the function remains.
    pending = [close]

    def work() -> None:
        try:
            pending.pop()()
        finally:
            _closings.discard(closed)
            closed.set()

    def start_thread() -> None:
        # In this raw thread, `threading.current_thread` would register a permanent dummy thread.
        try:
            threading.Thread(target=work, name=NAME, daemon=True).start()
        except RuntimeError:
            work()

    # `threading.Thread` acquires locks that this thread may already hold. RuntimeError means that
    # no more threads can be started.
    try:
        _thread.start_new_thread(start_thread, ())
    except RuntimeError:
        work()


def await_closings(seconds: float) -> None:
    """Wait up to `seconds` for runs that other threads are closing."""
    deadline = time.monotonic() + seconds
    for closing in list(_closings):
        closing.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _close_all() -> None:
    """Close all runs at interpreter exit."""
    end_daemons()
    deadline = time.monotonic() + HURRY
    for run in list(_runs):
        if run.is_ours and run.pool.supervisor is not None:
            run.pool.supervisor.hurry(deadline)
    await_closings(EXIT_SECONDS)
    # The stack closes every run, even if closing one of them raises.
    with contextlib.ExitStack() as stack:
        stack.callback(await_left, EXIT_SECONDS)
        for run in list(_runs):
            stack.callback(run.close, hurried=True)
    await_logged(time.monotonic() + LOG_SECONDS)


def _interrupt_all() -> None:
    """End all iterators in a forked process, to keep it from using its parent's rings."""
    # The threads that close runs do not exist in the child.
    _closings.clear()
    for run in _runs:
        run.interrupt()


in_forked_children(_interrupt_all)
