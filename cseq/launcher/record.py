"""What trainer and fork server say to each other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import NamedTuple

# One record each way: what, which child (a serial number), and a value; 'fork' carries a socket.
RECORD = struct.Struct("=cqq")
FORK = b"f"  # to the server; value: the worker's number
SIGNAL = b"s"  # to the server; value: the signal's number
BORN = b"b"  # from the server; value: the process number; carries a pidfd where there are any
FAIL = b"e"  # from the server; value: errno of the fork
EXIT = b"x"  # from the server; value: the exit code


class Record(NamedTuple):
    """A record that was received."""

    what: bytes
    serial: int
    value: int
    fds: list[int]


def receive(sock: socket.socket) -> Record | None:
    """Receive a record; None at end of file."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    fds: list[int] = []
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < RECORD.size:
            more, new, _, _ = socket.recv_fds(sock, RECORD.size - len(data), 1, flags)
            fds += new
            data += more
            if not more:
                break
    for fd in fds:
        keep_from_programs(fd)
    if len(data) < RECORD.size:
        return None
    what, serial, value = RECORD.unpack(data)
    return Record(what, serial, value, fds)


def keep_from_programs(fd: int) -> None:
    """Have a descriptor closed in programs that are executed."""
    os.set_inheritable(fd, False)  # noqa: FBT003
