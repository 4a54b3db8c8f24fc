"""A folder that several processes share, and that the last one may remove.

``users``    an empty file on which each process using the folder holds a shared lock
``opening``  an empty file that a process locks while opening the folder
``about``    a description of the contents as JSON
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from cseq.files import locked, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

__all__ = ["Folder", "address", "close", "shared_folder", "users_of", "write"]

SHARED = "/dev/shm"
# Maximum length of a socket's path in bytes.
LONGEST = 100


class Folder:
    """A folder that this process has opened. Each process has only one object per folder.

    Parameters
    ----------
    path : str
    about : dict
        A description of the contents as JSON values.
    is_kept : bool
        If False, the last process that closes the folder removes it.

    Raises
    ------
    ValueError
        If the folder was created with a different description.
    """

    argument = "folder"
    # Text to append to the error message if the descriptions differ.
    remedy = ""
    _here: ClassVar[weakref.WeakValueDictionary[str, Folder]] = weakref.WeakValueDictionary()
    _opening = threading.RLock()

    def __init__(self, path: str, about: dict[str, Any], *, is_kept: bool) -> None:
        self.path = path
        self.files = [users_of(path)]
        weakref.finalize(self, close, path, self.files, os.getpid(), is_kept=is_kept)
        self.reset()
        lock = locked(f"{path}/opening")
        try:
            self.compare(about)
            self.begin()
        finally:
            if lock is not None:
                os.close(lock)

    @classmethod
    def opened(cls, path: str, about: dict[str, Any], *, is_kept: bool) -> Self:
        """Return this process's object for a folder."""
        with Folder._opening:
            folder = Folder._here.get(path)
            if isinstance(folder, cls):
                folder.compare(about)
                return folder
            folder = Folder._here[path] = cls(path, about, is_kept=is_kept)
            return folder

    def reset(self) -> None:
        """Initialize the state, for a new object or after a fork."""
        raise NotImplementedError

    def begin(self) -> None:
        """Open the files. Only one process at a time calls this."""

    def compare(self, about: dict[str, Any]) -> None:
        """Compare `about` with the folder's description, or write it if the folder is new."""
        path = f"{self.path}/about"
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
                    f"{self.argument}={self.path!r} was created with {name}={theirs.get(name)!r}, "
                    f"but {name} is now {about.get(name)!r}; pass a different folder, or delete "
                    f"this one{self.remedy}"
                )


def _reset() -> None:
    Folder._opening = threading.RLock()
    for folder in [*Folder._here.values()]:
        folder.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)


def shared_folder(name: str, about: dict[str, Any], nbytes: int) -> str:
    """Return a path in shared memory or in a temporary folder. Remove unused folders."""
    parent = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        room = os.statvfs(SHARED)
        if room.f_blocks * room.f_frsize >= nbytes and os.access(SHARED, os.W_OK):
            parent = SHARED
    start = f"{parent}/cseq-{name}-{os.getuid()}-"
    for path in glob.glob(f"{start}*"):
        remove_unused(path)
    return start + hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]


def users_of(path: str) -> int:
    """Create a folder if necessary, and lock it. Return the lock's descriptor."""
    while True:
        os.makedirs(path, 0o700, exist_ok=True)
        # Another process may remove the folder before it is locked.
        with contextlib.suppress(FileNotFoundError):
            users = locked(f"{path}/users", shared=True)
            if users is not None:
                return users


def remove_unused(path: str, users: int | None = None) -> None:
    """Remove a folder, unless another process is using it. `users` is this process's lock."""
    import fcntl

    try:
        lock = os.open(f"{path}/users", os.O_RDWR | os.O_CLOEXEC) if users is None else users
    except OSError:
        # The folder is empty, or it belongs to another user.
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = f"{path}.{os.getpid()}.gone"
        os.rename(path, gone)
    except OSError:
        # Another process is using the folder.
        return
    finally:
        if users is None:
            os.close(lock)
    shutil.rmtree(gone, ignore_errors=True)


def close(path: str, files: Sequence[int], pid: int, *, is_kept: bool) -> None:
    """Close a folder. Remove it, unless it is kept or in use.

    A forked process shares the lock on ``users`` with its parent, so it must not release the lock.
    """
    if os.getpid() == pid:
        if not is_kept:
            remove_unused(path, files[0])
        for fd in files:
            os.close(fd)


def write(fd: int, data: bytes, offset: int) -> None:
    """Write all data. If the disk is full, raise OSError, whereas a mapping would cause SIGBUS."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """Yield an address for the folder's socket that works even if the path is too long."""
    if len(os.fsencode(path)) < LONGEST or not os.path.isdir("/proc/self/fd"):
        yield f"{path}/socket"
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)
