"""How large a slot is made, and how small it becomes when batches need less.

After each window of batches, slots shrink that are far larger than these batches needed.

A window is `WINDOW` batches, or more where there are many slots to look at: a quarter of their
number.
"""

from __future__ import annotations

from cseq._memory import BULKY, SMALL
from cseq.memory_limit import MIB

FIRST = SMALL  # bytes; committed when a slot is made, so that an error report always fits
LARGE = 2 * MIB  # slots grow by doubling up to this, then in multiples of it
WINDOW = 32  # batches, at least; what those of the last window needed stays committed
SLACK = BULKY  # bytes; a slot shrinks if its excess is more than this and than what is needed


class Need:
    """The most bytes that a batch needed, in the window before and in the present one so far."""

    __slots__ = ("_before", "_count", "_now", "_windows")

    def __init__(self) -> None:
        self._now = self._before = self._count = self._windows = 0

    def add(self, nbytes: int, slots: int = 0) -> bool:
        """Count a batch of `nbytes`, of so many slots; return whether a window ends with it."""
        self._now = max(self._now, nbytes)
        self._count += 1
        if self._count < max(WINDOW, slots // 4):
            return False
        self._before, self._now, self._count = self._now, 0, 0
        self._windows += 1
        return True

    def excess(self, width: int) -> tuple[int, int]:
        """Return the size (bytes) above which a slot shrinks, and the size it shrinks to."""
        if self._windows < 2:
            return width, width
        room = room_for(max(self._now, self._before), 0, width)
        return max(2 * room, room + SLACK), room


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
