"""Atomic text files, and file locks."""

from __future__ import annotations

import contextlib
import gzip
import os
from typing import IO, TYPE_CHECKING

from cseq._memory import lift

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["locked", "whole"]


@contextlib.contextmanager
def whole(path: str) -> Iterator[IO[str]]:
    """Write a text file atomically. If the name ends in .gz, the text is compressed.

    An OSError names `path`, even if the temporary file caused the error.
    """
    part = f"{path}.{os.getpid()}.part"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
        try:
            with _open(part, packed=path.endswith(".gz")) as file:
                yield file
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _open(path: str, *, packed: bool) -> IO[str]:
    if packed:
        return gzip.open(path, "xt", compresslevel=4, encoding="utf-8")
    return open(path, "x", encoding="utf-8")


def locked(path: str, *, shared: bool = False) -> int | None:
    """Lock a file and return its descriptor, or None if it was moved or removed in the meantime."""
    import fcntl

    fd = lift(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
