"""An exception, packed in a worker and raised in the training loop.

It arrives as itself: same type, same attributes, with its batch named and with the worker's
traceback as its cause. It is pickled *and unpickled* where it was raised, so an
exception for which this fails is found there; then its type's name and its text are sent, and
raised as a `WorkerError`.
"""

from __future__ import annotations

import opcode
import os
import pickle
import reprlib
import signal
import traceback
from typing import TYPE_CHECKING, Any

from cseq.encoding.pickling import dumps
from cseq.errors import RemoteTraceback, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = [
    "Failure", "annotate", "ends_program", "line_of", "listed", "location_of", "named",
    "of_handler", "ordinary", "pack", "pack_text", "shorten", "show_traceback", "str_of", "unpack",
]  # fmt: skip

RAISE = opcode.opmap["RAISE_VARARGS"]  # the instruction of a `raise` statement

# What ends a loop, a program or a generator, if it is raised there.
ENDINGS = (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit)

# Attributes of every exception, also of one whose class forbids that they are set, or hides them.
NAMES = "args", "__cause__", "__dict__", "__traceback__"
ARGS, CAUSE, DICT, TRACE = (vars(BaseException)[name] for name in NAMES)

# How exceptions make their text of one argument.
PLAIN = (BaseException.__str__, KeyError.__str__, OSError.__str__)

# How the names of files with cseq's code begin: compiled code has none of the folder.
OURS = ("cseq/", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""))

# What sqlite3, fsspec and LMDB say of a thing that was opened in another process or thread.
UNSHARED = (
    "created in a thread can only be used in that same thread",
    "This class is not fork-safe",
    "MDB_READERS_FULL",
    "MDB_BAD_RSLOT",
)
OPEN_THERE = (
    "if the training process has opened it, open it in each worker instead, at its first use"
)

DEBUG = (
    "cseq: a debugger needs the terminal, which worker processes do not have: give num_workers=0, "
    "or start a manager by start_test()"
)

SHOWN = 16  # indices of a batch that a message shows
MOST = 1024  # that one of a death shows


def pack(error: BaseException) -> bytes:
    """Return an exception as bytes that `unpack` can always read."""
    if type(error).__name__ == "BdbQuit":
        annotate(error, DEBUG)
    return pickle.dumps(
        (_travelling(error), type(error).__qualname__, str_of(error), _traceback_of(error))
    )


def pack_text(error: BaseException) -> bytes:
    """Return an exception's type, text and traceback, cut to fit the beginning of any slot."""
    name, message = type(error).__qualname__, str_of(error)[:1500]
    return pickle.dumps((b"", name, message, _traceback_of(error)[-1500:]))


def _traceback_of(error: BaseException) -> str:
    """Return an exception's traceback, without its causes where the exception hinders that.

    It begins with the first frame that is not cseq's, if there is one.
    """
    whole = TRACE.__get__(error)
    trace = _without(whole, OURS) or whole
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException as broken:
        if ends_program(broken):
            raise
        said = traceback.format_tb(trace)
        return "".join(["Traceback (most recent call last):\n", *said, line_of(error), "\n"])


def _without(trace: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    """Leave out the frames at the beginning of a traceback that are of files named so."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(files):
        trace = trace.tb_next
    return trace


def shorten(error: BaseException) -> None:
    """Cut the frames of cseq's that an exception has come out of: of one of its own, the feed's."""
    trace = TRACE.__get__(error)
    TRACE.__set__(error, _without(trace, OURS) or _without(trace, ("cseq/engine/_feed.pyx",)))


def unpack(
    data: bytes, worker: int | None = None, process: str = "worker process"
) -> BaseException:
    """Restore the exception; its ``__cause__`` shows the traceback of where it was raised."""
    pickled, name, message, text = pickle.loads(data)
    error: BaseException
    try:
        error = _load(pickled)
    except BaseException as reason:  # anything may go wrong in the user's class
        if ends_program(reason):
            raise
        why = f"unpickled here: {reason!r}" if pickled else "pickled"
        error = WorkerError(f"{name}: {message} (this exception could not be {why})")
    cause = RemoteTraceback(text)
    cause.worker, cause.process = worker, process
    CAUSE.__set__(error, cause)
    return error


def _travelling(error: BaseException) -> bytes:
    """Pickle an exception that unpickles as its type, and has a text; of others, return nothing."""
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


def _with_args(error: BaseException) -> list[tuple[BaseException, tuple[Any, ...]]]:
    """List an exception and those among its arguments, as in a group, each with its arguments.

    Pickle calls the class with these. A constructor that formats its text would format it twice.
    """
    args: tuple[Any, ...] = ARGS.__get__(error)
    inner = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
    parts = [_with_args(part) for part in inner if isinstance(part, BaseException)]
    return [(error, args), *(pair for part in parts for pair in part)]


def _load(pickled: bytes) -> BaseException:
    """Unpickle an exception, and those among its arguments, with the arguments they had."""
    pairs: list[tuple[BaseException, tuple[Any, ...]]] = pickle.loads(pickled)
    for error, args in pairs:
        ARGS.__set__(error, args)
    return pairs[0][0]


class Failure:
    """The first error of some workers, raised by each call that asks until they are gone.

    The traceback of a raised exception refers to the manager, which has the workers, which have
    this object: a cycle, if the exception were kept. So it is raised once, and then as it would
    arrive from another process.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    def note(self, error: BaseException) -> None:
        """Keep an error, if it is the first one."""
        if self._error is None:
            self._error = ordinary(error)

    def check(self) -> None:
        """Raise the error, if there is one."""
        error = self._error
        if error is None:
            return
        try:
            self._error = unpack(pack(error))
            CAUSE.__set__(self._error, CAUSE.__get__(error))
            raise error
        finally:
            del error  # its traceback refers to this frame: a reference cycle


class _Shown(str):
    """A text that a KeyError shows as it is: the text of that is the `repr` of its argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def show_traceback(error: BaseException) -> BaseException:
    """Return a worker process's exception, with the traceback in its text where torch has it.

    Its argument becomes that text; type and attributes stay. An exception of several arguments, or
    with a text of its own making, stays as it is: the traceback is that of its cause.
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
    """Return an exception's own text, without the worker's traceback, if it has any."""
    try:
        cause = CAUSE.__get__(error)
        if type(cause) is RemoteTraceback and cause.own is not None:
            return cause.own
        return str.__str__(type(error).__str__(error))  # of a subclass of str, too
    except BaseException as broken:
        if ends_program(broken):
            raise
        return f"<str() raised {type(broken).__name__}>"


def line_of(error: BaseException) -> str:
    """Return an exception's type and text, as the last line of a traceback has them."""
    text = str_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def location_of(epoch: int, batch: int, indices: Sequence[int], most: int = SHOWN) -> str:
    """Name a batch in a message."""
    return f"epoch {epoch}, batch {batch}, indices {listed(indices, most)}"


def listed(indices: object, most: int = SHOWN) -> str:
    """Show the indices of a batch; what is no list of them is cut as `reprlib` does."""
    if not isinstance(indices, (list, tuple)):
        return reprlib.repr(indices)
    shown = ", ".join(map(reprlib.repr, indices[:most]))
    more = f", … {len(indices) - most} more" if len(indices) > most else ""
    return f"({shown}{more})" if isinstance(indices, tuple) else f"[{shown}{more}]"


def ordinary(error: BaseException) -> BaseException:
    """Return the error to raise for an exception of the user's code: mostly the exception itself.

    StopIteration would end the loop as if the epoch were over, SystemExit the program as if all
    were well, KeyboardInterrupt as if Ctrl-C had been pressed: these become a RuntimeError.
    """
    if not issubclass(type(error), ENDINGS):
        return error
    ended = RuntimeError(f"the worker raised {line_of(error)}")
    ended.__cause__ = CAUSE.__get__(error) or error
    return ended


def ends_program(error: BaseException) -> bool:
    """Tell whether an exception comes from outside of the code that was called.

    Ctrl-C, which a worker process ignores: no `raise` statement has raised that. And what a signal
    handler raises, such as `sys.exit`.
    """
    cls = type(error)
    if issubclass(cls, KeyboardInterrupt) and not _is_stated(error):
        return True
    return issubclass(cls, (SystemExit, KeyboardInterrupt)) and of_handler(error)


def _is_stated(error: BaseException) -> bool:
    """Tell whether an exception comes from a `raise` statement, and not from a function of C."""
    trace = TRACE.__get__(error)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[max(trace.tb_lasti, 0)] == RAISE


def of_handler(error: BaseException) -> bool:
    """Tell whether a signal handler has raised an exception, which is seen in the traceback."""
    codes = set()
    for handler in filter(callable, map(signal.getsignal, signal.valid_signals())):
        function = getattr(handler, "func", handler)  # of a functools.partial
        codes |= {getattr(each, "__code__", None) for each in (function, type(function).__call__)}
    frames = traceback.walk_tb(TRACE.__get__(error))
    return any(frame.f_code in codes for frame, _ in frames)


def named(error: BaseException, location: str) -> BaseException:
    """Return the exception to raise in the loop for an indexer's, with its batch named."""
    error = ordinary(error)
    text = str_of(error)
    if any(each in text for each in UNSHARED):
        annotate(error, f"cseq: {OPEN_THERE}")
    if hasattr(error, "add_note"):
        _note(error, f"cseq: while making {location}")
    return error


def annotate(error: BaseException, note: str) -> None:
    """Add a remedy to an exception: as a note, before Python 3.11 to its text."""
    if hasattr(error, "add_note"):
        _note(error, note)
        return
    args = ARGS.__get__(error)
    if args and isinstance(args[0], str):
        ARGS.__set__(error, (f"{args[0]}\n{note}", *args[1:]))


def _note(error: BaseException, note: str) -> None:
    """Add a note, also if the exception's class refuses that, as a frozen dataclass does."""
    notes = DICT.__get__(error).setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(note)
