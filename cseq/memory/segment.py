"""The anonymous file that slots of shared memory lie in.

The file is sparse: slot ``s`` begins at byte ``s * width``, and only its committed part takes
memory.
"""

from __future__ import annotations

import contextlib
import errno
import os

from cseq._memory import SMALL, Descriptor, section
from cseq.memory.descriptors import anonymous_file
from cseq.system import MIB

WIDTH = 1 << 40  # bytes from one slot to the next
SLOTS = 1 << 22  # so that the file stays below 2^63 bytes
# Tried in this order where a file cannot be that long: (width in bytes, slots).
NARROWER = ((1 << 36, 1 << 16), (1 << 33, 1 << 10), (1 << 30, 1 << 9), (1 << 28, 1 << 7))
# Windows pays some 8 bytes for each page of 4 KiB that is reserved: bytes to try, in this order,
# and how many slots these have at least.
RESERVED = (1 << 37, 1 << 36)
FEWEST = 1 << 8
FIRST = SMALL  # bytes of a slot that are committed before it is used: the text of an error fits
GRAIN = 1 << 16  # bytes; a mapping can begin at any multiple of it, on any system
LARGE = 2 * MIB  # slots grow by doubling up to this, then in multiples of it


class Segment:
    """An anonymous file: gone with its last descriptor and mapping, whichever process is killed.

    Parameters
    ----------
    width : int
        Bytes from one slot to the next; the size of the file where it has no slots.
    slots : int
        How many of them there are.
    """

    def __init__(self, file: Descriptor, width: int, slots: int = 1) -> None:
        self._file = file
        self.width = width
        self.slots = slots

    @property
    def fd(self) -> int:
        """Descriptor of the file; -1 once it is closed."""
        return self._file.fd

    @classmethod
    def create(cls, nbytes: int, slots: int = 1, name: str = "cseq") -> Segment:
        """Make a file of `slots` times `nbytes` zeroes, of which none takes memory yet.

        `name`: what `/proc` calls it. OSError if the file system cannot have a file of that size.
        """
        if os.name == "nt":
            return cls(Descriptor(section, nbytes * slots), nbytes, slots)
        file, sealable = anonymous_file(name)
        try:
            os.ftruncate(file.fd, nbytes * slots)
        except OSError as error:
            text = f"no sparse file of {nbytes * slots:,} bytes for shared memory: {error.strerror}"
            raise OSError(
                error.errno, f"{text}; is the size of files limited (ulimit -f)?"
            ) from error
        if sealable:
            _seal(file.fd)
        return cls(file, nbytes, slots)

    @classmethod
    def for_slots(cls, tickets: int = 0) -> Segment:
        """Make a file with as many and as wide slots as the file system can have; else OSError.

        `tickets`: the most that are posted at a time. On Windows there are slots for these, for
        those of an epoch that was given up, and as many again to lend; the more, the narrower.
        """
        sizes = reserved(tickets) if os.name == "nt" else ((WIDTH, SLOTS), *NARROWER)
        for width, slots in sizes:
            try:
                return cls.create(width, slots)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # of any size
                    raise
                last = error
        raise last

    def close(self) -> None:
        """Close the descriptor; mappings stay. Closing twice is fine."""
        self._file.close()


def whole_grains(nbytes: int) -> int:
    """Round a size up, so that a mapping can begin after it."""
    return -(-nbytes // GRAIN) * GRAIN


def reserved(tickets: int) -> tuple[tuple[int, int], ...]:
    """Return what to try on Windows: (width in bytes, slots)."""
    slots = max(FEWEST, 1 << (4 * tickets - 1).bit_length())
    return tuple((nbytes // slots, slots) for nbytes in RESERVED)


def room_for(needed: int, capacity: int, width: int) -> int:
    """Return how large (bytes) a slot of `capacity` bytes becomes to hold `needed` bytes."""
    if needed > width:
        raise MemoryError(
            f"a batch of {needed} bytes exceeds a slot, which has at most {width} bytes: "
            "make batch_size smaller"
        )
    if needed <= LARGE:
        room = max(FIRST, capacity, 1 << (needed - 1).bit_length())
    else:
        room = -(-needed // LARGE) * LARGE
    return min(room, width)


def _seal(fd: int) -> None:
    """Fix the size, so that no process can cut the file under a mapping (that would be SIGBUS)."""
    import fcntl

    with contextlib.suppress(OSError):  # a sandbox may refuse it; no process of ours cuts the file
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
