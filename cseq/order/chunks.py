"""Chunks of a data set, decoded once for all workers of a machine: `ChunkCache`.

All worker processes have one anonymous file of memory in common. It begins with a table of slots
(`_orders.ChunkTable`); a slot has the arrays of a chunk::

    table: a word for each slot │ slot 0: the arrays of a chunk, one after the other │ slot 1 │ …

A process *owns* a slot while it writes to it: it has a lock on that byte of the file, which the
system takes back from a process that dies, so the next one that wants the chunk reads it again.
One at a time chooses a slot for its chunk, under a lock on the byte after those of the slots.
A writer waits for no reader: a reader copies rows out of a slot, and copies again if the slot's
word says that another chunk was put there meanwhile. The chunk that was read first makes room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._memory import Block, Descriptor, Mapping
from cseq._orders import EMPTY, LOADING, READY, ChunkTable
from cseq.check import count
from cseq.encoding.codec import map_leaves
from cseq.indexing.context import empty
from cseq.indexing.indexer import is_indexer
from cseq.memory.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cseq._memory import Memory

__all__ = ["ChunkCache"]

SHARED = sys.platform == "linux"  # elsewhere, each process has a cache of its own
PAGE = 4096
MOST_CHUNKS = 2**38 - 1
STRIPES = 64  # chunks that the threads of a process may read at a time
FLOCK = "hhqqi"  # type, whence, start, length, pid


class ChunkCache:
    """An indexer of samples that lie in chunks, which are expensive to read.

    A batch of an epoch in the order `Blocks` has samples of all chunks of a window, and the next
    batch of the same ones. Each chunk is read by one worker and kept for all worker processes of
    the machine (Linux; elsewhere for the threads of a process) until it makes room for another one.
    A worker that dies loses nothing but its own work.

    Parameters
    ----------
    chunks : class, callable or object
        An object with ``chunks[number]`` → the arrays of a chunk: an array, or a tuple, list or
        dict of arrays, whose first axis is the samples. Or a class, or another callable without
        arguments, that makes such an object, once in each process that reads.
    samples : int
        How many there are.
    rows : int
        Samples of a chunk; the last one may have fewer.
    keep : int
        Chunks that are kept, at most: take two windows of `Blocks`, and those that `buffer` batches
        reach beyond that. They take memory as they come.

    Attributes
    ----------
    reads : int
        Chunks that were read so far, by all processes.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or chunk 0, which is read to see what there is, has no such arrays.

    Examples
    --------
    >>> data = np.arange(20).reshape(10, 2)
    >>> class Chunks:
    ...     def __getitem__(self, number):
    ...         return {"rows": data[4 * number : 4 * number + 4]}
    >>> cache = cseq.ChunkCache(Chunks, samples=10, rows=4, keep=2)
    >>> cache[np.array([9, 0, 1])]
    {'rows': array([[18, 19],
           [ 0,  1],
           [ 2,  3]])}
    >>> manager = cseq.MPSequence(cache, order=cseq.Sequential(), batch_size=5, out_type="null")
    """

    def __init__(self, chunks: Any, samples: int, rows: int, keep: int) -> None:
        self._chunks = chunks
        self._samples = count("samples", samples)
        self._rows = count("rows", rows)
        self._keep = count("keep", keep)
        if -(-self._samples // self._rows) > MOST_CHUNKS:
            raise ValueError(
                f"samples={samples} of rows={rows} are too many chunks; give more rows"
            )
        if not is_indexer(chunks) and not callable(chunks):
            raise TypeError(
                f"chunks={chunks!r} can neither be called nor indexed; give a class that makes an "
                "object with __getitem__(number of the chunk)"
            )
        self._identity = int.from_bytes(os.urandom(7), "little") + 1
        self._reset()
        first = self._read_chunk(0, None)
        self._shape = Shape(first, self._rows)
        self._shape.check(first, 0, min(self._rows, self._samples))
        self._create()

    def _create(self) -> None:
        """Make the memory, for this process and those that get a copy from it."""
        self._file = Segment.create(self._nbytes) if SHARED else None
        fd = -1 if self._file is None else self._file.fd
        self._open(fd)
        self._home = os.getpid(), fd

    def _reset(self) -> None:
        """Have nothing that belongs to one process."""
        self._pid = os.getpid()
        self._made: Any = None
        self._mutex = threading.Lock()
        self._claims = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(STRIPES)]
        self._busy: set[int] = set()  # slots that threads of this process own

    @property
    def _nbytes(self) -> int:
        """Bytes of the memory: table and slots."""
        table = -(-(64 + 8 * self._keep) // PAGE) * PAGE
        return table + self._keep * self._shape.nbytes

    def _open(self, fd: int) -> None:
        """Map the memory, and open the file for locks that are this process's own."""
        self._locks: Descriptor | None = None
        memory: Memory = Block(self._nbytes, zero=True) if fd < 0 else Mapping(fd, 0, self._nbytes)
        self._memory = memory
        self._table = ChunkTable(memory, self._keep, self._identity)
        self._begin = self._nbytes - self._keep * self._shape.nbytes
        if fd >= 0:
            self._locks = _opened(f"/proc/self/fd/{fd}")

    def __getstate__(self) -> dict[str, Any]:
        names = "_chunks", "_samples", "_rows", "_keep", "_identity", "_shape", "_home"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        self._file = None
        pid, fd = self._home
        try:
            found = _opened(f"/proc/{pid}/fd/{fd}") if SHARED else None
            self._open(-1 if found is None else _memory_of(found.fd, self._nbytes))
        except (OSError, ValueError, MemoryError):  # on another machine, or its owner is gone
            self._create()

    def __len__(self) -> int:
        """Samples there are."""
        return self._samples

    def __repr__(self) -> str:
        return f"<ChunkCache: {self._samples:,} samples, {self._rows} a chunk, keep={self._keep}>"

    @property
    def reads(self) -> int:
        """Chunks that were read so far, by all processes."""
        return self._table.reads

    def __getitem__(self, indices: NDArray[np.int64]) -> Any:
        """Return the samples of these indices: arrays as those of a chunk."""
        if os.getpid() != self._pid:  # of a fork, which has the locks of its parent
            before = self._locks
            self._reset()
            self._open(-1 if before is None else before.fd)
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self._samples:
            raise IndexError(
                f"indices from {wanted.min()} to {wanted.max()} are not in [0, {self._samples})"
            )
        out = [empty((len(wanted), *shape), dtype) for shape, dtype in self._shape.leaves]
        numbers = wanted // self._rows
        by_chunk = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[by_chunk])) + 1
        for places in np.split(by_chunk, ends) if len(wanted) else ():
            self._copy(int(numbers[places[0]]), wanted[places] % self._rows, places, out)
        return self._shape.rebuild(out)

    def _copy(
        self, chunk: int, rows: NDArray[Any], places: NDArray[Any], out: list[NDArray[Any]]
    ) -> None:
        """Copy rows of a chunk to places of the batch's arrays."""
        while True:
            slot, word, state = self._table.find(chunk)
            if state != READY:
                arrays = self._fill(chunk)
                if arrays is not None:  # there is no slot for it
                    for array, target in zip(arrays, out, strict=True):
                        target[places] = array[rows]
                    return
                continue
            at = self._begin + slot * self._shape.nbytes
            for (offset, nbytes), target in zip(self._shape.parts, out, strict=True):
                if not self._table.gather(slot, word, at + offset, nbytes, rows, places, target):
                    break  # another chunk was put there
            else:
                return

    def _fill(self, chunk: int) -> list[NDArray[Any]] | None:
        """Read a chunk into a slot, or wait for who does; its arrays if no slot is free."""
        with self._stripes[chunk % STRIPES], contextlib.ExitStack() as owned:
            slot, _, state = self._table.find(chunk)
            if state == LOADING:  # by another process, or by one that has died
                if not owned.enter_context(self._owned(slot, wait=True)):
                    return None  # a thread of this process is about to use it for another chunk
            elif state == EMPTY:
                slot = self._claim(chunk, owned)
            if slot == self._keep:
                return self._shape.arrays(self._read_chunk(chunk, self._shape))
            if self._table.find(chunk)[::2] == (slot, LOADING):
                self._load(slot, chunk)
            return None

    def _claim(self, chunk: int, owned: contextlib.ExitStack) -> int:
        """Own a slot that is LOADING a chunk; -1: another one was first; `keep`: none is free."""
        # One claims at a time, of all threads and processes: no chunk has two slots.
        with self._claims, self._owned(self._keep, wait=True):
            if self._table.find(chunk)[0] >= 0:
                return -1
            for _ in range(2 * self._keep):
                slot = self._table.victim()
                if owned.enter_context(self._owned(slot, wait=False)):
                    self._table.set(slot, chunk, LOADING)
                    return slot
            return self._keep

    def _load(self, slot: int, chunk: int) -> None:
        """Read a chunk into a slot that is owned."""
        try:
            arrays = self._shape.arrays(self._read_chunk(chunk, self._shape))
            at = self._begin + slot * self._shape.nbytes
            for (offset, _), array in zip(self._shape.parts, arrays, strict=True):
                self._memory.view(at + offset, array.dtype, array.shape)[...] = array
        except BaseException:
            self._table.set(slot, chunk, EMPTY)
            raise
        self._table.set(slot, chunk, READY)

    def _read_chunk(self, chunk: int, shape: Shape | None) -> Any:
        """Have the user's code read a chunk."""
        if self._made is None:
            with self._mutex:
                if self._made is None:
                    self._made = self._chunks if is_indexer(self._chunks) else self._chunks()
        value = self._made[chunk]
        if shape is not None:
            shape.check(value, chunk, min(self._rows, self._samples - chunk * self._rows))
        return value

    @contextlib.contextmanager
    def _owned(self, slot: int, *, wait: bool) -> Iterator[bool]:
        """Own a slot, if no other thread and no other process does; `wait` for another process."""
        with self._mutex:
            is_free = slot not in self._busy
            if is_free:
                self._busy.add(slot)
        if not is_free:
            yield False
            return
        try:
            is_locked = self._lock(slot, "F_WRLCK", wait=wait)
            try:
                yield is_locked
            finally:
                if is_locked:
                    self._lock(slot, "F_UNLCK", wait=False)
        finally:
            with self._mutex:
                self._busy.discard(slot)

    def _lock(self, slot: int, kind: str, *, wait: bool) -> bool:
        """Set or end this process's lock on a slot's byte of the file."""
        if self._locks is None:
            return True
        import fcntl

        how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        lock = struct.pack(FLOCK, getattr(fcntl, kind), 0, slot, 1, 0)
        try:
            fcntl.fcntl(self._locks.fd, how, lock)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES) and not wait:
                return False
            raise
        return True


def _memory_of(fd: int, nbytes: int) -> int:
    """Return a descriptor of a cache's memory; OSError: it is of another file."""
    found = os.fstat(fd)
    if found.st_nlink or found.st_size < nbytes:
        raise OSError(errno.ESTALE, "no memory of a cache")
    return fd


def _opened(path: str) -> Descriptor:
    """Open a file; its locks are not shared with other descriptors of it."""
    return Descriptor(os.open, path, os.O_RDWR | os.O_CLOEXEC)


class Shape:
    """How a chunk is built, and where its arrays lie in a slot.

    Attributes
    ----------
    leaves : list of (shape of a row, dtype)
    parts : list of (offset in the slot, bytes of a row)
    nbytes : int
        Of a slot.
    """

    def __init__(self, first: Any, rows: int) -> None:
        self.tree = map_leaves(_checked, first)  # None for each array
        arrays = self.arrays(first)
        if not arrays:
            raise ValueError(f"chunk 0 is {first!r}, which has no arrays")
        self.leaves = [(array.shape[1:], array.dtype) for array in arrays]
        self.parts: list[tuple[int, int]] = []
        self.nbytes = 0
        for shape, dtype in self.leaves:
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            self.parts.append((self.nbytes, nbytes))
            self.nbytes += -(-rows * nbytes // 64) * 64
        self.nbytes = -(-self.nbytes // PAGE) * PAGE

    def arrays(self, value: Any) -> list[NDArray[Any]]:
        """Return the arrays of a chunk."""
        found: list[NDArray[Any]] = []
        map_leaves(lambda leaf: found.append(np.asarray(leaf)), value)
        return found

    def check(self, value: Any, chunk: int, rows: int) -> None:
        """Raise ValueError for a chunk that is not as the first one."""
        tree = repr(map_leaves(lambda _: None, value))  # `==` is blind to the order of a dict
        if tree != repr(self.tree):
            raise ValueError(f"chunk {chunk} is built as {tree}, not as {self.tree!r} of chunk 0")
        arrays = self.arrays(value)
        got = [(array.shape, array.dtype) for array in arrays]
        wanted = [((rows, *shape), dtype) for shape, dtype in self.leaves]
        if got != wanted:
            raise ValueError(f"chunk {chunk} has arrays {got}, not {wanted} as chunk 0 has")

    def rebuild(self, arrays: list[NDArray[Any]]) -> Any:
        """Return arrays in the structure of a chunk."""
        left = iter(arrays)
        return map_leaves(lambda _: next(left), self.tree)


def _checked(leaf: Any) -> None:
    """Raise TypeError for what cannot lie in a chunk."""
    array = np.asarray(leaf)
    if array.dtype.hasobject or not array.ndim:
        raise TypeError(
            f"chunk 0 has {leaf!r}, which is no array of samples; give arrays of numbers or of "
            "texts of one length"
        )
