"""One run of a manager, loader or stream; the list of all runs in this process.

An iterator ends when its run's generation number changes, including in other threads and forked
processes. When a run's owner is garbage collected, a separate thread closes the run.
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

# The name of threads that close runs without an owner.
NAME = "cseq-close"
# The maximum wait at interpreter exit for closing runs and for threads that are making a batch.
EXIT_SECONDS = 15.0
# The maximum subsequent wait for pending log records.
LOG_SECONDS = 2.0
# The maximum time that `close` waits for another thread's call.
LOCK_SECONDS = 5.0

K = TypeVar("K", bound="Tickets")


class Run(Generic[K]):
    """One run of a manager, from its start to its end.

    Attributes
    ----------
    lock : Lock
        See `RunState`.
    about : str
        The name of the run's data, for reports.
    is_ended : bool
        Whether `close` was called. From then on, the run can only be closed, even if that call was
        interrupted.
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
        """Whether this process started the run, as opposed to a parent that forked it."""
        return os.getpid() == self._pid

    def close_with(self, owner: object) -> None:
        """Close this run when its owner is garbage collected, unless it is already closed."""
        self._finalizer = weakref.finalize(owner, close_elsewhere, self.close, self._pid)
        # At interpreter exit, `_close_all` closes the run.
        self._finalizer.atexit = False

    def interrupt(self) -> int:
        """End all existing iterators, including iterators that are waiting in other threads.

        Return the new generation.
        """
        generation = self.pool.run.interrupt()
        if self.is_ours:
            self.pool.notify_all()
        return generation

    def close(self, *, hurried: bool = False) -> None:
        """Close the iterators and the pool. A forked process has no pool to close.

        With `hurried`, or while an exception propagates (Ctrl-C), the pool does not wait for busy
        workers.

        A pool is never closed in the middle of a call. If this thread is inside a call, or another
        thread's call takes longer than `LOCK_SECONDS`, the run is only marked as ended, and that
        call closes the pool.
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
            # Detach last, so the finalizer can repeat an interrupted close.
            self._finalizer.detach()

    def _close_pool(self) -> bool:
        """Close the pool unless a call is in progress. Return whether the pool was closed."""
        if self.lock.is_mine:
            return False
        with self.lock.hold(LOCK_SECONDS) as hold:
            if hold.has:
                self.pool.lanes.leave_traces()
                self.pool.close()
            return hold.has


_runs: weakref.WeakSet[Run[Any]] = weakref.WeakSet()
# Callbacks that receive every run before it ends.
on_close: list[Callable[[Run[Any]], object]] = []
# The latches of runs that have lost their owner and are not closed yet.
_closings: set[Latch] = set()


def present() -> list[Run[Any]]:
    """List the runs that have not ended."""
    return [run for run in list(_runs) if run.is_ours and not run.is_ended]


def close_elsewhere(close: Callable[[], object], pid: int) -> None:
    """Call `close` on another thread without waiting. Interpreter exit waits for the call.

    Garbage collection can run on any thread between any two instructions, so it must not block.
    In a forked child of the owner's process `pid`, there is nothing to close, and no thread can
    start until Python has handled the fork.
    """
    if os.getpid() != pid:
        return
    closed = Latch()
    _closings.add(closed)
    # The thread pops `close`, so no reference to `close` remains.
    pending = [close]

    def work() -> None:
        try:
            pending.pop()()
        finally:
            _closings.discard(closed)
            closed.set()

    def start_thread() -> None:
        # `close` may call `threading.current_thread`. In a thread that `threading` did not start,
        # this would register a dummy thread permanently.
        try:
            threading.Thread(target=work, name=NAME, daemon=True).start()
        except RuntimeError:
            work()

    # Starting a `threading.Thread` here would acquire locks that this thread may already hold.
    # RuntimeError means that no more threads can start.
    try:
        _thread.start_new_thread(start_thread, ())
    except RuntimeError:
        work()


def await_closings(seconds: float) -> None:
    """Wait up to `seconds` until all runs without an owner are closed."""
    deadline = time.monotonic() + seconds
    for closing in list(_closings):
        closing.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _close_all() -> None:
    """Close all runs at interpreter exit, and wait for runs that are already closing."""
    end_daemons()
    deadline = time.monotonic() + HURRY
    for run in list(_runs):
        if run.is_ours and run.pool.supervisor is not None:
            run.pool.supervisor.hurry(deadline)
    await_closings(EXIT_SECONDS)
    # The stack closes every run even if one raises.
    with contextlib.ExitStack() as stack:
        stack.callback(await_left, EXIT_SECONDS)
        for run in list(_runs):
            stack.callback(run.close, hurried=True)
    await_logged(time.monotonic() + LOG_SECONDS)


def _interrupt_all() -> None:
    """Prevent a forked process from consuming batches from its parent's rings."""
    # The closing threads do not exist in the child.
    _closings.clear()
    for run in _runs:
        run.interrupt()


in_forked_children(_interrupt_all)
