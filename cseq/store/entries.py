"""A folder of entries. Each entry is written by one process and read by all.

``index``    8-byte words: the header, a row of counters per process, and a word per entry
``data``     the entries, one after another
``claims``   an empty file, whose bytes are locked

A process must hold a lock to write to the index:

==============  ================================================================================
``used``        the number of allocated bytes in ``data``; protected by the lock ROOM
an entry        its position plus 1 if complete, else 0; protected by the claim on the entry
counters        the counters of a process; protected by the lock on its row
==============  ================================================================================

The locks are `fcntl` locks on bytes of ``claims``. The system releases them when a process exits.
``used`` is increased before an entry is written, so a killed process wastes the space of at most
one entry. An entry's word is written last, so every entry is complete or absent. Readers find
the entry through its word (an address dependency, which all CPUs respect).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._memory import lift
from cseq.measure.stats import CACHES
from cseq.store.folder import Folder, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["LINE", "Entries"]

log = logging.getLogger("cseq")

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# The alignment of entries in bytes.
LINE = 64
USED = 0
# Number of words in the header, and number of counter rows.
HEADER, COUNTERS = 8, 512
# Columns of a counter row: samples found, samples stored, and samples created but not stored.
HITS, MADE, REFUSED = range(3)
# The index of the word for the first entry.
FIRST = HEADER + 4 * COUNTERS
# The offsets of the other locks in `claims`.
ROOM, COUNTING = 2**40, 2**41


class Entries(Folder):
    """The entries in a folder.

    `about` must contain ``samples``, the number of entries, and ``limit``, the maximum size of
    ``index`` and ``data`` together in bytes.

    Raises
    ------
    ValueError
        If the folder was created for different entries, or if `limit` is too small for the index.
    OSError
        If there is not enough space for the index.
    """

    remedy = ". With version=, you decide when the cached samples become invalid"

    def __init__(self, path: str, about: dict[str, Any], *, is_kept: bool) -> None:
        self.limit: int = about["limit"]
        self.overhead: int = 8 * (FIRST + about["samples"])
        if self.limit <= self.overhead:
            raise ValueError(
                f"limit={self.limit} is too small: the index of {about['samples']} samples alone "
                f"takes {self.overhead} bytes; pass a larger limit"
            )
        super().__init__(path, about, is_kept=is_kept)

    def reset(self) -> None:
        """Drop all claims and the counter row."""
        self._own = threading.Lock()
        # Entries claimed by this process. `fcntl` locks do not distinguish between threads.
        self._claimed: set[int] = set()
        self._row: int | None = None

    def begin(self) -> None:
        """Open the files. Create them if necessary."""
        for name in ("claims", "index", "data"):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self.files.append(lift(os.open(f"{self.path}/{name}", flags, 0o600)))
        _, self._claims, self._index, self._data = self.files
        # A hole in the file would cause SIGBUS when the disk is full.
        if os.fstat(self._index).st_size < self.overhead:
            write(self._index, bytes(self.overhead), 0)
        if os.fstat(self._data).st_size < self.limit:
            os.ftruncate(self._data, self.limit)
        words: NDArray[np.int64] = np.frombuffer(mmap.mmap(self._index, self.overhead), np.int64)
        self._words, self._starts = words, words[FIRST:]
        self._counters = words[HEADER:FIRST].reshape(-1, 4)
        # The mapping is private, so writes by user code are not shared. No memory is reserved up
        # front, because `limit` may exceed the available memory.
        flags, access = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        data = mmap.mmap(self._data, self.limit, flags=flags, prot=access)
        self._bytes = memoryview(data).toreadonly()
        CACHES.add(self)

    def find(self, number: int) -> memoryview | None:
        """Return a view that starts at the entry, or None if there is no entry."""
        start = int(self._starts[number]) - 1
        if start < 0:
            return None
        self._note(HITS)
        return self._bytes[start:]

    def claim(self, number: int) -> bool:
        """Claim an entry. Return False if it exists or is already claimed."""
        with self._own:
            if number not in self._claimed and self._lock(number, wait=False):
                # The previous owner may already have written the entry.
                if not self._starts[number]:
                    self._claimed.add(number)
                    return True
                self._unlock(number)
        self._note(REFUSED)
        return False

    def release(self, number: int) -> None:
        """Release a claim."""
        with self._own:
            self._unlock(number)
            self._claimed.discard(number)

    def keep(self, number: int, parts: Sequence[Any]) -> None:
        """Write an entry made up of several buffers, if there is space."""
        nbytes = sum(memoryview(part).nbytes for part in parts)
        room = self.limit - self.overhead
        if nbytes > room:
            raise ValueError(
                f"limit={self.limit} is too small: sample {number} takes {nbytes} bytes, and the "
                f"index takes {self.overhead} bytes; pass a larger limit"
            )
        with self._own, self._locked(ROOM):
            start = int(self._words[USED])
            end = start + -(-nbytes // LINE) * LINE
            if end <= room:
                self._set(USED, end)
        try:
            if end <= room:
                write(self._data, b"".join(parts), start)
                self._set(FIRST + number, start + 1)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning(
                "a sample could not be stored in %s: %s. The cache uses %d of at most %d bytes. "
                "The sample will be made again in each epoch; to avoid this, pass a smaller limit "
                "or a different folder",
                self.path, error.strerror, self.nbytes, self.limit,
            )  # fmt: skip
        self._note(MADE if self._starts[number] else REFUSED)

    @property
    def nbytes(self) -> int:
        """The number of bytes in use, including the index."""
        return self.overhead + int(self._words[USED])

    @property
    def kept(self) -> int:
        """The number of complete entries."""
        return int(np.count_nonzero(self._starts))

    def counts(self) -> tuple[int, int, int]:
        """Return how many samples were found, stored, and created but not stored."""
        hits, made, refused, _ = self._counters.sum(axis=0).tolist()
        return hits, made, refused

    def _note(self, column: int) -> None:
        """Increment one of this process's counters, unless all rows are in use."""
        with self._own:
            if self._row is None:
                free = (k for k in range(COUNTERS) if self._lock(COUNTING + k, wait=False))
                self._row = next(free, -1)
            if self._row >= 0:
                self._counters[self._row, column] += 1

    def _set(self, word: int, value: int) -> None:
        """Write a word in one call, so that other processes never see a partial word."""
        write(self._index, value.to_bytes(8, sys.byteorder), 8 * word)

    @contextlib.contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        self._lock(byte, wait=True)
        try:
            yield
        finally:
            self._unlock(byte)

    def _lock(self, byte: int, *, wait: bool) -> bool:
        import fcntl

        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except OSError as error:
            if wait or error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def _unlock(self, byte: int) -> None:
        import fcntl

        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, byte)
