"""The records that trainer and fork server exchange."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, NamedTuple

from cseq.memory import descriptors

if TYPE_CHECKING:
    import socket

# One record each way: what, which child (a serial number), and a value; 'fork' carries a socket.
RECORD = struct.Struct("=cqq")
IMPORT = b"i"  # to the server; value: the length of a module's name, which follows
FORK = b"f"  # to the server; value: the worker's number
SIGNAL = b"s"  # to the server; value: the signal's number
BORN = b"b"  # from the server; value: the process number; carries a pidfd where there are any
FAIL = b"e"  # from the server; value: errno of the fork
EXIT = b"x"  # from the server; value: the exit code
DONE = b"d"  # from the server; value: the outcome of an import, one of these:
KEPT, FAILED, THREADS, FILES, CUDA = range(5)
REASONS = {
    THREADS: "it starts threads, which forked processes would not have",
    FILES: "it opens files or sockets, which forked processes would share",
    CUDA: "it initialises CUDA, which does not survive a fork",
}


class Record(NamedTuple):
    """A record that was received."""

    what: bytes
    serial: int
    value: int
    fds: list[int]


def receive(sock: socket.socket) -> Record | None:
    """Receive a record; None at end of file."""
    fds: list[int] = []
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < RECORD.size:
            more, new = descriptors.receive(sock, RECORD.size - len(data), 1)
            fds += new
            data += more
            if not more:
                break
    if len(data) < RECORD.size:
        return None
    what, serial, value = RECORD.unpack(data)
    return Record(what, serial, value, fds)
