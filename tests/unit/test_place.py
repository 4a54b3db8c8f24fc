"""Where the loop is: the next place, from what the pool tells."""

from __future__ import annotations

import pytest

from cseq.order.place import Last, Now, Place
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential

END = 10
SAMPLER = Sampler(END, Sequential(), batch_size=3, seed=0, drop_last=False)


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
    assert place.now(SAMPLER) == Now(3, position, over)
    after = place.next(SAMPLER)
    assert (after.first, after.consumed) == following
    assert (after.begun, after.again) == (False, False)


@pytest.mark.parametrize(
    ("position", "now"),
    [
        (END, Now(3, END, True)),
        (END + 1, Now(4, 1, False)),
        (2 * END, Now(4, END, True)),
        (2 * END + 3, Now(5, 3, False)),
    ],
)
def test_a_place_in_a_later_epoch(position: int, now: Now) -> None:
    """Of an iterator over several: units are counted from the first one's beginning."""
    place = at(True, False, position)
    assert place.now(SAMPLER) == now
    assert place.next(SAMPLER).first == now.epoch + 1
    place.again = True
    assert place.next(SAMPLER).first == now.epoch + now.is_over


def test_epochs_whose_tail_is_left_out() -> None:
    """An epoch that was resumed has another tail than whole ones."""
    short = Sampler(END, Sequential(), batch_size=3, seed=0, drop_last=True)
    assert (short.end(4), short.end()) == (10, 9)
    assert at(True, False, 10).now(short) == Now(3, 10, True)
    assert at(True, False, 19).now(short) == Now(4, 9, True)
    assert at(True, False, 20).now(short) == Now(5, 1, False)


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
    assert place.now(SAMPLER) == Now(3, 6, False)
