"""Ctrl-C at any chosen place of the package, as a signal handler raises it."""

import _thread
import dis
import inspect
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import cseq

PACKAGE = os.path.join(Path(cseq.__file__).parent, "")
LIBRARY = os.path.join(Path(threading.__file__).parent, "")
# Weak references' callbacks count as finalizers here.
FINALIZERS = ("__del__", "_remove", "remove")


def is_mine(lock):
    """Return whether this thread holds a lock."""
    return lock.is_mine


class Signal(int):
    """A signal's number; getting its attribute `send` sends the signal to this process.

    No handler runs before the interpreter's next call, and getting an attribute is no call.
    """

    send = property(_thread.interrupt_main)


SIGINT = Signal(signal.SIGINT)


class Interrupting:
    """Raises KeyboardInterrupt at one of the places in this package where a signal handler can.

    With `handler`, it calls that function there instead of raising.

    The interpreter runs signal handlers after a call, at the beginning of a function and where a
    loop turns back. From Python 3.14 on, a ``with`` begins with a call: an exception there comes
    when the lock is taken but the ``with`` is not entered. A trace function can raise only where
    the ``with`` is entered, so the signal itself is sent there. Nothing is raised after a call that
    has raised: the interpreter would then take the first exception as one that is being handled,
    and keep it forever, with all that its frames hold. Places where the signal is blocked, and
    finalizers, which no exception leaves, do not count.

    `countdown` is the number of the place, from 1. Only `files` of the package count, or all if
    there are none; with `anywhere`, the standard library counts, too, where the package calls it.
    """

    PLACES = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    # The interpreter does these itself, for example at the end of a closed generator.
    NO_CALLS = "CALL_INTRINSIC"

    def __init__(self, countdown, files, *, anywhere, handler=None):
        self.countdown, self.handler = countdown, handler
        chosen = tuple(PACKAGE + name.replace("/", os.sep) for name in files)
        # No signal would ever strike in a file that has moved.
        missing = [path for path in chosen if not os.path.exists(path)]
        assert not missing, missing
        self.files = (LIBRARY, PACKAGE) if anywhere else chosen
        self.struck = threading.Event()
        # The last instruction.
        self.before = ""

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(self.files or PACKAGE) or code.co_name in FINALIZERS:
            return None
        if code.co_filename.startswith(LIBRARY) and not ours(frame.f_back):
            # A test has called it.
            return None
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
        if self.handler is None:
            signal.default_int_handler(signal.SIGINT, None)
        self.handler()


def ours(frame):
    """Return whether a frame is of the package, or of a function that it may have called."""
    return frame is not None and frame.f_code.co_filename.startswith((LIBRARY, PACKAGE))


def blocked():
    """Return whether the signal is blocked in this thread."""
    mask = getattr(signal, "pthread_sigmask", None)
    return mask is not None and signal.SIGINT in mask(signal.SIG_BLOCK, ())


class Strike:
    """Interrupts the body of its `with` once, and catches the exception.

    It is no generator: from Python 3.13 on, `contextlib`'s wrapper of a generator keeps the
    exception in a cycle, and with it the batches that its frames held.
    """

    def __init__(self, trace):
        self.trace, self.before = trace, None

    def __enter__(self):
        self.before = sys.gettrace()
        # CPython 3.12 reports opcodes only if a frame has asked for them before `settrace`.
        inspect.currentframe().f_trace_opcodes = True
        sys.settrace(self.trace)
        return self.trace.struck

    def __exit__(self, kind, error, traceback):
        sys.settrace(self.before)
        assert kind is not KeyboardInterrupt or self.trace.struck.is_set()
        return kind is KeyboardInterrupt


def interrupted(countdown, *files, anywhere=False):
    """Strike once at a place of the body; the event tells whether the body reached it."""
    return Strike(Interrupting(countdown, files, anywhere=anywhere))


def handled(countdown, *files, by):
    """Call a signal handler at a place of the body; see `interrupted`."""
    return Strike(Interrupting(countdown, files, anywhere=False, handler=by))


# An odd number, so that what a test does at every second place happens in each share.
SHARES = 7
# `make test` runs one of the shares of a test's places, `make check-nightly` the others.
in_shares = pytest.mark.parametrize(
    "share", [0, *(pytest.param(k, marks=pytest.mark.nightly) for k in range(1, SHARES))]
)


def places(share, stride=1):
    """Yield the numbers of a share's places, which are `stride` apart in the whole."""
    return itertools.count(1 + share * stride, SHARES * stride)


def first_hits(step, stride=1, share=None):
    """Call `step` at every place where a handler can raise, or every `stride`-th; count the hits.

    `step` gets the number of the place, and returns whether there was one. With a share, the count
    is an estimate for all shares.
    """
    numbers = itertools.count(1, stride) if share is None else places(share, stride)
    hits = sum(1 for _ in itertools.takewhile(step, numbers))
    return hits if share is None else hits * SHARES
