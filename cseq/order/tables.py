"""Tables that one process writes to a file and all processes map."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cseq.files import locked
from cseq.order._readers import digest
from cseq.order.base import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import DTypeLike, NDArray

    Tables: TypeAlias = dict[str, NDArray[Any]]
    New: TypeAlias = Callable[[str, int, DTypeLike], NDArray[Any]]

MAGIC = b"cseqtab1"
# All systems can map files at multiples of this offset.
ALIGNED = 2**16
# Number of 8-byte words per partial sum in a file's digest.
SUMMED = 2**17


def tables(
    folder: str | None, name: str, make: Callable[[New], None], epoch: int | None = None
) -> Tables:
    """Return the named arrays from a file, which is created if necessary.

    ``make(new)`` fills the arrays that ``new(key, length, dtype)`` returns. One process does this
    while others wait. A file that is damaged or records a different name is replaced.

    `name` must encode everything that determines the arrays. Without a folder, or on Windows, each
    process has its own arrays. Files for epochs before ``epoch - 1`` are removed.
    """
    if folder is None or os.name == "nt":
        made: Tables = {}
        make(lambda key, length, dtype: made.setdefault(key, np.empty(length, dtype)))
        return made
    os.makedirs(folder, exist_ok=True)
    if epoch is not None:
        _forget(folder, f"{name}-", epoch - 1)
        name = f"{name}-{epoch}"
    path = os.path.join(folder, name)
    arrays = _load(path, name)
    while arrays is None:
        with _claimed(f"{path}.part") as fd:
            # Another process may have created the file in the meantime.
            arrays = _load(path, name)
            if fd is None:
                continue
            if arrays is not None:
                # The other process renamed its file before `_claimed` created this empty one.
                os.remove(f"{path}.part")
                continue
            try:
                _write(fd, name, make)
                os.rename(f"{path}.part", path)
            except BaseException:
                os.remove(f"{path}.part")
                raise
            arrays = _load(path, name)
            if arrays is None:
                raise OSError(
                    f"{path} is damaged although it was just written; pass another folder as cache"
                )
    return arrays


def cache_of(cache: str | os.PathLike[str] | None) -> str | None:
    """Return the `cache` argument of an order as an absolute path or None."""
    if cache is not None and not isinstance(cache, (str, os.PathLike)):
        raise TypeError(f"cache={cache!r} is not a path; pass a local folder, or None")
    return None if cache is None else os.path.abspath(cache)


def lengths_in(folder: str | None, lengths: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Return the lengths, mapped from a file if `folder` is set, and their digest."""
    total = digest(lengths)

    def make(new: New) -> None:
        new("lengths", len(lengths), lengths.dtype)[:] = lengths

    if folder is None or Mapped.of(lengths) is not None:
        return lengths, total
    return tables(folder, f"lengths-{total:016x}", make)["lengths"], total


def mapped(path: str, dtype: DTypeLike, offset: int = 0, count: int | None = None) -> NDArray[Any]:
    """Map part of a file as a plain array, because slicing a `numpy.memmap` is slow."""
    kind = np.dtype(dtype)
    number = (os.path.getsize(path) - offset) // kind.itemsize if count is None else count
    if not number:
        return np.empty(0, kind)
    return np.asarray(np.memmap(path, kind, "r", offset, (number,)))


class Mapped(NamedTuple):
    """The location of an array in its file. The fields are arguments of `mapped`."""

    path: str
    dtype: str
    offset: int
    length: int

    @classmethod
    def of(cls, array: NDArray[Any]) -> Mapped | None:
        """Return the location of an array, or None if it is not in a read-only memory map."""
        whole: Any = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if not (isinstance(whole, np.memmap) and whole.mode == "r" and array.flags.c_contiguous):
            return None
        if whole.filename is None:
            return None
        offset = whole.offset + array.ctypes.data - whole.ctypes.data
        return cls(os.fspath(whole.filename), array.dtype.str, offset, len(array))


class CachedOrder(Order):
    """An order that is computed from lengths and can store tables in a folder.

    With a folder, a pickle refers to the file that holds the lengths instead of copying them.
    """

    _folder: str | None = None
    _made_with: tuple[NDArray[Any], dict[str, Any]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = None if self._folder is None else Mapped.of(self._made_with[0])
        if place is None:
            return super().__reduce_ex__(protocol)
        return again, (type(self), place, self._made_with[1], self.facts())


def again(
    kind: Callable[..., CachedOrder], lengths: Mapped, options: dict[str, Any], facts: Any
) -> CachedOrder:
    """Recreate an order from its pickle."""
    order = kind(mapped(*lengths), **options)
    if order.facts() != facts:
        raise ValueError(
            f"the document lengths in {lengths.path} have changed since the order was pickled; do "
            "not change the file while a run uses it"
        )
    return order


def _forget(folder: str, start: str, before: int) -> None:
    """Remove files whose names are `start` followed by a number below `before`."""
    for name in os.listdir(folder):
        number = name[len(start) :]
        if name.startswith(start) and number.isdecimal() and int(number) < before:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))


@contextlib.contextmanager
def _claimed(path: str) -> Iterator[int | None]:
    """Lock a file. Yield its descriptor, or None if another process renamed the file."""
    try:
        fd = locked(path)
    except OSError as error:
        said = f"{error.strerror}: cache= needs file locks (flock); pass a folder on a local disk"
        raise OSError(error.errno, said, path) from None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _write(fd: int, name: str, make: Callable[[New], None]) -> None:
    os.ftruncate(fd, 0)
    parts: dict[str, tuple[str, int, int]] = {}
    end = 0

    def new(key: str, length: int, dtype: DTypeLike) -> NDArray[Any]:
        nonlocal end
        kind, start = np.dtype(dtype), end
        size = max(1, length * kind.itemsize)
        parts[key], end = (kind.str, length, start), start + -(-size // ALIGNED) * ALIGNED
        if hasattr(os, "posix_fallocate"):
            # On a full disk, writing to the map would kill the process, so allocate up front.
            os.posix_fallocate(fd, start, end - start)
        else:
            os.ftruncate(fd, end)
        return np.frombuffer(mmap.mmap(fd, end - start, offset=start), kind, length)

    make(new)
    text = json.dumps({"name": name, "parts": parts}).encode()
    with mmap.mmap(fd, end, access=mmap.ACCESS_READ) as body:
        sums = _sums(body, end, text)
    os.lseek(fd, end, os.SEEK_SET)
    tail = text + np.array([len(text), sums], "<u8").tobytes() + MAGIC
    if os.write(fd, tail) < len(tail):
        raise OSError(f"{name} could not be written because the disk is full")


def _sums(file: mmap.mmap | NDArray[np.uint8], end: int, text: bytes) -> int:
    """Return a digest of the first `end` bytes and the text after them."""
    words = np.frombuffer(file, np.uint64, end // 8)
    sums = np.add.reduceat(words, np.arange(0, len(words), SUMMED))
    return digest(np.append(sums.view(np.int64), np.frombuffer(text, np.uint8).astype(np.int64)))


def _load(path: str, name: str) -> Tables | None:
    """Map the arrays in a file. Return None if it is missing, damaged or records another name."""
    try:
        file = mapped(path, np.uint8)
    except FileNotFoundError:
        return None
    if len(file) < 24 or file[-8:].tobytes() != MAGIC:
        return None
    length, sums = np.frombuffer(file, "<u8", 2, len(file) - 24).tolist()
    end = len(file) - 24 - length
    if end < ALIGNED or end % ALIGNED:
        return None
    text = file[end : end + length].tobytes()
    if _sums(file, end, text) != sums:
        return None
    said = json.loads(text)
    if said["name"] != name:
        return None
    return {
        key: file[start : start + count * np.dtype(kind).itemsize].view(kind)
        for key, (kind, count, start) in said["parts"].items()
    }
