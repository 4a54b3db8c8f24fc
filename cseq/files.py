"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["once", "whole"]


def once(path: str, make: Callable[[IO[bytes]], object]) -> str:
    """Have a file made, by one of the processes that ask for it while the others wait.

    Where the folder cannot be locked, each makes it, and the last one's stays. Returns the path.
    """
    with _alone_in(os.path.dirname(path)):
        if not os.path.exists(path):
            with whole(path, "xb") as file:
                make(file)
    return path


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Hold the lock of a folder; a process that is killed gives it back."""
    try:
        import fcntl

        fd = os.open(folder, os.O_RDONLY)
    except (ImportError, PermissionError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole(path: str, mode: str = "xt") -> Iterator[IO[Any]]:
    """Write a file, packed if it ends in .gz, which then is there as a whole or not at all.

    `mode` is 'xt', text, or 'xb'. An OSError names it. What lies where it is written first, a link
    say, is not followed.
    """
    part = f"{path}.{os.getpid()}.part"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)  # of an earlier process with that number, which was killed
        try:
            with _open(part, mode, packed=path.endswith(".gz")) as file:
                yield file
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _open(path: str, mode: str, *, packed: bool) -> Any:
    encoding = "utf-8" if mode == "xt" else None
    if packed:
        return gzip.open(path, mode, compresslevel=4, encoding=encoding)
    return open(path, mode, encoding=encoding)
