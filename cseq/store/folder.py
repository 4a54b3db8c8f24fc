"""A folder that processes of a machine share: who has it open, and what it is of."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
from typing import TYPE_CHECKING, Any

from cseq.files import locked, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "LENGTH",
    "address",
    "base",
    "check",
    "close",
    "dial",
    "remove_unused",
    "users_of",
    "write",
]

SHARED = "/dev/shm"
# Bytes of a socket's address.
LONGEST = 100
# Of what a process that fetches gets at first.
LENGTH = struct.Struct("<Q")


def base(nbytes: int) -> str:
    """Return where shared memory has names, or a folder if that is too small."""
    try:
        room = os.statvfs(SHARED)
    except OSError:
        return tempfile.gettempdir()
    is_large = room.f_blocks * room.f_frsize >= nbytes and os.access(SHARED, os.W_OK)
    return SHARED if is_large else tempfile.gettempdir()


def check(folder: str, about: dict[str, Any], argument: str, more: str = "") -> None:
    """Compare what a folder is of, or write it into a new one.

    Raises
    ------
    ValueError
        It is of something else. The message names the argument that gave the folder.
    """
    path = f"{folder}/about"
    try:
        with open(path, encoding="utf-8") as file:
            theirs = json.load(file)
    except FileNotFoundError:
        with whole(path) as file:
            json.dump(about, file)
        return
    for name in about | theirs:
        if theirs.get(name) != about.get(name):
            raise ValueError(
                f"{argument}={folder!r} has samples with {name}={theirs.get(name)!r}, and here it "
                f"is {about.get(name)!r}; give another folder, or remove this one{more}"
            )


def users_of(folder: str) -> int:
    """Open a folder, made if it is not there, so that nobody removes it; return its lock's file."""
    while True:
        os.makedirs(folder, 0o700, exist_ok=True)
        # The folder was removed just now.
        with contextlib.suppress(FileNotFoundError):
            users = locked(f"{folder}/users", shared=True)
            if users is not None:
                return users


def remove_unused(folder: str, users: int | None = None) -> None:
    """Remove a folder if no process has it open; `users`: the file of this process's lock on it."""
    import fcntl

    try:
        lock = os.open(f"{folder}/users", os.O_RDWR | os.O_CLOEXEC) if users is None else users
    # Nobody has got that far, or it is another user's.
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = f"{folder}.{os.getpid()}.gone"
        os.rename(folder, gone)
    # It is open elsewhere.
    except OSError:
        return
    finally:
        if users is None:
            os.close(lock)
    shutil.rmtree(gone, ignore_errors=True)


def close(folder: str, files: Sequence[int], pid: int, *, is_kept: bool) -> None:
    """Close a folder; the last one removes it, unless it is kept.

    A forked process shares the lock on ``users`` with its parent, so it must not change it.
    """
    if os.getpid() == pid:
        if not is_kept:
            remove_unused(folder, files[0])
        for fd in files:
            os.close(fd)


def write(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes. A full disk is an OSError here, where a mapping would have SIGBUS."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def address(folder: str) -> Iterator[str]:
    """Give the address of the socket in a folder, whose path may be too long for one."""
    path = f"{folder}/socket"
    if len(os.fsencode(path)) <= LONGEST or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def dial(folder: str) -> socket.socket | None:
    """Connect to the process that fetches into a folder, or return None if there is none."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        with address(folder) as path:
            sock.connect(path)
    except (FileNotFoundError, ConnectionError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock
