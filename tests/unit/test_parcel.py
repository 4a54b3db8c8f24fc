"""Parcels: tickets that are made elsewhere, and their batches, which come back as raw bytes."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from carrying import Trainer, Workshop

from cseq._parcel import Parcel, outline
from cseq.memory.segment import FIRST
from cseq.stage import BATCH, RAISED

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_SLOT = 0xFFFFFFFF
LONG = 10_000_000_000  # ns


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A trainer's end."""
    trainer = Trainer()
    yield trainer
    trainer.close()


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    """A worker's end."""
    workshop = Workshop()
    yield workshop
    workshop.close()


def answer_of(*batches: bytes, large: bool = False) -> list[Any]:
    """Write an answer by the layout that the module states: as if these bytes lay in the slots.

    `large`: each batch is an array of its own.
    """
    head: list[int] = [len(batches), 0]
    if large:
        for number, batch in enumerate(batches):
            head += [BATCH, -1 - number, len(batch), 0, 0, 0]
        parts = [np.frombuffer(batch, np.uint8) for batch in batches]
        return [np.array(head).view(np.uint8), *parts]
    at = -(-8 * (2 + 6 * len(batches)) // 64) * 64
    for batch in batches:
        head += [BATCH, at, len(batch), 0, 0, 0]
        at += -(-len(batch) // 64) * 64
    made = np.zeros(at, np.uint8)
    made[: 8 * len(head)] = np.array(head).view(np.uint8)
    for number, batch in enumerate(batches):
        start = head[3 + 6 * number]
        made[start : start + len(batch)] = np.frombuffer(batch, np.uint8)
    return [made]


def test_a_carrier_claims_many_tickets_the_oldest_first(trainer: Trainer) -> None:
    """As many as are asked for, then what is left; `held` counts them."""
    trainer.post(5)
    first, rest = trainer.carrier.claim(3), trainer.carrier.claim(9)
    assert [ticket >> 24 for ticket in first] == [0, 1, 2]
    assert [ticket >> 24 for ticket in rest] == [3, 4]
    assert trainer.carrier.held == 5
    assert trainer.carrier.claim(9) == []


def test_a_request_says_all_of_its_tickets(trainer: Trainer) -> None:
    """Seed, epoch, batch, start and indices, as the module states the layout."""
    trainer.post(1, samples=3, seed=2**64 - 1)
    trainer.post(1, samples=1, seed=6)
    words = trainer.carrier.request(trainer.carrier.claim(9)).tolist()
    assert words == [2, -1, 9, 0, 0, 3, 0, 6, 9, 1, 1, 1, 0, 0, 1, 2, 1]


def test_parcels_bring_each_batch_to_its_ticket(trainer: Trainer, workshop: Workshop) -> None:
    """Batches of any size and kind, made out of order and published in any order."""
    batches = [np.arange(3), {"text": ["ä", 2]}, np.zeros(FIRST, np.uint8), np.arange(10**6), None]
    numbers = trainer.post(5)
    tickets = trainer.carrier.claim(5)
    parcels = [trainer.carrier.request(tickets[:3]), trainer.carrier.request(tickets[3:])]
    asked = [Parcel(parcel, 4) for parcel in parcels]
    for parcel in asked:
        workshop.feed.add(parcel)
    answered: list[Parcel] = []
    for _ in range(5):
        answered += workshop.feed.advance()
        number = int(workshop.claim().indices()[0]) // 2
        assert (workshop.runner.seed, workshop.runner.epoch) == (5, 9)
        assert (workshop.runner.batch, workshop.runner.start) == (number, 2 * number)
        workshop.publish(batches[number])
    answered += workshop.feed.advance()
    assert answered == asked
    assert trainer.carrier.publish(tickets[3:], asked[1].answer()) == 2
    assert trainer.carrier.publish(tickets[:3], asked[0].answer()) == 3
    assert trainer.carrier.held == 0
    for number in numbers:
        assert repr(trainer.take(number)) == repr(batches[number])
    del asked, answered, parcel
    assert workshop.arena.slots.owners()[1:].count(0xFFFFFFFF) == 0  # all slots are free again


def test_a_large_batch_is_its_slot(trainer: Trainer, workshop: Workshop) -> None:
    """Nothing is copied; the slot is free again when the last array on it is gone."""
    trainer.post(2)
    tickets = trainer.carrier.claim(2)
    asked = Parcel(trainer.carrier.request(tickets), 4)
    workshop.feed.add(asked)
    workshop.feed.advance()
    for batch in (np.arange(10**5), np.arange(3)):
        workshop.claim()
        workshop.publish(batch)
    workshop.feed.advance()
    slots = workshop.arena.slots
    assert slots.leased == 1
    answer = asked.answer()
    nbytes, seconds, raised = outline(tickets, answer)
    assert nbytes == sum(part.nbytes for part in answer) >= 8 * 10**5
    assert seconds > 0
    assert raised == []
    assert [len(answer), answer[1].nbytes >= 8 * 10**5] == [2, True]
    assert trainer.carrier.publish(tickets, answer) == 2
    del asked
    assert slots.leased == 1
    del answer
    assert slots.leased == 0
    assert np.array_equal(trainer.take(0), np.arange(10**5))
    assert np.array_equal(trainer.take(1), np.arange(3))


def no_room(*_: Any) -> None:
    """Refuse memory."""
    raise MemoryError("full")


def landed(trainer: Trainer, *batches: bytes) -> list[Any]:
    """Write an answer whose batches have landed."""
    answer = answer_of(*batches, large=True)
    rooms = [trainer.carrier.land(len(batch)) for batch in batches]
    for place, room in enumerate(rooms, 1):
        room[...] = answer[place]
        answer[place] = room
    return answer


def held(trainer: Trainer) -> list[int]:
    """List the slots that the carrier has."""
    return [slot for slot, owner in enumerate(trainer.arena.slots.owners()) if owner == 1]


def test_what_has_landed_is_published_where_it_lies(trainer: Trainer) -> None:
    """Each batch in the slot that it was received in, however large; the others' are free again."""
    batches = [bytes([k]) * size for k, size in enumerate((1, FIRST, FIRST + 1, 5_000_000))]
    numbers = trainer.post(4)
    tickets = trainer.carrier.claim(4)
    answer, double = landed(trainer, *batches), landed(trainer, *batches)
    taken = held(trainer)
    assert len(taken) == 8
    assert trainer.carrier.publish(tickets, answer) == 4
    assert trainer.carrier.publish(tickets, double) == 0
    del double
    assert held(trainer) == taken[:4]
    for number, batch, slot, part in zip(numbers, batches, taken[:4], answer[1:], strict=True):
        found = trainer.ring.peek(number, number)
        assert found is not None
        assert found[1] == slot
        assert found[2] >= len(batch)
        mapping = trainer.arena.mapping_of(slot, found[2])
        assert mapping.view(0, np.dtype("u1"), (len(batch),)).tobytes() == batch == part.tobytes()
    del answer, part  # a part that was published frees nothing
    assert held(trainer) == taken[:4]


def test_landings_that_come_to_nothing_leave_no_slot(trainer: Trainer) -> None:
    """Those that are dropped, given up, shorter than the answer says, or another carrier's."""
    trainer.post(1)
    tickets = trainer.carrier.claim(1)
    large = b"x" * (FIRST + 1)
    cut = landed(trainer, large)
    cut[1] = cut[1][:-1]
    with pytest.raises(ValueError, match="ends before"):
        trainer.carrier.publish(tickets, cut)
    del cut
    assert held(trainer) == []
    other = Trainer()
    try:
        answer = landed(other, large)
        assert trainer.carrier.publish(tickets, answer) == 1  # as a copy
        assert len(held(other)) == len(held(trainer)) == 1
        del answer
        assert held(other) == []
    finally:
        other.close()
    late = landed(trainer, large)
    trainer.post(1)
    tickets = trainer.carrier.claim(1)
    trainer.carrier.give_up(trainer.posted)
    assert trainer.carrier.publish(tickets, late) == 0
    del late
    assert len(held(trainer)) == 1  # of the batch that was published


def test_without_room_nothing_lands_in_a_slot(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot that was taken for it is the next one's; a closed carrier has none."""
    with monkeypatch.context() as patched:
        patched.setattr("cseq.memory.writer.commit", no_room)
        rooms = [trainer.carrier.land(FIRST + 1) for _ in range(2)]
    assert [(room.nbytes, room.base) for room in rooms] == [(FIRST + 1, None)] * 2
    [left] = held(trainer)
    trainer.post(1)
    answer = landed(trainer, b"x")
    assert held(trainer) == [left]
    trainer.ring.close()
    trainer.carrier.close()
    assert trainer.carrier.land(1).base is None
    assert answer[1].tobytes() == b"x"  # its memory stays as long as it


def test_an_answer_counts_once(trainer: Trainer) -> None:
    """The first of two answers is published; the second finds its tickets gone, or others there."""
    [number] = trainer.post(1)
    old = trainer.carrier.claim(1)
    assert trainer.carrier.publish(old, answer_of(b"first")) == 1
    assert trainer.carrier.publish(old, answer_of(b"other")) == 0
    trainer.ring.retire(number)
    trainer.posted = trainer.ring.capacity  # the same cell
    trainer.post(1)
    new = trainer.carrier.claim(1)
    assert trainer.carrier.publish(old, answer_of(b"late")) == 0
    assert trainer.carrier.held == 1
    assert trainer.carrier.publish(new, answer_of(b"new")) == 1


def test_nothing_is_published_after_the_end(trainer: Trainer) -> None:
    """The file of the slots may be closed, and its descriptor another file's."""
    trainer.post(2)
    tickets = trainer.carrier.claim(2)
    assert trainer.carrier.publish(tickets[:1], answer_of(b"a")) == 1
    trainer.ring.close()
    assert trainer.carrier.publish(tickets, answer_of(b"a", b"b")) == 0
    assert trainer.carrier.held == 1


def test_a_part_of_a_parcel_is_published_when_the_rest_was_answered(trainer: Trainer) -> None:
    """Two agents may make overlapping parcels."""
    trainer.post(3)
    tickets = trainer.carrier.claim(3)
    assert trainer.carrier.publish(tickets[1:2], answer_of(b"b")) == 1
    assert trainer.carrier.publish(tickets, answer_of(b"a", b"B", b"c")) == 2
    assert trainer.ring.depths() == (0, 0, 3)


def test_giving_up_frees_all_tickets_of_before_at_once(trainer: Trainer) -> None:
    """What was posted from the given number on stays held; answers to the others are dropped."""
    trainer.post(5)
    tickets = trainer.carrier.claim(5)
    assert trainer.carrier.give_up(3) == 3
    assert trainer.carrier.held == 2
    assert trainer.carrier.publish(tickets, answer_of(*[b"x"] * 5)) == 2
    assert trainer.take(0)[:2] == (RAISED, NO_SLOT)
    assert trainer.carrier.request(tickets).tolist() == [5] + [0] * 30


def test_giving_up_counts_across_the_end_of_the_numbers(trainer: Trainer) -> None:
    """Tickets are numbered modulo 2**40."""
    trainer.posted = 2**40 - 2
    trainer.post(2)
    trainer.posted = 0
    trainer.ring.post(2, 0, 9, 0, 0)
    trainer.carrier.claim(3)
    assert trainer.carrier.give_up(2**40) == 2
    assert trainer.carrier.held == 1


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([np.zeros(8, np.uint8)], "ends before its tickets do"),
        (answer_of(b"x", b"y"), "an answer for 2 tickets, not 1"),
        ([answer_of(b"x" * 200)[0][:128]], "ends before its batches do"),
        ([answer_of(b"x", large=True)[0], np.zeros(0, np.uint8)], "ends before its batches do"),
        ([answer_of(b"xx", large=True)[0], np.zeros(4, np.uint8)[::2]], "before its batches do"),
    ],
)
def test_a_cut_answer_is_refused(trainer: Trainer, answer: Any, text: str) -> None:
    """The ticket stays held: another answer can come."""
    trainer.post(1)
    tickets = trainer.carrier.claim(1)
    with pytest.raises(ValueError, match=text):
        trainer.carrier.publish(tickets, answer)
    assert trainer.carrier.held == 1
    assert trainer.carrier.publish(tickets, answer_of(b"x")) == 1


def test_a_batch_without_room_becomes_an_error(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other batches of the parcel arrive."""
    trainer.post(3)
    tickets = trainer.carrier.claim(3)
    with monkeypatch.context() as patched:
        patched.setattr("cseq.memory.writer.commit", no_room)
        large = b"x" * (FIRST + 1)
        assert trainer.carrier.publish(tickets[:1], answer_of(large)) == 1
    assert trainer.carrier.publish(tickets[1:], answer_of(b"a", b"b")) == 2
    assert trainer.take(0)[:2] == (RAISED, NO_SLOT)
    assert trainer.carrier.held == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "ends before"),
        ([2, 0, 0, 0, 0, 1, 0], "ends before its 2 tickets"),
        ([-1, 0, 0, 0, 0, 1, 0], "ends before its -1 tickets"),
        ([2**62, 0, 0, 0, 0, 1, 0], "ends before its 4611686018427387904 tickets"),
        ([1, 0, 0, 0, 0, 2, 0, 7], "ends before"),
        ([1, 0, 0, 0, 0, 5, 0, 1, 2, 3, 4, 5], "a batch of 5 samples exceeds batch_size=4"),
        ([1, 0, 0, 0, 0, -1, 0], "a batch of -1 samples"),
        ([1, 0, 0, 0, 0, 2, 3, 7, 8, 1, 1, 1], "a batch of 2 samples exceeds batch_size=4"),
    ],
)
def test_a_request_that_is_none_is_refused(words: list[int], text: str) -> None:
    """Before anything is posted."""
    with pytest.raises(ValueError, match=text):
        Parcel(np.array(words, np.int64), 4)


def test_an_answer_that_is_not_complete_is_refused(workshop: Workshop) -> None:
    """It would have holes."""
    parcel = Parcel(np.array([1, 0, 0, 0, 0, 1, 0, 7]), 4)
    workshop.feed.add(parcel)
    workshop.feed.advance()
    with pytest.raises(RuntimeError, match="1 of 1 tickets are not answered"):
        parcel.answer()


def test_what_the_feed_could_not_take_stays_in_its_ring(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the middle loses nothing and takes nothing twice."""
    failing = [True]
    mapping_of = workshop.arena.mapping_of

    def fails_once(slot: int, capacity: int) -> Any:
        if failing.pop():
            raise MemoryError("no room for a mapping")
        failing.append(False)
        return mapping_of(slot, capacity)

    monkeypatch.setattr(workshop.arena, "mapping_of", fails_once)
    parcel = Parcel(np.array([2, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 7, 8]), 4)
    workshop.feed.add(parcel)
    workshop.feed.advance()
    for _ in range(2):
        workshop.claim()
        workshop.publish(np.arange(3))
    failing.append(True)
    with pytest.raises(MemoryError, match="mapping"):
        workshop.feed.advance()
    failing[:] = [False]
    assert len(workshop.feed.cells()) == 2
    assert workshop.feed.advance() == [parcel]
    assert workshop.feed.cells() == []


def test_a_wait_ends_with_a_ticket_a_notice_and_the_close(trainer: Trainer) -> None:
    """Also if they come between the look and the wait."""
    carrier = trainer.carrier
    seen = carrier.notices()
    trainer.post(1)
    assert carrier.wait(seen, LONG)
    carrier.claim(1)
    seen = carrier.notices()
    carrier.notify()
    assert carrier.wait(seen, LONG)
    seen = carrier.notices()
    thread = threading.Thread(target=trainer.ring.close)
    thread.start()
    assert not carrier.wait(seen, LONG)
    thread.join()


def test_tickets_are_answered_once_while_others_give_up(trainer: Trainer) -> None:
    """The loop's thread gives up at any time; whatever the order, each ticket is answered once."""
    rng = random.Random(3)
    stop = threading.Event()
    floor = [0]

    def give_up() -> None:
        while not stop.is_set():
            trainer.carrier.give_up(floor[0])

    thread = threading.Thread(target=give_up)
    thread.start()
    answered = 0
    try:
        for _ in range(300):
            numbers = trainer.post(rng.randint(1, trainer.ring.capacity))
            tickets = trainer.carrier.claim(len(numbers))
            assert len(tickets) == len(numbers)
            floor[0] = numbers[0] + rng.randint(0, len(numbers))
            trainer.carrier.publish(
                tickets, answer_of(*[b"x" * rng.randint(1, 999)] * len(tickets))
            )
            for number in numbers:
                cell = number % trainer.ring.capacity
                while trainer.ring.peek(cell, number) is None:
                    pass
                status, slot, *_ = trainer.ring.peek(cell, number)  # type: ignore[misc]
                assert (status, slot == NO_SLOT) in ((BATCH, False), (RAISED, True))
                if slot != NO_SLOT:
                    trainer.arena.slots.adopt(slot, 0)
                    trainer.arena.slots.vacate(slot)
                trainer.ring.retire(cell)
                answered += 1
    finally:
        stop.set()
        thread.join()
    assert answered == trainer.posted
    assert trainer.carrier.held == 0
