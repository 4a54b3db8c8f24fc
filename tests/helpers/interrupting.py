"""Ctrl-C at any chosen place of the package, as a signal handler would raise it."""

from __future__ import annotations

import _thread
import dis
import inspect
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import cseq

PACKAGE = os.path.join(Path(cseq.__file__).parent, "")
LIBRARY = os.path.join(Path(threading.__file__).parent, "")
FINALIZERS = ("__del__", "_remove", "remove")  # and weak references' callbacks


def is_mine(lock):
    """Whether this thread has a lock."""
    return lock.is_mine


class Signal(int):
    """A signal's number; getting its attribute `send` sends the signal to this process.

    No handler runs before the interpreter's next call, and getting an attribute is none.
    """

    send = property(_thread.interrupt_main)


SIGINT = Signal(signal.SIGINT)


class Interrupting:
    """Raises KeyboardInterrupt at one of the places in this package where a signal handler can.

    Or calls what a handler does there.

    The interpreter runs signal handlers after a call, at the beginning of a function and where a
    loop turns back. From Python 3.14 on, a ``with`` begins by a call: an exception there comes when
    a lock is taken, and the ``with`` not entered. A trace function can raise only where that is
    entered, so there the signal itself is sent. Nothing is raised after a call that has raised: an
    exception there would make the interpreter take the raised one for one that is being handled,
    and keep it, with all that its frames hold, for ever.
    Places where the signal is blocked, and finalizers, which no exception leaves, do not count.

    Parameters
    ----------
    countdown : int
        Which of the places, from 1.
    files : tuple of str
        Where in the package; empty: all of it.
    anywhere : bool
        In the standard library, too, where the package calls it.
    handler : callable, optional
        What is called.
    """

    PLACES = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    NO_CALLS = "CALL_INTRINSIC"  # done by the interpreter, as at the end of a closed generator

    def __init__(self, countdown, files, *, anywhere, handler=None):
        self.countdown, self.handler = countdown, handler
        self.files = (
            (LIBRARY, PACKAGE)
            if anywhere
            else tuple(PACKAGE + name.replace("/", os.sep) for name in files)
        )
        self.struck = threading.Event()
        self.before = ""  # the instruction that was done last

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(self.files or PACKAGE) or code.co_name in FINALIZERS:
            return None
        if code.co_filename.startswith(LIBRARY) and not ours(frame.f_back):
            return None  # a test has called it
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, self.before = self.before, dis.opname[code.co_code[frame.f_lasti]]
            enters = before == "LOAD_SPECIAL" and self.before == "CALL"
            called = before.startswith(self.PLACES) and not before.startswith(self.NO_CALLS)
            if (called or enters) and not blocked():
                self.countdown -= 1
                if self.countdown == 0:
                    self.struck.set()
                    if enters and self.handler is None:
                        SIGINT.send  # noqa: B018 - what follows is the CALL of `__enter__`
                    else:
                        self.handle()
        elif event == "exception":
            self.before = ""
        return self

    def handle(self):
        """Do what a signal handler does."""
        if self.handler is None:
            signal.default_int_handler(signal.SIGINT, None)
        self.handler()


def ours(frame):
    """Tell whether a frame is of the package, or of what it may have called."""
    return frame is not None and frame.f_code.co_filename.startswith((LIBRARY, PACKAGE))


def blocked():
    """Tell whether this thread does not get the signal now."""
    mask = getattr(signal, "pthread_sigmask", None)
    return mask is not None and signal.SIGINT in mask(signal.SIG_BLOCK, ())


class Strike:
    """Interrupts once what is done in its `with`, and catches that.

    No generator: from Python 3.13 on, what `contextlib` makes of one keeps the exception in a
    circle, and with it the batches that its frames had.
    """

    def __init__(self, trace):
        self.trace = trace
        self.before: Any = None

    def __enter__(self):
        self.before = sys.gettrace()
        # CPython 3.12 tells of opcodes only if a frame has asked for them before `settrace`.
        inspect.currentframe().f_trace_opcodes = True
        sys.settrace(self.trace)
        return self.trace.struck

    def __exit__(self, kind, error, traceback):
        sys.settrace(self.before)
        assert kind is not KeyboardInterrupt or self.trace.struck.is_set()
        return kind is KeyboardInterrupt


def interrupted(countdown, *files, anywhere=False):
    """Strike once at a place of what is done meanwhile; the event tells whether it was there."""
    return Strike(Interrupting(countdown, files, anywhere=anywhere))


def handled(countdown, *files, by):
    """Call a signal handler at a place of what is done meanwhile; see `interrupted`."""
    return Strike(Interrupting(countdown, files, anywhere=False, handler=by))


SHARES = 7  # an odd number: what a test does at each second place, it does in each share
# `make test` has one of the shares of a test's places, `make check-nightly` the others.
in_shares = pytest.mark.parametrize(
    "share", [0, *(pytest.param(k, marks=pytest.mark.nightly) for k in range(1, SHARES))]
)


def places(share, stride=1):
    """Count the places of a share of those that are `stride` apart."""
    return itertools.count(1 + share * stride, SHARES * stride)


def first_hits(step, stride=1, share=None):
    """Do something once for every place in it where a handler can raise, or every so many.

    `step` is told which place, and returns whether there was one. Returns how many times there was,
    or with a share, about how many times there is in all of them.
    """
    numbers = itertools.count(1, stride) if share is None else places(share, stride)
    hits = sum(1 for _ in itertools.takewhile(step, numbers))
    return hits if share is None else hits * SHARES
