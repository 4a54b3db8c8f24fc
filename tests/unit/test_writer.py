"""A worker writes batches into slots, which grow; what an indexer keeps is found."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slots import acquire, take, whole

from cseq import system
from cseq.encoding import writer as writer_module
from cseq.encoding.writer import Writer
from cseq.memory.arena import FIRST, Arena
from cseq.memory.descriptors import sparse_file
from cseq.system import MIB

if TYPE_CHECKING:
    from collections.abc import Callable


def test_places_do_not_overlap(writer: Writer) -> None:
    """What is placed begins at multiples of 64 bytes, one behind the other."""
    places = [(writer.place(nbytes), nbytes) for nbytes in (1, 64, 65, 0, 1000, 5)]
    assert [offset % 64 for offset, _ in places] == [0] * 6
    for (a, nbytes), (b, _) in itertools.pairwise(places):
        assert a + nbytes <= b
    assert writer.used == places[-1][0] + 5


@given(sizes=st.lists(st.integers(0, 3 * MIB), max_size=8))
def test_a_slot_grows(sizes: list[int]) -> None:
    """Arrays of any size can be placed; those made before the slot grew stay whole."""
    arena = Arena()
    writer = Writer(arena.fd, arena.width)
    slot = acquire(arena)
    writer.select(slot, arena.slots.nbytes(slot))
    arrays = [writer.empty(size, np.uint8) for size in sizes]
    for value, array in enumerate(arrays):
        array[:] = value
    for value, array in enumerate(arrays):
        assert (array == value).all()
        if array.size:
            offset = writer.find(array)
            seen = writer.memory.view(offset, np.dtype(np.uint8), array.shape)
            assert (seen == value).all()
    assert writer.used <= writer.capacity == writer.memory.nbytes
    del arrays
    writer.close()
    arena.close()


def test_few_slots_stay_mapped(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer keeps a limited number of slots mapped: those that it has mapped first."""
    monkeypatch.setattr(writer_module, "MAX_MAPPED", 3)
    writer = Writer(arena.fd, arena.width)
    slots = [acquire(arena) for _ in range(8)]
    kept = []
    for _ in range(3):
        for slot in slots:
            writer.select(slot, FIRST)
            writer.empty(10)[:] = slot
        kept.append([writer.mapped[slot] for slot in slots[:2]])
    assert len(writer.mapped) == 3
    assert kept[0] == kept[1] == kept[2]  # slots that come round in turn are not all mapped anew
    writer.close()


def test_a_worker_may_know_more_than_the_trainer(arena: Arena) -> None:
    """A capacity that the trainer never heard of, since the worker died, does no harm."""
    slot = acquire(arena)
    first, second = (Writer(arena.fd, arena.width) for _ in range(2))
    for writer in (first, second, first):
        writer.select(slot, arena.slots.nbytes(slot))
        writer.empty(MIB, np.uint8)[:] = 7
        writer.end()
    memory = take(arena, slot, first.used, first.capacity)
    assert (whole(memory, MIB) == 7).all()
    first.close()
    second.close()


def test_a_worker_may_know_less_than_the_trainer(arena: Arena) -> None:
    """What another worker has committed of a slot is not committed once more."""
    slot = acquire(arena)
    first, second = (Writer(arena.fd, arena.width) for _ in range(2))
    first.select(slot, FIRST)
    second.select(slot, FIRST)
    second.place(MIB)
    first.select(slot, second.capacity)
    assert first.capacity == first.memory.nbytes == second.capacity
    first.close()
    second.close()


@pytest.mark.parametrize("shape", [(), 0, 3, (2, 3), [2, 0], np.int64(4), (np.int8(2), 1)])
def test_empty(writer: Writer, shape: Any) -> None:
    """`empty` takes shapes and types as numpy does; its arrays lie in the slot."""
    for dtype in ("f4", np.int64, "M8[s]", [("a", "u1"), ("b", "f8")]):
        wanted = np.empty(shape, dtype)
        array = writer.empty(shape, dtype)
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert writer.find(array) == (
            array.ctypes.data - writer.memory.address if array.size else -1
        )
    assert writer.empty(shape).dtype == np.empty(shape).dtype
    assert writer.empty((2, 3), fortran=True).flags.f_contiguous


def test_empty_refuses_what_cannot_be(writer: Writer) -> None:
    """Negative shapes and types with Python objects are errors, and nothing is placed."""
    used = writer.used
    with pytest.raises(ValueError, match="negative"):
        writer.empty((2, -1))
    with pytest.raises(ValueError, match=r"numpy\.empty"):
        writer.empty(3, object)
    with pytest.raises(TypeError):
        writer.empty("3")  # type: ignore[arg-type]
    assert writer.used == used


def test_find(writer: Writer) -> None:
    """Only what lies wholly in the used part of the slot, in one piece, is found."""
    array = writer.empty((10, 10), np.uint8)
    start = writer.find(array)
    assert start == 0
    assert writer.find(array[1:]) == 10
    assert writer.find(array.T) == 0
    assert writer.find(array[:, 1:]) == -1
    assert writer.find(array[::-1]) == -1
    assert writer.find(array[:0]) == -1
    assert writer.find(np.empty(100, np.uint8)) == -1
    assert writer.find(array.ravel()[1:9].view(np.int64)) == -1  # not aligned
    beyond = writer.memory.view(0, np.dtype(np.uint8), (101,))
    assert writer.find(beyond) == -1


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda array: array,
    "a view": lambda array: array[2:],
    "a view of a view": lambda array: array[2:].view(np.uint8)[1:][:3],
    "a memoryview": memoryview,
    "an iterator": lambda array: iter(array[1:]),
    "a frombuffer": lambda array: np.frombuffer(array, np.uint8)[5:],
    "a list in a cycle": lambda array: [array],
}


@pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS)
def test_an_indexer_must_not_keep_arrays_of_the_slot(
    writer: Writer, keeper: Callable[[Any], Any]
) -> None:
    """An array from `empty`, kept beyond its batch in whatever form, is an error, once."""
    kept = keeper(writer.empty(100, np.int64))
    with pytest.raises(RuntimeError, match=r"array\.copy\(\)"):
        writer.end()
    writer.select(writer.slot, FIRST)
    writer.empty(3)
    writer.end()
    del kept


# -- when memory is short -----------------------------------------------------------------------


def test_dropped_arrays_are_no_error(writer: Writer) -> None:
    """Arrays that are dropped, or held by nothing but garbage, are fine; and so are copies."""
    array = writer.empty(10)
    kept = array.copy()
    del array
    writer.end()
    writer.select(writer.slot, FIRST)
    cycle: list[Any] = [writer.empty(10)]
    cycle.append(cycle)
    del cycle
    writer.end()
    assert kept.size == 10


def test_no_room_leaves_the_writer_as_it_was(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch for which there is no room is a MemoryError; smaller ones still pass."""
    array = writer.empty(10)
    array[:] = 5
    before = (writer.used, writer.capacity, writer.memory)

    def full(*_: int) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "commit", full)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room"):
                writer.empty(10 * MIB)
            assert (writer.used, writer.capacity, writer.memory) == before
    assert (array == 5).all()
    assert writer.empty(10 * MIB).size


@pytest.mark.skipif(sys.platform == "darwin", reason="without seals, the file grows")
def test_a_full_file_is_a_memory_error() -> None:
    """What the system refuses to commit is a MemoryError with the number of bytes."""
    file = sparse_file(1 << 20)
    writer = Writer(file.fd, 1 << 30)
    writer.select(0, FIRST)
    with pytest.raises(MemoryError, match=str(2 * MIB - FIRST)):
        writer.place(MIB + 1)
    assert writer.place(100) == 0
    writer.close()
    file.close()


def test_more_than_there_is(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch larger than the free memory is refused; Linux would kill a process instead."""
    monkeypatch.setattr(system, "available_memory", lambda: 40 * MIB)
    with pytest.raises(MemoryError, match=str(40 * MIB)):
        writer.place(50 * MIB)
    writer.place(35 * MIB)
    monkeypatch.setattr(system, "available_memory", lambda: None)
    writer.place(50 * MIB)
    sizes = {"SC_PAGE_SIZE": MIB, "SC_PHYS_PAGES": 300}  # all that such a system tells
    monkeypatch.setattr(os, "sysconf", sizes.get, raising=False)
    with pytest.raises(MemoryError, match=str(300 * MIB)):
        writer.place(400 * MIB)


def test_wider_than_a_slot() -> None:
    """A batch larger than a slot can become is a MemoryError that says how large it may be."""
    file = sparse_file(8 * MIB)
    writer = Writer(file.fd, 4 * MIB)
    writer.select(1, FIRST)
    with pytest.raises(MemoryError, match=str(4 * MIB)):
        writer.place(4 * MIB + 1)
    assert writer.place(4 * MIB) == 0
    writer.close()
    file.close()
