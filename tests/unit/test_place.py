"""Where the loop is: the next place, from what the pool tells."""

from __future__ import annotations

import pytest

from cseq.order.place import Last, Place

END = 10


def at(begun: bool, ended: bool, position: int, *, again: bool = False) -> Place:
    """Make a place in epoch 3 that begins after 4 samples, with a pool at it."""
    place = Place(3, 4)
    place.progress = Last(int(begun), ended, position)
    place.again = again
    return place


@pytest.mark.parametrize(
    ("place", "position", "over", "following"),
    [
        (Place(3, 4), 4, False, (3, 4)),
        (at(False, False, 0), 4, False, (3, 4)),
        (at(True, False, 6), 6, False, (4, 0)),
        (at(True, False, 6, again=True), 6, False, (3, 0)),
        (at(True, False, END), END, True, (4, 0)),
        (at(True, True, 8), 8, True, (4, 0)),
        (at(True, True, 8, again=True), 8, True, (4, 0)),
    ],
)
def test_the_next_place(
    place: Place, position: int, over: bool, following: tuple[int, int]
) -> None:
    """An epoch that the loop has had something of is followed by the next, else by itself."""
    assert place.position == position
    assert place.is_over(END) is over
    after = place.next(END)
    assert (after.epoch, after.consumed) == following
    assert (after.begun, after.again) == (False, False)


def test_what_a_pool_told_is_kept() -> None:
    """Once the pool is closed, its place is as it told last; keeping it again changes nothing."""

    class Feed:
        taken, ended, position = 3, False, 6

    place = Place(3, 4)
    place.progress = Feed()
    place.keep()
    Feed.position = 9
    place.keep()
    assert place.begun
    assert place.position == 6
    assert not place.is_over(END)
