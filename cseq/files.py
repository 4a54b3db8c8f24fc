"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["whole"]


@contextlib.contextmanager
def whole(path: str) -> Iterator[IO[str]]:
    """Write a file of text, packed if it ends in .gz, which then is there as a whole or not at all.

    An OSError names it. What lies where it is written first, a link say, is not followed.
    """
    part = f"{path}.{os.getpid()}.part"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)  # of an earlier process with that number, which was killed
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
