"""Forking, and the sockets that forked processes must not keep."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_private: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_fork_guard = threading.RLock()  # held while a socket exists that is not in _private yet


def in_forked_children(function: Callable[[], object]) -> None:
    """Call a function in every process that is forked off this one, where there is a fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def close_in_forks(sock: socket.socket) -> None:
    """Make processes that are forked off this one close their copy of a socket.

    Otherwise they keep the connection open, and its other end never sees end of file.
    """
    _private.add(sock)


def _after_fork_in_child() -> None:
    """Close the sockets, and forget the guard: the thread that held it does not exist here."""
    global _fork_guard
    _fork_guard = threading.RLock()
    for sock in list(_private):
        sock.close()
    _private.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _fork_guard.acquire(),  # noqa: PLW0108 - a child has another guard
        after_in_parent=lambda: _fork_guard.release(),  # noqa: PLW0108
        after_in_child=_after_fork_in_child,
    )


def pair() -> tuple[socket.socket, socket.socket]:
    """Connect two sockets, neither of them in the place of a standard stream."""
    with _fork_guard, contextlib.ExitStack() as low:
        while True:
            ours, theirs = socket.socketpair()
            close_in_forks(ours)
            close_in_forks(theirs)
            if os.name == "nt" or min(ours.fileno(), theirs.fileno()) > 2:
                return ours, theirs
            low.enter_context(ours)
            low.enter_context(theirs)


@contextlib.contextmanager
def handing_over(sock: socket.socket) -> Iterator[None]:
    """Make a process that is forked meanwhile keep this socket, and no other."""
    with _fork_guard:
        _private.discard(sock)
        yield


def fork() -> int:
    """Fork; that the process may have threads is known."""
    if sys.version_info < (3, 12):  # no warning about that
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
