"""A worker's slot: batches are laid in it by a plan."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
import ringing
from ringing import claim, make_ring
from slots import shared

from cseq._memory import Descriptor, Mapping, Plan, Slots, commit
from cseq._work import SlotEncoder


class Slot(SlotEncoder):
    """A hand that counts how often it was asked to go the long way."""

    __slots__ = ("begun",)

    def __init__(self, fd: int, width: int, slots: Slots) -> None:
        self.slots = slots
        self.memory = self.mapped[1] = Mapping(fd, width, width)
        self.capacity = width
        slots.resize(1, width)
        self.begun: list[int] = []

    def begin(self) -> None:
        """Turn to a slot, the long way."""
        self.begun.append(self.slot)

    def place(self, nbytes: int) -> int:
        """Give out bytes that are not there."""
        raise MemoryError(nbytes)


FLOATS = np.arange(3, dtype=np.float32)
F4, F8 = np.dtype("f4"), np.dtype("f8")


def plan_of(cast: Any = None, source: Any = F4, token: Any = "array") -> Plan:
    """Make the plan of an array of floats."""
    return Plan(b"plan", token, [(cast or source, 1, False)], cast, [source])


def make_slot(cast: Any = None) -> Slot:
    """Make a hand on a mapped slot that knows arrays of floats."""
    segment, _ = shared()
    commit(segment.fd, segment.width, segment.width)
    hand = Slot(segment.fd, segment.width, Slots(segment.fd, segment.width, segment.slots, 1))
    hand.cast = cast
    hand.remember(plan_of(cast))
    return hand


def test_laying_an_array() -> None:
    """An array lies in the slot, behind it its structure and its layout."""
    slot = make_slot()
    for begin, shape in enumerate([3, 2]):
        plan, arrays, objects = slot.match(FLOATS[:shape], None)  # type: ignore[misc]
        at = 128 * begin
        assert slot.encode(plan, arrays) == (at + 64, 4, 16, 0)
        assert slot.used == at + 64 + 4 + 16
        assert slot.memory.view(at, F4, (shape,)).tolist() == [0, 1, 2][:shape]
        assert bytes(memoryview(slot.memory)[at + 64 : at + 68]) == b"plan"
        assert slot.memory.view(at + 68, np.dtype("i8"), (2,)).tolist() == [at, shape]
        assert not objects


@pytest.mark.parametrize(
    "other",
    [FLOATS.astype("f8"), FLOATS.astype(">f4"), FLOATS[None], FLOATS.view(np.recarray), [1, 2],
     None, [FLOATS]],
)  # fmt: skip
def test_other_batches_do_not_match(other: Any) -> None:
    """What is not like the array before is left to the survey, and the slot as it is."""
    slot = make_slot()
    assert slot.match(other, None) is None
    assert slot.match(FLOATS, F8) is None
    assert (slot.used, bytes(memoryview(slot.memory)[:70])) == (0, bytes(70))


def test_a_few_plans_are_remembered() -> None:
    """Any of the last plans is found; those before are forgotten."""
    slot = make_slot()
    types = [np.dtype(name) for name in ("i1", "i2", "i4", "i8")]
    for dtype in types[:3]:
        slot.remember(plan_of(source=dtype))
    for dtype in [F4, *types[:3], F4]:
        found = slot.match(np.zeros(2, dtype), None)
        assert found is not None
        assert found[0].casts == [False]
    slot.remember(plan_of(source=types[3]))
    assert slot.match(np.zeros(2, "i1"), None) is None


def test_laying_does_not_leave_the_slot() -> None:
    """Where there is no room, `place` says so, and nothing is written."""
    slot = make_slot()
    slot.capacity = 83
    plan, arrays, _ = slot.match(FLOATS, None)  # type: ignore[misc]
    with pytest.raises(MemoryError, match="84"):
        slot.encode(plan, arrays)
    assert bytes(memoryview(slot.memory)[:84]) == bytes(84)


@pytest.mark.parametrize("shape", [(3,), (6,)])
def test_laying_with_a_cast(shape: tuple[int, ...]) -> None:
    """An array is cast on the way, whatever its strides are."""
    slot = make_slot(F8)
    array = np.arange(shape[0], dtype="f4")[:: shape[0] // 3]
    plan, arrays, _ = slot.match(array, F8)  # type: ignore[misc]
    assert plan.casts == [True]
    slot.encode(plan, arrays)
    assert slot.memory.view(0, F8, (3,)).tolist() == array.tolist()


def test_a_plan_that_does_not_fit_its_leaves() -> None:
    """A tree of more arrays than there are leaves, or of fewer, is refused, and so are objects."""
    with pytest.raises(ValueError, match="more arrays"):
        plan_of(token=(list, None, 2))
    with pytest.raises(ValueError, match="does not fit"):
        plan_of(token="object")
    with pytest.raises(ValueError, match="raw memory"):
        plan_of(source=np.dtype(object))


def test_giving_a_batch() -> None:
    """Turn, lay down, publish: the ticket is ready, its record and capacity as they should be."""
    slot = make_slot()
    ring = make_ring()
    ring.post(0, 0, 0, 0, 1)
    runner = claim(ring)
    slot.begin_ticket(runner)
    assert not slot.begun
    assert slot.slot == 1
    assert not slot.try_publish(runner, [FLOATS])
    assert runner.cell == 0
    before = sys.getrefcount(FLOATS)
    assert slot.try_publish(runner, FLOATS)
    assert sys.getrefcount(FLOATS) == before
    assert runner.cell == -1
    assert slot.slot == -1
    assert ringing.take(ring) == (0, 0, 1, slot.capacity, (64, 4, 16, 0))


def test_not_giving_a_batch() -> None:
    """A slot that is not mapped, or that something is left of: `begin` is called; nothing given."""
    slot = make_slot()
    ring = make_ring()
    for number in (0, 1):
        ring.post(number, number, 0, 0, 1)
    runner = claim(ring)
    slot.loaned = True
    slot.begin_ticket(runner)
    assert not slot.try_publish(runner, FLOATS)
    assert runner.cell == 0
    runner.publish()
    slot.loaned = False
    assert runner.claim() is True
    slot.begin_ticket(runner)
    slot.slot = -1
    slot.begin_ticket(runner)
    assert slot.begun == [-1, 2]


@pytest.mark.needs("POSIX")
def test_a_descriptor() -> None:
    """It is closed by hand, twice if need be, or with its last reference; or never opened."""
    with tempfile.TemporaryFile() as file:
        first, second = (Descriptor(os.dup, file.fileno()) for _ in range(2))
        numbers = first.fd, second.fd
        os.fstat(first.fd)
        first.close()
        first.close()
        assert first.fd == -1
        del second
        for number in numbers:
            with pytest.raises(OSError, match=r"descriptor|handle"):
                os.fstat(number)
    with pytest.raises(OSError, match=r"descriptor|handle"):
        Descriptor(os.dup, -1)
