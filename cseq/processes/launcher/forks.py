"""Closes sockets in forked processes."""

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
# Held until a new socket is in `_private`. `Any`, because typeshed's RLock lacks methods.
_fork_guard: Any = threading.RLock()


def in_forked_children(function: Callable[[], object]) -> None:
    """Register a function that is called in every process forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def close_in_forks(sock: socket.socket) -> None:
    """Close a socket in forked processes, because a copy would keep the peer from seeing EOF."""
    _private.add(sock)


def _close_private() -> None:
    for sock in list(_private):
        sock.close()
    _private.clear()


# The guard is held during a fork. It is acquired and released in C, because in Python a signal
# handler could raise an exception before the release. In a child process, the guard is reset.
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
            # Disable Nagle's algorithm, which would hold back messages for up to 200 ms.
            if os.name == "nt":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            close_in_forks(sock)
        return ours, theirs


@contextlib.contextmanager
def handing_over(sock: socket.socket) -> Iterator[None]:
    """Let processes forked in this context keep this socket, but close the other private ones."""
    with _fork_guard:
        _private.discard(sock)
        yield
