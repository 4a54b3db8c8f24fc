"""Code shared by both sides of a launcher: signals, messages, exit codes, waiting."""

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

# In seconds: a timeout that means no limit, and the time allowed for killed processes to exit.
FOREVER, LAST = 1e6, 1.0

# Windows has no SIGKILL, but its SIGTERM kills. `KILLED` is the exit code after `KILL`.
KILL = int(getattr(signal, "SIGKILL", signal.SIGTERM))
KILLED = 0xC5E9 if os.name == "nt" else -KILL

# Terminals and job schedulers send these signals to all processes. Only the trainer responds.
SHIELDED: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)

Start: TypeAlias = dict[str, Any]
# The trainer's multiprocessing name and process id.
Identity: TypeAlias = tuple[str, int]

# A message to or from a fork server, consisting of a kind and a number. A request also carries the
# reply socket, which only the server writes to. FORK also carries the worker's own socket.
MESSAGE = struct.Struct("=cq")
# IMPORT contains the length of the module name that follows. IMPORTED contains an outcome.
IMPORT, IMPORTED = b"i", b"I"
KEPT, FAILED, THREADS, FILES = range(4)
# FORK contains the worker number. The replies are REFUSED with a system error number, or BORN with
# the process id and later ENDED with the exit code.
FORK, REFUSED, BORN, ENDED = b"f", b"R", b"B", b"E"


def start_methods() -> tuple[str, ...]:
    """Return this system's start methods in order of preference.

    On macOS, 'spawn' is preferred, because a process that has used Apple's libraries (as numpy's
    BLAS does) may be unable to fork.
    """
    if sys.platform == "win32" or not hasattr(os, "fork"):
        return ("spawn",)
    served = ("forkserver",) if hasattr(socket, "send_fds") else ()
    return ("spawn", *served, "fork") if sys.platform == "darwin" else (*served, "spawn", "fork")


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor has data or is at end of file. Return False on timeout."""
    if os.name == "nt":
        return bool(select.select([fd], [], [], seconds)[0])
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def answer(sock: socket.socket, kind: bytes, number: int) -> None:
    """Send a reply. Errors are ignored, because a reader detects that the other end is gone."""
    with contextlib.suppress(OSError):
        sock.sendall(MESSAGE.pack(kind, number))


def answered(sock: socket.socket) -> tuple[bytes, int] | None:
    """Receive a reply, which arrives in one piece. Return None at end of file."""
    with contextlib.suppress(ConnectionError):
        data = sock.recv(MESSAGE.size)
        if data:
            kind, number = MESSAGE.unpack(data)
            return kind, number
    return None


def describe_exit(code: int | None) -> str:
    """Describe an exit code in words, such as 'was killed by SIGKILL' or 'exited with code 3'."""
    if code is None:
        return "ended (its exit code is unknown)"
    if code == KILLED and code > 0:
        return "was killed"
    if code >= 0xF0000000:
        return f"exited with code {code - (1 << 32)}"
    if code >= 0xC0000000:
        return f"crashed with NTSTATUS 0x{code:X}"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def zombie_status(pid: int) -> int | None:
    """Return the wait status of a zombie, or None if `pid` is not a zombie or /proc is missing.

    A status of 0 may mean that the real status is unknown.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # If the process has other threads left, they might still be writing to memory.
    return int(fields[49]) if fields[0] == b"Z" and int(fields[17]) <= 1 else None


def descendants(pid: int) -> list[int]:
    """Return a process's descendants, or an empty list if the system does not list them."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{task}/children", "rb") as file,
            ):
                children += map(int, file.read().split())
    return children + [grandchild for child in children for grandchild in descendants(child)]


def exit_code_of(value: object) -> int:
    """Return the exit code for an argument to `sys.exit`."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def end_copy(error: BaseException | None) -> NoReturn:
    """Exit a process that user code forked from a worker and that returned into the engine.

    This process is not a worker, since the ring, slots and socket belong to its parent. `error` is
    the exception raised by user code, or None if user code returned.
    """
    code = 1
    with contextlib.suppress(Exception):
        if isinstance(error, SystemExit):
            code = exit_code_of(error.code)
        else:
            verb = "returned from it (end it by os._exit)" if error is None else "raised"
            sys.stderr.write(f"cseq: process {os.getpid()}, forked by an indexer, {verb}\n")
            if error is not None:
                sys.__excepthook__(type(error), error, error.__traceback__)
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush the standard streams so that forked processes do not repeat buffered output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


_reading = False


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Forbid new launchers in this context, in which a worker or server imports modules."""
    global _reading
    _reading = True
    try:
        yield
    finally:
        _reading = False


def check_reading() -> None:
    """Raise RuntimeError during an import in a worker, which would start workers recursively."""
    if _reading:
        raise RuntimeError(
            "a module that worker processes import starts worker processes when it is imported: "
            "start them in a function, or below: if __name__ == '__main__':"
        )
