"""A slot grows geometrically, and shrinks to what two windows of batches needed."""

from __future__ import annotations

import pytest

from cseq.memory_limit import MIB
from cseq.slot_size import FIRST, LARGE, SLACK, WINDOW, Need, room_for


def test_growth_is_geometric() -> None:
    """Small slots double, large ones grow by whole huge pages; none exceeds its width."""
    width = 64 * MIB
    assert room_for(1, 0, width) == FIRST
    assert room_for(FIRST + 1, FIRST, width) == 2 * FIRST
    assert room_for(LARGE, FIRST, width) == LARGE
    assert room_for(LARGE + 1, FIRST, width) == 2 * LARGE
    assert room_for(5 * LARGE, 3 * LARGE, width) == 5 * LARGE
    assert room_for(3 * LARGE - 1, LARGE, 3 * LARGE - 1) == 3 * LARGE - 1
    with pytest.raises(MemoryError, match="batch_size"):
        room_for(width + 1, 0, width)


def test_the_largest_batch_of_two_windows_is_needed() -> None:
    """A slot is too large only when two whole windows have needed less."""
    width = 1 << 40
    need = Need()
    ends = [need.add(40 * MIB if count == 0 else MIB) for count in range(2 * WINDOW)]
    assert [count for count, end in enumerate(ends, 1) if end] == [WINDOW, 2 * WINDOW]
    assert need.excess(width) == (MIB + SLACK, MIB)
    assert not need.add(9 * MIB)
    assert need.excess(width) == (20 * MIB, 10 * MIB)


def test_nothing_shrinks_before_two_windows() -> None:
    """Until two windows are known, a slot may have its whole width."""
    need = Need()
    for _ in range(2 * WINDOW - 1):
        need.add(100)
        assert need.excess(1 << 40) == (1 << 40, 1 << 40)
