"""A folder of entries: each is written by one process, and read by all.

``users``    nothing; who has the folder open holds a shared lock on it
``about``    what the entries are of, as JSON
``index``    words of 8 bytes: the header, a row of counters for each process, a row for each entry
``data``     the entries, one after another

A word is written by one party at a time, the holder of the lock that is named here:

==============  ================================================================================
``used``        the holder of ROOM: bytes of ``data`` that are given away
an entry's row  its claim: where its room begins (plus 1), the size of that, and where the entry
                begins once it is whole (plus 1)
counters        the process that holds their row
==============  ================================================================================

Locks are `fcntl`'s, of single bytes of ``claims``: the system frees those of a process that ends.
A kill between any two writes leaves each entry whole or absent. ``used`` grows before an entry's
room is noted, so no room is given away twice: at worst, the room of one entry is lost. ``ready`` is
written last. A reader gets the position of an entry from ``ready`` alone, so it cannot read the
entry's bytes earlier than that word (an address dependency, which every processor keeps).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._memory import lift
from cseq.measure.stats import CACHES
from cseq.store import folder as folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["HEAD", "LINE", "Entries", "opened"]

log = logging.getLogger("cseq")

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
LINE = 64  # an entry begins at a multiple of it
HEAD = 8  # bytes of an entry that say how many follow
USED = 0  # the header's words
HEADER, COUNTERS = 8, 512  # words of the header; rows of counters
HITS, MADE, REFUSED = range(3)  # a row of counters: found, made and kept, made and not kept
FIRST = HEADER + 4 * COUNTERS  # the word where the first entry's row is
ROOM_AT, ROOM_SIZE, READY = range(3)  # an entry's row, of 4 words
# Bytes of `claims` that are locked, behind those of the entries.
ROOM, OPENING, COUNTING = 2**40, 2**40 + 1, 2**41
VERSION = ". With version= you say yourself when samples change"


class Entries:
    """The entries of one folder in this process.

    Parameters
    ----------
    folder : str
    about : dict
        What the entries are of, as JSON values. A folder with other entries is refused. It has
        ``samples``, the number of entries, and ``limit``, the most bytes that ``index`` and
        ``data`` take together.
    is_kept : bool
        False: the last process that has the folder open removes it.

    Raises
    ------
    ValueError
        The folder's entries are of something else.
    OSError
        There is no room for the index.
    """

    def __init__(self, folder: str, about: dict[str, Any], *, is_kept: bool) -> None:
        count: int = about["samples"]
        limit: int = about["limit"]
        self.folder, self.limit = folder, limit
        self.overhead = 8 * (FIRST + 4 * count)
        if limit <= self.overhead:
            raise ValueError(
                f"limit={limit} is too small: the index of {count} samples takes {self.overhead} "
                "bytes; give room for it and the samples"
            )
        self._own = threading.Lock()  # of what follows
        self._claimed: set[int] = set()  # by threads of this process, which `fcntl` does not part
        self._row: int | None = None  # of the counters; None: none was asked for
        files = [folders.users_of(folder)]
        try:
            files += [_open(folder, name) for name in ("claims", "index", "data")]
            _, self._claims, self._index, self._data = files
            with self._locked(OPENING):
                folders.check(folder, about, "folder", VERSION)
                if os.fstat(self._index).st_size < self.overhead:
                    folders.write(
                        self._index, bytes(self.overhead), 0
                    )  # a hole is SIGBUS on a full disk
                if os.fstat(self._data).st_size < limit:
                    os.ftruncate(self._data, limit)
            self._map()
        except BaseException:
            folders.close(folder, files, os.getpid(), is_kept=is_kept)
            raise
        weakref.finalize(self, folders.close, folder, files, os.getpid(), is_kept=is_kept)
        CACHES.add(self)

    def _map(self) -> None:
        words = mmap.mmap(self._index, self.overhead)
        self._words: NDArray[np.int64] = np.frombuffer(words, np.int64)
        self._rows = self._words[FIRST:].reshape(-1, 4)
        self._counters = self._words[HEADER:FIRST].reshape(-1, 4)
        # Private: what a user's code writes into a view changes no entry. Not reserved: `limit` may
        # exceed the machine's memory, and hardly any page is ever written.
        flags, access = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        self._bytes = memoryview(mmap.mmap(self._data, self.limit, flags=flags, prot=access))

    # -- entries

    def read(self, number: int) -> memoryview | None:
        """Return an entry, which must not be changed; None: it is absent."""
        start = int(self._rows[number, READY]) - 1
        if start < 0:
            return None
        self._note(HITS)
        begin = start + HEAD
        nbytes = int.from_bytes(self._bytes[start:begin], "little")
        return self._bytes[begin : begin + nbytes].toreadonly()

    def claim(self, number: int) -> bool:
        """Claim an absent entry, to `keep` it; False: it is there, or is claimed already.

        Then the sample is counted as one that is made and not kept.
        """
        with self._own:
            is_free = number not in self._claimed and not self._rows[number, READY]
            is_ours = is_free and self._lock(number, wait=False)
            if is_ours:
                self._claimed.add(number)
        if not is_ours:
            self._note(REFUSED)
        return is_ours

    def release(self, number: int) -> None:
        """Give a claim back."""
        with self._own:
            self._unlock(number)
            self._claimed.discard(number)

    def keep(self, number: int, parts: Sequence[Any]) -> None:
        """Keep an entry that is claimed, of several buffers, if there is room."""
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if nbytes > self.limit - self.overhead:
            raise ValueError(
                f"limit={self.limit} is too small: sample {number} alone takes {nbytes} bytes, and "
                f"the index {self.overhead}; give a larger limit"
            )
        start = self._room(number, -(-(HEAD + nbytes) // LINE) * LINE)
        if start is None:
            self._note(REFUSED)
            return
        try:
            folders.write(self._data, b"".join([nbytes.to_bytes(HEAD, "little"), *parts]), start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._tell_full(error)
            self._note(REFUSED)
            return
        self._set(FIRST + 4 * number + READY, start + 1)
        self._note(MADE)

    def _room(self, number: int, nbytes: int) -> int | None:
        """Return where an entry is to be written: its room of a maker that was killed, or new."""
        row = self._rows[number]
        if row[ROOM_AT] and row[ROOM_SIZE] >= nbytes:
            return int(row[ROOM_AT]) - 1
        with self._own, self._locked(ROOM):
            start = int(self._words[USED])
            if start + nbytes > self.limit - self.overhead:
                return None
            self._set(USED, start + nbytes)
            self._set(FIRST + 4 * number + ROOM_AT, start + 1, nbytes)
        return start

    def _tell_full(self, error: OSError) -> None:
        log.warning(
            "no room to keep a sample in %s (%s), of which %d of at most %d bytes are taken: it is "
            "made again in each epoch; give a smaller limit, or another folder",
            self.folder, error.strerror, self.nbytes, self.limit,
        )  # fmt: skip

    # -- what is counted

    @property
    def nbytes(self) -> int:
        """The bytes that are taken."""
        return self.overhead + int(self._words[USED])

    @property
    def kept(self) -> int:
        """The number of entries that are there."""
        return int(np.count_nonzero(self._rows[:, READY]))

    def counts(self) -> tuple[int, int, int]:
        """Return how often an entry was found, made and kept, made and not kept, by all."""
        hits, made, refused, _ = self._counters.sum(axis=0).tolist()
        return hits, made, refused

    def _note(self, column: int) -> None:
        """Count something in the row of this process, if it has one."""
        if self._row is None:
            with self._own:
                free = (k for k in range(COUNTERS) if self._lock(COUNTING + k, wait=False))
                self._row = next(free, -1)
        if self._row >= 0:
            self._counters[self._row, column] += 1

    # -- the files

    def _set(self, word: int, *values: int) -> None:
        """Write words of the index, by a call that other processes see as a whole."""
        folders.write(self._index, np.array(values, np.int64).tobytes(), 8 * word)

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

    def forget(self) -> None:
        """Begin anew in a forked process, which has neither claims nor a row of its parent's."""
        self._own, self._claimed, self._row = threading.Lock(), set(), None


_opened: weakref.WeakValueDictionary[str, Entries] = weakref.WeakValueDictionary()
_opening = threading.RLock()


def opened(folder: str, about: dict[str, Any], *, is_kept: bool) -> Entries:
    """Return the entries of a folder, which a process opens once: `fcntl` locks are a process's."""
    with _opening:
        entries = _opened.get(folder)
        if entries is None:
            entries = _opened[folder] = Entries(folder, about, is_kept=is_kept)
        else:
            folders.check(folder, about, "folder", VERSION)
        return entries


def _forget() -> None:
    for entries in _opened.values():
        entries.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _open(folder: str, name: str) -> int:
    return lift(os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
