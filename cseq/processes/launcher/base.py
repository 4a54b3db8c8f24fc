"""What both sides of a launcher know: signals, exit codes, waiting."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

FOREVER = 1e6  # seconds
LAST = 1.0  # seconds past a deadline in which killed processes must end

KILL = int(getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows they are the same
KILLED = 0xC5E9 if os.name == "nt" else -KILL  # exit code of a process that `KILL` has ended

# Sent to all processes of a terminal or of a job; what to do about them is the trainer's decision.
SHIELDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)

Start: TypeAlias = dict[str, Any]  # what a new interpreter gets first
Identity: TypeAlias = tuple[str, int]  # of the trainer: its name for multiprocessing, its number

# A request to a fork server, and an answer: what it is, and a number. A request carries the socket
# for the answers, which the server alone writes; FORK carries the worker's own, too.
MESSAGE = struct.Struct("=cq")
IMPORT = b"i"  # with the length of a module's name, which follows
IMPORTED = b"I"  # with one of these:
KEPT, FAILED, THREADS, FILES = range(4)
FORK = b"f"  # with the worker's number; the answers are REFUSED, or BORN and later ENDED
REFUSED = b"R"  # with the number of the system's error
BORN = b"B"  # with the worker's process number
ENDED = b"E"  # with its exit code


def start_methods() -> tuple[str, ...]:
    """Name the start methods that this system has, the best first.

    On macOS, a process that has used Apple's libraries (numpy's BLAS does) may not be able to fork:
    'spawn'.
    """
    if sys.platform == "win32" or not hasattr(os, "fork"):
        return ("spawn",)
    served = ("forkserver",) if hasattr(socket, "send_fds") else ()
    return ("spawn", *served, "fork") if sys.platform == "darwin" else (*served, "spawn", "fork")


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor has something to read, end of file included."""
    if os.name == "nt":
        return bool(select.select([fd], [], [], seconds)[0])
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def answer(sock: socket.socket, what: bytes, number: int) -> None:
    """Send an answer; that the other end is gone is noticed by reading."""
    with contextlib.suppress(OSError):
        sock.sendall(MESSAGE.pack(what, number))


def answered(sock: socket.socket) -> tuple[bytes, int] | None:
    """Receive an answer, which comes in one piece; None at end of file."""
    with contextlib.suppress(ConnectionError):
        data = sock.recv(MESSAGE.size)
        if data:
            what, number = MESSAGE.unpack(data)
            return what, number
    return None


def describe_exit(code: int | None) -> str:
    """Say how a process ended, for a message: 'was killed by SIGKILL', 'exited with code 3'."""
    if code is None:
        return "ended (its exit code is not known)"
    if code == KILLED and code > 0:
        return "was killed"
    if code >= 0xF0000000:  # a negative number, which Windows shows without a sign
        return f"exited with code {code - (1 << 32)}"
    if code >= 0xC0000000:
        return f"crashed with NTSTATUS 0x{code:X}"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def zombie_status(pid: int) -> int | None:
    """Return the status, as of `os.wait`, of a process that has ended and was not reaped.

    None: there is no such process, or no /proc that tells. 0 may mean that it is not known.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # Without another thread, which might still be writing to memory.
    return int(fields[49]) if fields[0] == b"Z" and int(fields[17]) <= 1 else None


def descendants(pid: int) -> list[int]:
    """List what a process has started, and what that has, where the system lists it."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),  # a thread that has just ended
                open(f"/proc/{pid}/task/{task}/children", "rb") as file,
            ):
                found += map(int, file.read().split())
    return found + [each for child in found for each in descendants(child)]


def exit_code_of(value: object) -> int:
    """Return the exit code that a value stands for, as `sys.exit` has it."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def end_copy(error: BaseException | None) -> NoReturn:
    """End a process that user code has forked off a worker, and that has come back into the engine.

    It is not a worker: its ring, slots and socket belong to the process that it was forked from.
    `error` is what the user's code has raised there; None: it has returned.
    """
    code = 1
    with contextlib.suppress(Exception):  # there may be no stderr
        if isinstance(error, SystemExit):
            code = exit_code_of(error.code)
        else:
            what = "has returned from it (end it by os._exit)" if error is None else "raises"
            sys.stderr.write(f"cseq: process {os.getpid()}, forked by an indexer, {what}\n")
            if error is not None:
                sys.__excepthook__(type(error), error, error.__traceback__)
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush the standard streams: forked processes would write their buffers again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, broken or closed
            stream.flush()


_reading = False


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """In this context, which imports modules in a worker or a server, launchers are refused."""
    global _reading
    _reading = True
    try:
        yield
    finally:
        _reading = False


def check_reading() -> None:
    """Refuse to start processes within an import in a worker: each would start more."""
    if _reading:
        raise RuntimeError(
            "a module that worker processes import starts worker processes when it is imported; "
            "start them in a function, or below: if __name__ == '__main__':"
        )
