"""Signals, messages and exit codes of processes."""

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

# Time limits in seconds: one that is never reached, and one for a killed process to exit.
FOREVER, LAST = 1e6, 1.0

# On Windows, SIGTERM kills a process. `KILLED` is the exit code after `KILL`.
KILL = int(getattr(signal, "SIGKILL", signal.SIGTERM))
KILLED = 0xC5E9 if os.name == "nt" else -KILL

# Terminals and job schedulers send these signals to all processes. Only the trainer handles them.
SHIELDED: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)

Start: TypeAlias = dict[str, Any]
# The trainer's name in multiprocessing, and its process id.
Identity: TypeAlias = tuple[str, int]

# A message to or from a fork server: a kind and a number. Each request carries a socket for the
# replies, and FORK also carries the worker's socket.
MESSAGE = struct.Struct("=cq")
# IMPORT carries the length of the module name that follows. IMPORTED carries the outcome.
IMPORT, IMPORTED = b"i", b"I"
KEPT, FAILED, THREADS, FILES = range(4)
# FORK carries the worker number. The replies are REFUSED with an errno, or BORN with the process id
# and later ENDED with the exit code.
FORK, REFUSED, BORN, ENDED = b"f", b"R", b"B", b"E"


def start_methods() -> tuple[str, ...]:
    """Return the start methods available on this system, best first.

    On macOS, forking may fail after a process has used Apple's libraries.
    """
    if sys.platform == "win32" or not hasattr(os, "fork"):
        return ("spawn",)
    served = ("forkserver",) if hasattr(socket, "send_fds") else ()
    return ("spawn", *served, "fork") if sys.platform == "darwin" else (*served, "spawn", "fork")


def readable(fd: int, seconds: float) -> bool:
    """Wait for data or EOF. Return False after a timeout."""
    if os.name == "nt":
        return bool(select.select([fd], [], [], seconds)[0])
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def answer(sock: socket.socket, kind: bytes, number: int) -> None:
    """Send a reply. Ignore errors, because a later read will notice if the other end is gone."""
    with contextlib.suppress(OSError):
        sock.sendall(MESSAGE.pack(kind, number))


def answered(sock: socket.socket) -> tuple[bytes, int] | None:
    """Receive a reply, which always arrives in one piece. Return None at EOF."""
    with contextlib.suppress(ConnectionError):
        data = sock.recv(MESSAGE.size)
        if data:
            kind, number = MESSAGE.unpack(data)
            return kind, number
    return None


def describe_exit(code: int | None) -> str:
    """Describe an exit code: 'was killed by SIGKILL', 'exited with code 3'."""
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
    """Return the wait status of a zombie, or None.

    A status of 0 may also mean that the real status is unknown.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # While the process has other threads, they may still be writing to memory.
    return int(fields[49]) if fields[0] == b"Z" and int(fields[17]) <= 1 else None


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, or [] if unknown."""
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
    """Return the exit code for an argument of `sys.exit`."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def end_copy(error: BaseException | None) -> NoReturn:
    """Exit a process that user code has forked from a worker."""
    code = 1
    with contextlib.suppress(Exception):
        if isinstance(error, SystemExit):
            code = exit_code_of(error.code)
        else:
            verb = "did not end with os._exit()" if error is None else "raised an exception"
            sys.stderr.write(f"cseq: process {os.getpid()}, forked by an indexer, {verb}\n")
            if error is not None:
                sys.__excepthook__(type(error), error, error.__traceback__)
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush the standard streams, so that forked processes do not repeat output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


_reading = False


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Forbid new launchers during imports in a worker or a server."""
    global _reading
    _reading = True
    try:
        yield
    finally:
        _reading = False


def check_reading() -> None:
    """Raise RuntimeError if an import would start workers recursively."""
    if _reading:
        raise RuntimeError(
            "a module that worker processes import starts worker processes when it is imported; "
            "start them in a function, or under if __name__ == '__main__':"
        )
