"""Waiting for descriptors, sockets and processes to end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import Any, cast

from cseq._memory import Descriptor


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor has something to read, end of file included."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def hung_up(sock: socket.socket) -> bool:
    """Whether a socket's other end is closed (unread data notwithstanding)."""
    if sock.fileno() < 0:
        return True
    if hasattr(select, "kqueue"):  # macOS, where poll reports no end of file beside unread data
        return _ended_kqueue(sock)
    if not hasattr(select, "poll"):  # Windows
        try:
            return bool(select.select([sock], [], [], 0)[0]) and not sock.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True
    poll = select.poll()
    poll.register(sock, 0)  # POLLHUP is always reported
    return bool(poll.poll(0))


def _ended_kqueue(sock: socket.socket) -> bool:
    """Whether a socket's other end is closed, as BSD and macOS tell it."""
    kqueue = cast("Any", select)
    with contextlib.closing(kqueue.kqueue()) as queue:
        flags = kqueue.KQ_EV_ADD | kqueue.KQ_EV_CLEAR
        event = kqueue.kevent(sock.fileno(), kqueue.KQ_FILTER_READ, flags)
        return any(found.flags & kqueue.KQ_EV_EOF for found in queue.control([event], 1, 0))


class PidFd:
    """A descriptor of a process: readable when that has ended; unlike an id, never reused.

    `Descriptor` closes it, in C: a `__del__` in Python would be lost if a signal handler raised at
    its beginning, and the handler's exception with it.
    """

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, pid: int) -> PidFd | None:
        """Open one, where the system has them."""
        with contextlib.suppress(AttributeError, OSError):
            return cls(Descriptor(os.pidfd_open, pid))
        return None

    def ended(self, seconds: float) -> bool:
        """Wait for the process to end, and say whether it has."""
        return readable(self._descriptor.fd, seconds)

    def reap(self) -> int | None:
        """Reap the process, and return its exit code, if it is a child of this one and has ended.

        A subreaper, or the first process of a container, adopts those whose parents have ended.
        """
        with contextlib.suppress(AttributeError, OSError):
            ended = os.waitid(os.P_PIDFD, self._descriptor.fd, os.WEXITED | os.WNOHANG)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return None

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor.fd, number)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor.fd
