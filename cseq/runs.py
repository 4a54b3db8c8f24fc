"""One start of a manager, loader or stream; all runs of this process.

An iterator ends when its run's generation number changes, even in other threads and in forked
processes. A run whose owner is garbage collected is closed on a thread of its own.
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
from cseq.threads import Latch, await_left, await_told

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.engine.pool import Pool
    from cseq.engine.tickets.base import Tickets

__all__ = ["Run", "await_closings", "close_elsewhere", "on_close", "present"]

NAME = "cseq-close"  # of the threads that close dropped runs

# How long the interpreter's end waits for runs that are being closed, and for threads in a batch.
EXIT_SECONDS = 15.0
TOLD_SECONDS = 2.0  # and for what is still to be logged
LOCK_SECONDS = 5.0  # how long `close` waits for a call that another thread is in


K = TypeVar("K", bound="Tickets")


class Run(Generic[K]):
    """One start of a manager, up to its end.

    Attributes
    ----------
    lock : Lock
        See `RunState`.
    about : str
        What it reads, for reports.
    is_ended : bool
        `close` was called: it can only be closed, also if that was interrupted.
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
        """Whether this process started it, and is not a forked child of one that did."""
        return os.getpid() == self._pid

    def close_with(self, owner: object) -> None:
        """Close this run when its owner is garbage collected, until `close` has ended it."""
        self._finalizer = weakref.finalize(owner, close_elsewhere, self.close, self._pid)
        self._finalizer.atexit = False  # `_close_all` sees to that

    def interrupt(self) -> int:
        """End all iterators made so far, also one that waits in another thread.

        Returns the generation that begins here.
        """
        generation = self.pool.run.interrupt()
        if self.is_ours:
            self.pool.notify_all()
        return generation

    def close(self, *, hurried: bool = False) -> None:
        """End the iterators and the pool; in a forked process there is no pool to end.

        `hurried`: the program ends, and a worker that is busy with a batch is not waited for. So it
        is where an exception is under way (Ctrl-C).

        A pool is never closed in the middle of a call: in one of this thread, or of another one
        that goes on for `LOCK_SECONDS`, this only marks the run, and the call closes it.
        """
        self.pool.is_hurried = hurried or sys.exc_info()[0] is not None
        try:
            if not self.is_ended and self.is_ours:
                for call in on_close:
                    call(self)
        finally:  # what looks at runs may raise: this one is ended all the same
            self._end()

    def _end(self) -> None:
        self.is_ended = True
        self.interrupt()
        if self.is_ours and not self._close_pool():
            self.lock.put_off(partial(self.close, hurried=self.pool.is_hurried))
        elif self._finalizer is not None:
            self._finalizer.detach()  # not before: an interrupted close is called again

    def _close_pool(self) -> bool:
        """Close the pool, unless a call is under way; return whether it is closed."""
        if self.lock.is_mine:
            return False
        with self.lock.hold(LOCK_SECONDS) as hold:
            if hold.has:
                self.pool.lanes.leave_traces()
                self.pool.close()
            return hold.has


_runs: weakref.WeakSet[Run[Any]] = weakref.WeakSet()
on_close: list[Callable[[Run[Any]], object]] = []  # called with each run that is to end
_closings: set[Latch] = set()  # of runs whose owners were dropped, until they are closed


def present() -> list[Run[Any]]:
    """List the runs that have not ended."""
    return [run for run in list(_runs) if run.is_ours and not run.is_ended]


def close_elsewhere(close: Callable[[], object], pid: int) -> None:
    """Call `close` on another thread, without waiting for it; the interpreter's end waits.

    Garbage collection can happen on any thread, between any two instructions, so it must not wait.
    In a process that was forked off the owner, which has the number `pid`, it may happen before
    Python knows of the fork, where no thread can begin; and nothing is to be closed.
    """
    if os.getpid() != pid:
        return
    closed = Latch()
    _closings.add(closed)
    pending = [close]  # nothing refers to it once it is done, not even the thread that began it

    def work() -> None:
        try:
            pending.pop()()
        finally:
            _closings.discard(closed)
            closed.set()

    def start_thread() -> None:
        # `close` may call `threading.current_thread`, which registers a dummy for a thread that
        # `threading` has not started; that would stay in its list.
        try:
            threading.Thread(target=work, name=NAME, daemon=True).start()
        except RuntimeError:  # no more threads
            work()

    # Not at once: the start of a `threading.Thread` takes locks that this very thread may hold.
    try:
        _thread.start_new_thread(start_thread, ())
    except RuntimeError:
        work()


def await_closings(seconds: float) -> None:
    """Wait until the runs of dropped owners are closed, at most `seconds`."""
    deadline = time.monotonic() + seconds
    for closing in list(_closings):
        closing.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _close_all() -> None:
    """Close all runs at the interpreter's end, and wait for those that are being closed."""
    end_daemons()
    deadline = time.monotonic() + HURRY
    for run in list(_runs):
        if run.is_ours and run.pool.supervisor is not None:
            run.pool.supervisor.hurry(deadline)
    await_closings(EXIT_SECONDS)
    with contextlib.ExitStack() as stack:  # all of them, also if one raises
        stack.callback(await_left, EXIT_SECONDS)
        for run in list(_runs):
            stack.callback(run.close, hurried=True)
    await_told(time.monotonic() + TOLD_SECONDS)


def _interrupt_all() -> None:
    """Keep a forked process from taking batches out of its parent's rings."""
    _closings.clear()  # their threads do not exist here
    for run in _runs:
        run.interrupt()


in_forked_children(_interrupt_all)
