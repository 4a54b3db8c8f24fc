"""Makes Linux look like macOS to every Python process that has this folder on its path.

What Linux alone has is gone from the standard library, `/proc`, `/sys` and `/dev/shm` are not
found, `select` has a kqueue instead of epoll, and `sys.platform` is 'darwin'. The core's part of it
is `tests/c/darwin.h`. `make check-darwin` runs the tests in this way.

It shows what asks for Linux without need. It cannot show what macOS does differently.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import io
import os
import select
import sys
import sysconfig
import types
from typing import Any

GONE = {
    "os posix": """memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fallocate
        posix_fadvise eventfd pipe2 splice copy_file_range O_TMPFILE getrandom getxattr setxattr
        listxattr removexattr MFD_CLOEXEC MFD_ALLOW_SEALING P_PIDFD O_PATH waitid""",
    "socket _socket": "MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED",
    "signal _signal": "SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGCLD",
    "select": "epoll",
}
HIDDEN = ("/proc", "/sys", "/dev/shm")
LOOKING = ("listdir", "stat", "lstat", "open", "readlink", "scandir", "unlink", "access")

# For the kqueue below.
pidfd_open = os.pidfd_open


def hiding(function: Any) -> Any:
    """Make a function of a path not find what macOS does not have."""

    def found(path: Any = ".", *args: Any, **options: Any) -> Any:
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if any(name == hidden or name.startswith(f"{hidden}/") for hidden in HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return function(path, *args, **options)

    return found


READ, WRITE, PROC = -1, -2, -5
ADD, DELETE, ONESHOT, CLEAR, ERROR, EOF = 1, 2, 0x10, 0x20, 0x4000, 0x8000


class Kevent:
    """What is waited for, or has happened."""

    def __init__(
        self, ident: Any, kind: int = READ, flags: int = ADD, fflags: int = 0, data: int = 0
    ) -> None:
        self.ident: int = ident if isinstance(ident, int) else ident.fileno()
        self.filter, self.flags, self.fflags, self.data = kind, flags, fflags, data
        self.fd = self.ident  # what is polled


class Kqueue:
    """Waits as a kqueue does, by poll; a forked process cannot use its copy."""

    def __init__(self) -> None:
        self._fd = os.open(os.devnull, os.O_RDONLY)
        self._events: dict[tuple[int, int], Kevent] = {}
        self._owner = os.getpid()

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._fd

    def close(self) -> None:
        """Close it."""
        for key in list(self._events):
            self._remove(key)
        if self._fd >= 0 and self._owner == os.getpid():
            os.close(self._fd)
        self._fd = -1

    __del__ = close

    def _remove(self, key: tuple[int, int]) -> None:
        event = self._events.pop(key)
        if event.filter == PROC:
            os.close(event.fd)

    def _change(self, event: Kevent) -> int:
        """Add or remove an event; return an errno."""
        key = event.ident, event.filter
        if event.flags & DELETE:
            if key not in self._events:
                return errno.ENOENT
            self._remove(key)
            return 0
        try:
            if event.filter == PROC:
                event.fd = pidfd_open(event.ident)
                if select.select([event.fd], [], [], 0)[0]:
                    os.close(event.fd)
                    return errno.ESRCH
            os.fstat(event.fd)
        except OSError as error:
            return error.errno or errno.EINVAL
        self._events[key] = event
        return 0

    def control(self, changes: Any, most: int, timeout: float | None = None) -> list[Kevent]:
        """Change what is waited for, and wait; an error of a change is an event."""
        if self._fd < 0:
            raise ValueError("I/O operation on closed kqueue object")
        if self._owner != os.getpid():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        found = []
        for event in changes or ():
            if error := self._change(event):
                if len(found) == most:
                    raise OSError(error, os.strerror(error))
                flags = event.flags | ERROR
                found.append(Kevent(event.ident, event.filter, flags, 0, error))
        return found or (self._wait(most, timeout) if most else [])

    def _wait(self, most: int, timeout: float | None) -> list[Kevent]:
        poll = select.poll()
        wanted: dict[int, int] = {}
        for event in self._events.values():
            bit = select.POLLOUT if event.filter == WRITE else select.POLLIN | select.POLLRDHUP
            wanted[event.fd] = wanted.get(event.fd, 0) | bit
        for fd, bits in wanted.items():
            poll.register(fd, bits)
        ready = dict(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))
        found = []
        for key, event in list(self._events.items()):
            bits, ended = ready.get(event.fd, 0), select.POLLHUP | select.POLLRDHUP
            asked = select.POLLOUT if event.filter == WRITE else select.POLLIN
            if bits & select.POLLNVAL:  # closed
                del self._events[key]
            elif bits & (asked | ended | select.POLLERR) and len(found) < most:
                flags = event.flags | (EOF if bits & ended else 0)
                found.append(Kevent(event.ident, event.filter, flags, event.fflags))
                if event.flags & ONESHOT:
                    self._remove(key)
        return found


def change_everything() -> None:
    """Make the changes."""
    for modules, names in GONE.items():
        for module in modules.split():
            for name in names.split():
                vars(importlib.import_module(module)).pop(name, None)
    for name in LOOKING:
        real = getattr(os, name)
        seen = hiding(real)
        setattr(os, name, seen)
        for can in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if real in can:
                can.add(seen)
    builtins.open = io.open = hiding(io.open)
    names = {"ADD": ADD, "DELETE": DELETE, "ONESHOT": ONESHOT, "CLEAR": CLEAR, "EOF": EOF}
    names |= {"ERROR": ERROR, "ENABLE": 4, "DISABLE": 8}
    made: dict[str, Any] = {f"KQ_EV_{name}": value for name, value in names.items()}
    made |= {"KQ_FILTER_READ": READ, "KQ_FILTER_WRITE": WRITE, "KQ_FILTER_PROC": PROC}
    vars(select).update(made, kqueue=Kqueue, kevent=Kevent, KQ_NOTE_EXIT=1 << 31)
    proxies = types.ModuleType("_scproxy")  # which urllib imports there
    vars(proxies).update(_get_proxy_settings=dict, _get_proxies=dict)
    sys.modules["_scproxy"] = proxies
    sysconfig.get_config_vars()  # it looks for them by the platform, once
    sys.platform = "darwin"


change_everything()
