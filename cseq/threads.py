"""Threads that start and join safely even if a signal handler raises at any time.

`threading` is written in Python: if a handler (Ctrl-C) raises in ``Thread.start`` or
``Event.wait``, a lock can stay locked forever. Here, the main thread only calls C functions, so
a handler can run only between them or in `Latch.wait`. Other threads do not run handlers.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from functools import partial
from os.path import join
from typing import TYPE_CHECKING

from cseq._lock import Latch, Lock
from cseq.system import ROOT, groups, number

try:
    import resource
except ModuleNotFoundError:
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Latch",
    "Threads",
    "await_left",
    "await_logged",
    "call_later",
    "leave_running",
    "log_later",
    "refuse_patches",
    "thread_limits",
]

log = logging.getLogger("cseq")


class Threads:
    """Threads that are started and joined as a group. `begun` is set just before they run."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._started = Latch()
        self.begun = False
        self._error: BaseException | None = None

    def add(self, name: str, target: Callable[[], None]) -> None:
        """Add a thread."""
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))

    def start(self) -> None:
        """Start all threads, even if a signal handler raises.

        Handlers only run in the main thread, and never between setting `begun` and the next call.

        Raises
        ------
        RuntimeError
            If no more threads can be started, or if they would be greenlets.
        """
        refuse_patches("threading", "thread")
        if _thread.get_ident() != threading.main_thread().ident:
            self.begun = True
            self._start()
        else:
            try:
                self.begun = True
                _thread.start_new_thread(self._start, ())
            except RuntimeError as error:
                self.begun, self._error = False, error
                self._started.set()
            self._started.wait()
        if isinstance(self._error, RuntimeError):
            raise RuntimeError(f"{self._error}: {thread_limits()}") from self._error
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        """Start the threads. Call this from a thread that runs no signal handlers."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:  # noqa: BLE001 - it is raised in `start`
            self._error = error
            self.begun = any(thread.ident is not None for thread in self._threads)
        finally:
            self._started.set()

    def join(self, deadline: float) -> list[str]:
        """Wait until `deadline` (time.monotonic). Return the names of threads still running."""
        if self.begun and not self._started.wait(max(0.0, deadline - time.monotonic())):
            return [thread.name for thread in self._threads]
        for thread in self._threads:
            if thread.ident not in (None, _thread.get_ident()):
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]


# For each greenlet library, the function that checks whether a module is patched.
GREENLETS = {"gevent.monkey": "is_module_patched", "eventlet.patcher": "is_monkey_patched"}


def refuse_patches(*modules: str) -> None:
    """Raise RuntimeError if a module is patched to use greenlets."""
    for name, is_patched in GREENLETS.items():
        library = sys.modules.get(name)
        for module in () if library is None else modules:
            if getattr(library, is_patched)(module):
                raise RuntimeError(
                    f"{name.partition('.')[0]} has patched {module!r} in this process, so cseq's "
                    "workers would hang or die; start them in a process without the patch, or make "
                    "batches without workers (num_workers=0, or a manager's start_test())"
                )


# Threads that are still running user code.
_left: set[Threads] = set()


def leave_running(threads: Threads) -> None:
    """Before Python 3.14, make interpreter exit wait for these threads.

    Otherwise, the stack of a thread that reacquires the GIL at exit would be unwound. If C++
    functions were on the stack, as with torch, the process would abort.
    """
    _left.difference_update([group for group in _left if not group.join(0.0)])
    if sys.version_info < (3, 14):
        _left.add(threads)


def await_left(seconds: float) -> None:
    """Wait up to `seconds` for the threads passed to `leave_running`."""
    deadline = time.monotonic() + seconds
    stuck = [name for threads in _left for name in threads.join(deadline)]
    if stuck:
        text = "threads %s are still busy %g s after the program ended and may abort the process"
        log.warning(text, stuck, seconds)


def thread_limits(root: str = ROOT) -> str:
    """Return an error message that states the limits on threads and processes."""
    known = []
    if resource is not None and hasattr(resource, "RLIMIT_NPROC"):
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            known.append(f"ulimit -u is {soft} for this user")
    for folder, name in groups(root, "pids", "pids.max", "pids.max"):
        most, used = number(join(folder, name)), number(join(folder, "pids.current"))
        if most is not None:
            known.append(f"pids.max of the control group is {most}, with {used} in use")
    limits = f" ({'; '.join(known)})" if known else ""
    return (
        f"the system cannot start more threads or processes{limits}; raise the limit (ulimit -u; "
        "docker run --pids-limit), or use fewer workers"
    )


_pending: deque[Callable[[], object]] = deque()
_writer = Threads()
_writing = False
_guard = Lock()


def log_later(level: int, text: str, *args: object) -> None:
    """Log a message in another thread, because the user's logging handlers may block or raise.

    Messages are logged in order. Exceptions from handlers are printed.
    """
    if log.isEnabledFor(level):
        call_later(partial(log.log, level, text, *args))


def call_later(call: Callable[[], object]) -> None:
    """Call a logging function in another thread. Calls are made in order.

    If starting the thread fails or is interrupted, the next call tries again.
    """
    global _writer, _writing
    with _guard.hold():
        _pending.append(call)
        if _writing:
            return
        _writer = Threads()
        _writer.add("cseq-log", _write)
        try:
            _writing = True
            _writer.start()
        except RuntimeError:
            pass
        finally:
            _writing = _writer.begun


def _write() -> None:
    """Make the pending calls. Print exceptions from the user's logging handlers."""
    global _writing
    while True:
        with _guard.hold():
            if not _pending:
                _writing = False
                return
            call = _pending.popleft()
        try:
            call()
        except BaseException:  # noqa: BLE001 - of the user's handler
            with contextlib.suppress(Exception):
                traceback.print_exc()


def await_logged(deadline: float) -> None:
    """Wait until all messages are logged, or until `deadline` (time.monotonic)."""
    _writer.join(deadline)


def _forget_messages() -> None:
    global _writer, _writing
    _pending.clear()
    _writer, _writing = Threads(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_messages)
