"""Closes sockets in forked processes, which must not keep them open."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

from cseq.memory.descriptors import lifted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_private: weakref.WeakSet[socket.socket] = weakref.WeakSet()
# Held while a new socket is not yet in _private. (Typeshed does not know all methods of RLock.)
_fork_guard: Any = threading.RLock()


def in_forked_children(function: Callable[[], object]) -> None:
    """Call a function in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def close_in_forks(sock: socket.socket) -> None:
    """Make forked processes close their copies of a socket.

    Otherwise, a copy would keep the connection open, and there would be no end of file.
    """
    _private.add(sock)


def _close_private() -> None:
    for sock in list(_private):
        sock.close()
    _private.clear()


# Any user thread may fork, so the guard is acquired before a fork, and released after it, in
# C code. In Python code, a signal handler could raise before the guard is released, and the thread
# that starts workers would wait forever. In a child process, the guard is free.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_fork_guard.acquire,
        after_in_parent=_fork_guard.release,
        after_in_child=_fork_guard._at_fork_reinit,
    )
    in_forked_children(_close_private)


def pair() -> tuple[socket.socket, socket.socket]:
    """Create a pair of connected sockets."""
    with _fork_guard:
        ours, theirs = map(lifted, socket.socketpair())
        for sock in (ours, theirs):
            # These are TCP sockets, on which messages would otherwise wait up to 200 ms for an ACK.
            if os.name == "nt":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            close_in_forks(sock)
        return ours, theirs


@contextlib.contextmanager
def handing_over(sock: socket.socket) -> Iterator[None]:
    """Let a process that is forked in this context keep this socket, but no other private one."""
    with _fork_guard:
        _private.discard(sock)
        yield
