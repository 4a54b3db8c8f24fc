"""Ctrl-C at a chosen place: the test's part of a signal handler that raises."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cseq

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

PACKAGE = Path(cseq.__file__).parent


class Interrupting:
    """A context that raises KeyboardInterrupt at one of the places where a signal handler can.

    The interpreter runs signal handlers after a call (of a function in Python: up to Python 3.10),
    at the beginning of a function and where a loop turns back; not, for example, between a lock's
    acquisition and the body of its ``with``.

    Parameters
    ----------
    countdown : int
        The interrupt comes at the so many-th place.
    *files : str
        Of this package: where the places are.
    hold : bool
        Keep the exception, and with its traceback all that the functions held.

    Attributes
    ----------
    hit : bool
        It came. It ends with the context.
    held : BaseException or None
        The exception that is kept.
    """

    PLACES = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN")

    def __init__(self, countdown: int, *files: str, hold: bool = False) -> None:
        self.countdown = countdown
        self.hold = hold
        self.files = tuple(str(PACKAGE / name) for name in files)
        self.before = ""  # the instruction that was done last
        self.hit = False
        self.held: BaseException | None = None

    def __enter__(self) -> Self:
        sys.settrace(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        sys.settrace(None)
        if self.hold:
            self.held = error
        return self.hit and isinstance(error, KeyboardInterrupt)

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, self.before = self.before, dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.countdown -= before.startswith(self.PLACES)
            if self.countdown == 0:
                self.hit = True
                raise KeyboardInterrupt
        return self
