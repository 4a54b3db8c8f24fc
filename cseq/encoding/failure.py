"""Packs exceptions in a worker, to be raised in the training loop.

An exception keeps its type and attributes. A note names the batch, and the cause shows the worker's
traceback. The worker pickles *and unpickles* an exception before sending it. If that fails,
the loop raises a `WorkerError` with the type name and text.
"""

from __future__ import annotations

import opcode
import os
import pickle
import reprlib
import signal
import traceback
from typing import TYPE_CHECKING

from cseq.encoding.pickling import dumps
from cseq.errors import RemoteTraceback, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import GetSetDescriptorType, TracebackType


__all__ = [
    "Failure", "annotate", "ends_program", "line_of", "listed", "location_of", "named",
    "of_handler", "ordinary", "pack", "pack_text", "shorten", "show_traceback", "str_of", "unpack"
]  # fmt: skip

RAISE = opcode.opmap["RAISE_VARARGS"]

# Raised in the loop, these exceptions would end the loop, the program or a generator.
ENDINGS = (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit)

# Descriptors for attributes that an exception class may override.
NAMES = "args", "__cause__", "__dict__", "__traceback__"
OWN: list[GetSetDescriptorType] = [vars(BaseException)[name] for name in NAMES]
ARGS, CAUSE, DICT, TRACE = OWN

# `__str__` methods that turn a single argument into text.
PLAIN = (BaseException.__str__, KeyError.__str__, OSError.__str__)

# Prefixes of cseq's own files. Tracebacks do not show absolute paths for compiled code.
OURS = ("cseq/", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""))

# Errors from sqlite3, fsspec and LMDB about objects opened in another process or thread.
UNSHARED = (
    "created in a thread can only be used in that same thread",
    "This class is not fork-safe",
    "MDB_READERS_FULL",
    "MDB_BAD_RSLOT",
)
OPEN_THERE = (
    "if the training process opened this resource, open it in each worker instead, on first use"
)

DEBUG = (
    "cseq: a debugger needs a terminal, and worker processes do not have one; pass num_workers=0, "
    "or start a manager with start_test()"
)

# Maximum number of indices to list: in most messages, and in messages about dead workers.
SHOWN, MOST = 16, 1024


def pack(error: BaseException) -> bytes:
    """Serialize an exception for `unpack`."""
    if type(error).__name__ == "BdbQuit":
        annotate(error, DEBUG)
    return pickle.dumps(
        (_travelling(error), type(error).__qualname__, str_of(error), _traceback_of(error))
    )


def pack_text(error: BaseException) -> bytes:
    """Serialize the type, text and traceback of an exception. The result fits into any slot."""
    name, message = type(error).__qualname__, str_of(error)[:1500]
    return pickle.dumps((b"", name, message, _traceback_of(error)[-1500:]))


def _traceback_of(error: BaseException) -> str:
    """Format the traceback from the first frame outside cseq on, with causes if possible."""
    whole: TracebackType | None = TRACE.__get__(error)
    trace = _without(whole, OURS) or whole
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException as broken:
        if ends_program(broken):
            raise
        lines = traceback.format_tb(trace)
        return "".join(["Traceback (most recent call last):\n", *lines, line_of(error), "\n"])


def _without(trace: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    """Strip leading frames from files with one of the given prefixes."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(files):
        trace = trace.tb_next
    return trace


def shorten(error: BaseException) -> None:
    """Strip leading cseq frames from a traceback, or only the feed's if all frames are cseq's."""
    trace: TracebackType | None = TRACE.__get__(error)
    TRACE.__set__(error, _without(trace, OURS) or _without(trace, ("cseq/engine/_feed.pyx",)))


def unpack(
    data: bytes, worker: int | None = None, process: str = "worker process"
) -> BaseException:
    """Restore an exception. The ``__cause__`` shows the traceback from the worker."""
    packed: tuple[bytes, str, str, str] = pickle.loads(data)
    pickled, name, message, text = packed
    try:
        error = _load(pickled)
    except BaseException as reason:
        if ends_program(reason):
            raise
        why = f"unpickled here: {reason!r}" if pickled else "pickled"
        error = WorkerError(f"{name}: {message} (this exception could not be {why})")
    cause = RemoteTraceback(text)
    cause.worker, cause.process = worker, process
    CAUSE.__set__(error, cause)
    return error


def _travelling(error: BaseException) -> bytes:
    """Pickle an exception. Return b"" if that would change the type or lose the text."""
    try:
        data = dumps(_with_args(error))
        back = _load(data)
        str(back), vars(back)
        if type(back) is type(error):
            return data
    except BaseException as broken:
        if ends_program(broken):
            raise
    return b""


def _with_args(error: BaseException) -> list[tuple[BaseException, tuple[object, ...]]]:
    """Return (exception, args) for an exception and each one in its args, as in a group.

    Unpickling passes the args to the constructor, which might format the message a second time.
    """
    args: tuple[object, ...] = ARGS.__get__(error)
    inner = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
    parts = [_with_args(part) for part in inner if isinstance(part, BaseException)]
    return [(error, args), *(pair for part in parts for pair in part)]


def _load(pickled: bytes) -> BaseException:
    """Unpickle an exception and restore all arguments."""
    pairs: list[tuple[BaseException, tuple[object, ...]]] = pickle.loads(pickled)
    for error, args in pairs:
        ARGS.__set__(error, args)
    return pairs[0][0]


class Failure:
    """Stores the first error in a group of workers.

    The error's traceback refers to the manager, and thus to this object. To avoid a cycle, only the
    first `check` raises the error itself, and later ones raise copies.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    def note(self, error: BaseException) -> None:
        """Store the first error."""
        if self._error is None:
            self._error = ordinary(error)

    def check(self) -> None:
        """Raise the stored error."""
        error = self._error
        if error is None:
            return
        try:
            self._error = unpack(pack(error))
            CAUSE.__set__(self._error, CAUSE.__get__(error))
            raise error
        # The traceback refers to this frame, so break the cycle.
        finally:
            del error


class _Shown(str):
    """A string whose `repr` is the string itself, because KeyError shows the `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def show_traceback(error: BaseException) -> BaseException:
    """Add the traceback from a worker process to the text of an exception, as torch does.

    Exceptions with several arguments or a custom `__str__` are left unchanged. Their cause shows
    the traceback.
    """
    cause, args = CAUSE.__get__(error), ARGS.__get__(error)
    is_plain = type(error).__str__ in PLAIN and len(args) < 2
    if is_plain and isinstance(cause, RemoteTraceback) and cause.own is None:
        cause.own, trace = str_of(error), cause.args[0]
        beside = "" if cause.own in trace else f"{cause.own}\n"
        text = f"{beside}Caught {type(error).__name__} in {cause.place}.\nOriginal {trace}"
        ARGS.__set__(error, (_Shown(text),))
    return error


def str_of(error: BaseException) -> str:
    """Return the text of an exception without an added traceback."""
    try:
        cause: object = CAUSE.__get__(error)
        if type(cause) is RemoteTraceback and cause.own is not None:
            return cause.own
        return str.__str__(type(error).__str__(error))
    except BaseException as broken:
        if ends_program(broken):
            raise
        return f"<str() raised {type(broken).__name__}>"


def line_of(error: BaseException) -> str:
    """Return the last line of an exception's traceback."""
    text = str_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def location_of(epoch: int, batch: int, indices: Sequence[int], most: int = SHOWN) -> str:
    """Return a description of a batch for messages."""
    return f"epoch {epoch}, batch {batch}, indices {listed(indices, most)}"


def listed(indices: object, most: int = SHOWN) -> str:
    """Format a batch's indices: the first `most` of a list or tuple, otherwise a shortened repr."""
    if not isinstance(indices, (list, tuple)):
        return reprlib.repr(indices)
    shown = ", ".join(map(reprlib.repr, indices[:most]))
    more = f", … {len(indices) - most} more" if len(indices) > most else ""
    return f"({shown}{more})" if isinstance(indices, tuple) else f"[{shown}{more}]"


def ordinary(error: BaseException) -> BaseException:
    """Return the error to raise for an exception in user code.

    An exception that would end the loop or exit the program becomes a RuntimeError.
    """
    if not issubclass(type(error), ENDINGS):
        return error
    ended = RuntimeError(f"the worker raised {line_of(error)}")
    ended.__cause__ = CAUSE.__get__(error) or error
    return ended


def ends_program(error: BaseException) -> bool:
    """Return True if an exception is meant to end the program.

    This applies to Ctrl-C, and to a SystemExit or KeyboardInterrupt from a signal handler.
    """
    cls = type(error)
    if issubclass(cls, KeyboardInterrupt) and not is_stated(error):
        return True
    return issubclass(cls, (SystemExit, KeyboardInterrupt)) and of_handler(error)


def is_stated(error: BaseException) -> bool:
    """Return True if an exception was raised by a `raise` statement."""
    trace: TracebackType | None = TRACE.__get__(error)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[max(trace.tb_lasti, 0)] == RAISE


def of_handler(error: BaseException) -> bool:
    """Return True if an exception was raised in a signal handler."""
    codes = set()
    for handler in filter(callable, map(signal.getsignal, signal.valid_signals())):
        function = getattr(handler, "func", handler)
        codes |= {getattr(call, "__code__", None) for call in (function, type(function).__call__)}
    frames = traceback.walk_tb(TRACE.__get__(error))
    return any(frame.f_code in codes for frame, _ in frames)


def named(error: BaseException, location: str) -> BaseException:
    """Return the exception to raise in the loop for an error in the indexer."""
    error = ordinary(error)
    text = str_of(error)
    if any(message in text for message in UNSHARED):
        annotate(error, f"cseq: {OPEN_THERE}")
    if hasattr(error, "add_note"):
        _note(error, f"cseq: while making {location}")
    return error


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an exception. Before Python 3.11, append it to the message instead."""
    if hasattr(error, "add_note"):
        _note(error, note)
        return
    args: tuple[object, ...] = ARGS.__get__(error)
    if args and isinstance(args[0], str):
        ARGS.__set__(error, (f"{args[0]}\n{note}", *args[1:]))


def _note(error: BaseException, note: str) -> None:
    """Add a note, even if the exception is a frozen dataclass."""
    notes: object = DICT.__get__(error).setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(note)
