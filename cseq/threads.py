"""Threads, started and awaited where a signal handler may raise at any moment.

`threading` is written in Python: an exception of a handler (Ctrl-C) in the middle of
``Thread.start`` or of an event's ``wait`` can leave a lock acquired that no thread will release.
Here the main thread only calls functions of C: a handler runs before or after such a call, or
inside `Latch.wait`, which holds no lock. The rest runs in other threads, where no handler runs.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from cseq._lock import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Latch", "Threads", "await_told", "later", "tell"]

log = logging.getLogger("cseq")

FOREVER = 1e6  # seconds


class Threads:
    """Some threads, started and joined together.

    Attributes
    ----------
    begun : bool
        They run, or are about to.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._started = Latch()  # once all of them run
        self.begun = False
        self._error: BaseException | None = None

    def add(self, name: str, target: Callable[[], None], *, daemon: bool = True) -> None:
        """Add a thread, which `start` will start."""
        self._threads.append(threading.Thread(target=target, name=name, daemon=daemon))

    def start(self) -> None:
        """Start all threads, also if a signal handler raises meanwhile.

        Raises
        ------
        RuntimeError
            The system has no more threads.
        """
        try:
            self.begun = True  # no handler runs between this and the call
            _thread.start_new_thread(self._start, ())
        except RuntimeError:
            self._started.set()
            raise
        self._started.wait()
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        """Start them, in a thread of its own."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:  # noqa: BLE001 - it is raised in `start`
            self._error = error
        finally:
            self._started.set()

    def join(self, deadline: float) -> list[str]:
        """Wait until they have ended, or `deadline` (of time.monotonic); return the others."""
        if self.begun and not self._started.wait(max(0.0, deadline - time.monotonic())):
            return [thread.name for thread in self._threads]
        for thread in self._threads:
            if thread.ident not in (None, _thread.get_ident()):
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def ident(self, name: str) -> int | None:
        """Return a thread's identifier; None if it is not running."""
        for thread in self._threads:
            if thread.name == name and thread.is_alive():
                return thread.ident
        return None


_telling = Threads()  # of the latest message


def tell(level: int, text: str, *args: object) -> None:
    """Log a message on a thread of its own, after those before it.

    Handlers of `logging` are the user's: one may raise, or wait for a server. That must not keep a
    thread from its work that others wait for. What a handler raises is printed.
    """
    if log.isEnabledFor(level):
        later(partial(log.log, level, text, *args))


def later(call: Callable[[], object]) -> None:
    """Call a function of logging, as `tell` does."""
    global _telling
    before, _telling = _telling, Threads()

    def emit() -> None:
        before.join(time.monotonic() + FOREVER)
        call()

    _telling.add("cseq-log", emit)
    with contextlib.suppress(RuntimeError):  # no more threads: the interpreter is ending
        _telling.start()


def await_told(deadline: float) -> None:
    """Wait until all messages are logged, or `deadline` (of time.monotonic)."""
    _telling.join(deadline)


def _forget_messages() -> None:
    """Forget the messages of the process that has forked this one."""
    global _telling
    _telling = Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_messages)
