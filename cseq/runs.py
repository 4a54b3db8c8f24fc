"""One run of a manager, loader or stream; the list of all runs in this process.

Each run has a generation number. When the number changes, all existing iterators end, including
iterators in other threads and forked processes. If the owner of a run is garbage collected, a
separate thread closes the run.
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

# The name of the threads that close runs whose owner was garbage collected.
NAME = "cseq-close"
# The maximum time that interpreter exit waits for closing runs and threads that make a batch.
EXIT_SECONDS = 15.0
# The maximum time that interpreter exit then waits for pending log records.
LOG_SECONDS = 2.0
# The maximum time that `close` waits for a call in another thread.
LOCK_SECONDS = 5.0

K = TypeVar("K", bound="Tickets")


class Run(Generic[K]):
    """One run of a manager, from its start to its end.

    Attributes
    ----------
    lock : Lock
        See `RunState`.
    about : str
        The name of the data, which is shown in reports.
    is_ended : bool
        Whether `close` was called. Even if that call was interrupted, the run can then only be
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
        """Whether this process started the run, and not a parent process that forked this one."""
        return os.getpid() == self._pid

    def close_with(self, owner: object) -> None:
        """Close this run when `owner` is garbage collected, unless the run is already closed."""
        self._finalizer = weakref.finalize(owner, close_elsewhere, self.close, self._pid)
        # At interpreter exit, `_close_all` closes the run.
        self._finalizer.atexit = False

    def interrupt(self) -> int:
        """End all existing iterators, including iterators that are waiting in other threads.

        Return the number of the new generation.
        """
        generation = self.pool.run.interrupt()
        if self.is_ours:
            self.pool.notify_all()
        return generation

    def close(self, *, hurried: bool = False) -> None:
        """Close the iterators and the pool. In a forked process, close only the iterators.

        The pool does not wait for busy workers if `hurried` is True or an exception is propagating
        (Ctrl-C).

        A pool is never closed in the middle of a call. If this thread is executing a call, or a
        call in another thread takes longer than `LOCK_SECONDS`, this method only marks the run as
        ended, and that call closes the pool.
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
            # Detach the finalizer last, so it can repeat a close that was interrupted.
            self._finalizer.detach()

    def _close_pool(self) -> bool:
        """Close the pool if no call is in progress. Return whether the pool was closed."""
        if self.lock.is_mine:
            return False
        with self.lock.hold(LOCK_SECONDS) as hold:
            if hold.has:
                self.pool.lanes.leave_traces()
                self.pool.close()
            return hold.has


_runs: weakref.WeakSet[Run[Any]] = weakref.WeakSet()
# These callbacks are called with each run just before it ends.
on_close: list[Callable[[Run[Any]], object]] = []
# The latches of runs that are being closed because their owner was garbage collected.
_closings: set[Latch] = set()


def present() -> list[Run[Any]]:
    """Return the runs of this process that have not ended."""
    return [run for run in list(_runs) if run.is_ours and not run.is_ended]


def close_elsewhere(close: Callable[[], object], pid: int) -> None:
    """Call `close` in another thread without waiting for it. Interpreter exit waits for the call.

    The garbage collector can run in any thread between any two instructions, so it must not block.
    Forked children of the process `pid` have nothing to close, and cannot start a thread until
    Python has handled the fork.
    """
    if os.getpid() != pid:
        return
    closed = Latch()
    _closings.add(closed)
    # The thread pops `close` from this list, so that no reference to `close` remains.
    pending = [close]

    def work() -> None:
        try:
            pending.pop()()
        finally:
            _closings.discard(closed)
            closed.set()

    def start_thread() -> None:
        # `close` may call `threading.current_thread`, which would permanently register a dummy
        # thread if `threading` did not start the current thread.
        try:
            threading.Thread(target=work, name=NAME, daemon=True).start()
        except RuntimeError:
            work()

    # Do not start a `threading.Thread` here, because this acquires locks that the current thread
    # may already hold. RuntimeError means that no more threads can be started.
    try:
        _thread.start_new_thread(start_thread, ())
    except RuntimeError:
        work()


def await_closings(seconds: float) -> None:
    """Wait up to `seconds` until all runs whose owner was garbage collected are closed."""
    deadline = time.monotonic() + seconds
    for closing in list(_closings):
        closing.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _close_all() -> None:
    """Close all runs at interpreter exit and wait for runs that other threads are closing."""
    end_daemons()
    deadline = time.monotonic() + HURRY
    for run in list(_runs):
        if run.is_ours and run.pool.supervisor is not None:
            run.pool.supervisor.hurry(deadline)
    await_closings(EXIT_SECONDS)
    # The stack closes every run even if closing one of them raises an exception.
    with contextlib.ExitStack() as stack:
        stack.callback(await_left, EXIT_SECONDS)
        for run in list(_runs):
            stack.callback(run.close, hurried=True)
    await_logged(time.monotonic() + LOG_SECONDS)


def _interrupt_all() -> None:
    """Prevent a forked process from consuming batches from the rings of its parent."""
    # The threads that were closing runs do not exist in the child.
    _closings.clear()
    for run in _runs:
        run.interrupt()


in_forked_children(_interrupt_all)
