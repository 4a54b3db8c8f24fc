"""One start of a manager, loader or stream; all runs of this process.

An iterator ends when its run's generation number changes, even in other threads and in forked
processes. When a run's owner is garbage collected, a thread of its own closes the run.
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

# The name of the threads that close dropped runs.
NAME = "cseq-close"
# How long the interpreter's end waits for runs that are being closed, and for threads in a batch.
EXIT_SECONDS = 15.0
# How long it then waits for records that are still to be logged.
LOG_SECONDS = 2.0
# How long `close` waits for another thread's call.
LOCK_SECONDS = 5.0

K = TypeVar("K", bound="Tickets")


class Run(Generic[K]):
    """One start of a manager, up to its end.

    Attributes
    ----------
    lock : Lock
        See `RunState`.
    about : str
        The name of its data, for reports.
    is_ended : bool
        Whether `close` was called. From then on, even if that was interrupted, the run can only be
        closed.
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
        """Whether this process, and not one that forked it, started the run."""
        return os.getpid() == self._pid

    def close_with(self, owner: object) -> None:
        """Close this run when its owner is garbage collected, unless `close` ended it before."""
        self._finalizer = weakref.finalize(owner, close_elsewhere, self.close, self._pid)
        # At the interpreter's end, `_close_all` closes it.
        self._finalizer.atexit = False

    def interrupt(self) -> int:
        """End every iterator made so far, including one waiting in another thread.

        Returns the new generation.
        """
        generation = self.pool.run.interrupt()
        if self.is_ours:
            self.pool.notify_all()
        return generation

    def close(self, *, hurried: bool = False) -> None:
        """End the iterators and the pool. A forked process has no pool to end.

        If `hurried`, or while an exception propagates (Ctrl-C), the pool does not wait for a worker
        that is busy with a batch.

        A pool is never closed in the middle of a call. If this thread is in a call, or another
        thread's call takes longer than `LOCK_SECONDS`, the run is only marked, and that call closes
        it.
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
            # This comes last, so that the finalizer repeats a close that was interrupted.
            self._finalizer.detach()

    def _close_pool(self) -> bool:
        """Close the pool, unless a call is under way. Return whether it is closed."""
        if self.lock.is_mine:
            return False
        with self.lock.hold(LOCK_SECONDS) as hold:
            if hold.has:
                self.pool.lanes.leave_traces()
                self.pool.close()
            return hold.has


_runs: weakref.WeakSet[Run[Any]] = weakref.WeakSet()
# Each is called with every run that is about to end.
on_close: list[Callable[[Run[Any]], object]] = []
# One for each run whose owner was dropped, until the run is closed.
_closings: set[Latch] = set()


def present() -> list[Run[Any]]:
    """List the runs that have not ended."""
    return [run for run in list(_runs) if run.is_ours and not run.is_ended]


def close_elsewhere(close: Callable[[], object], pid: int) -> None:
    """Call `close` on another thread without waiting for it. The interpreter's end waits.

    Garbage collection can happen on any thread, between any two instructions, so it must not wait.
    In a child that the owner's process `pid` forked, there is nothing to close, and no thread can
    start before Python knows of the fork.
    """
    if os.getpid() != pid:
        return
    closed = Latch()
    _closings.add(closed)
    # The thread pops `close`, so that nothing refers to it afterwards.
    pending = [close]

    def work() -> None:
        try:
            pending.pop()()
        finally:
            _closings.discard(closed)
            closed.set()

    def start_thread() -> None:
        # In a thread that `threading` did not start, `threading.current_thread`, which `close` may
        # call, would register a dummy that stays in its list.
        try:
            threading.Thread(target=work, name=NAME, daemon=True).start()
        except RuntimeError:
            work()

    # Starting a `threading.Thread` here would take locks that this thread may hold. RuntimeError
    # means that there can be no more threads.
    try:
        _thread.start_new_thread(start_thread, ())
    except RuntimeError:
        work()


def await_closings(seconds: float) -> None:
    """Wait at most `seconds` until the runs of dropped owners are closed."""
    deadline = time.monotonic() + seconds
    for closing in list(_closings):
        closing.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _close_all() -> None:
    """Close all runs at the interpreter's end, and wait for runs that are being closed."""
    end_daemons()
    deadline = time.monotonic() + HURRY
    for run in list(_runs):
        if run.is_ours and run.pool.supervisor is not None:
            run.pool.supervisor.hurry(deadline)
    await_closings(EXIT_SECONDS)
    # The stack closes all runs even if one raises.
    with contextlib.ExitStack() as stack:
        stack.callback(await_left, EXIT_SECONDS)
        for run in list(_runs):
            stack.callback(run.close, hurried=True)
    await_logged(time.monotonic() + LOG_SECONDS)


def _interrupt_all() -> None:
    """Keep a forked process from taking batches out of its parent's rings."""
    # The closing threads do not exist here.
    _closings.clear()
    for run in _runs:
        run.interrupt()


in_forked_children(_interrupt_all)
