"""Shared memory: blocks and mappings, the table of slots, their file, and both ends of them."""

import errno
import itertools
import logging
import os
import random
import sys
import tempfile
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refusing
from slots import PAGE, acquire, commit_ticket, file_of, filled, lease, shared, whole, writer_of
from waiting import together

from cseq import system
from cseq._memory import SMALL, Block, Mapping, commit, copy_of
from cseq.encoding import _room as room_module
from cseq.encoding._codec import TicketWriter
from cseq.memory import arena as arena_module
from cseq.memory._slots import TRAINER, Lease, SlotTable
from cseq.memory.arena import FIRST, LARGE, Arena, reserved, room_for
from cseq.memory.descriptors import sparse_file
from cseq.system import MIB


def test_a_block_of_nonsense():
    """Negative sizes are refused, as are sizes that no machine has."""
    with pytest.raises(ValueError, match="-1"):
        Block(-1)
    with pytest.raises(MemoryError, match=r"\d bytes"):
        Block(2**62)
    with pytest.raises(TypeError):
        Block("1")


BAD_VIEWS = [
    (0, "u1", (101,), IndexError), (100, "u1", (1,), IndexError), (-1, "u1", (1,), IndexError),
    (101, "u1", (0,), IndexError), (2**63 - 1, "u1", (2,), IndexError),
    (0, "u1", (-1,), ValueError), (0, "u1", (0, -5), ValueError), (0, "O", (1,), ValueError),
    (0, "f8", (2**40, 2**40), ValueError), (0, [("a", "O")], (1,), ValueError),
    (0, "u1", (1,) * 65, ValueError), (0, "u1", ("a",), TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("offset", "dtype", "shape", "kind"), BAD_VIEWS)
def test_views_outside(offset, dtype, shape, kind):
    """A view that is not in the memory, or could not be, is refused."""
    with pytest.raises(kind):
        Block(100).view(offset, np.dtype(dtype), shape)


def test_outside():
    """Nothing is read or written outside of a memory."""
    block = Block(100)
    for function, *args in (
        (block.store_from, 98, block, 3), (block.store_from, -1, block, 3),
        (copy_of, block, 101), (copy_of, block, 50, 51),
    ):  # fmt: skip
        with pytest.raises(IndexError, match="100 bytes"):
            function(*args)


def test_mappings_of_nonsense():
    """No bytes, too many, an unaligned part, or no file: each is refused, with the bytes."""
    with file_of(PAGE) as fd:
        for nbytes in (0, 2**63):
            with pytest.raises(ValueError, match=str(nbytes)):
                Mapping(fd, 0, nbytes)
        with pytest.raises(MemoryError, match=f"{PAGE} bytes"):
            Mapping(fd, 1, PAGE)
        with pytest.raises(MemoryError, match="bytes"):
            Mapping(fd, 0, 2**60)
        with pytest.raises(OverflowError):
            Mapping(fd, -PAGE, PAGE)
    with pytest.raises(MemoryError):
        Mapping(-1, 0, PAGE)


def test_commit():
    """Committed pages take room in the file; without room, a MemoryError has the bytes."""
    file = sparse_file(4 * PAGE)
    commit(file.fd, PAGE, PAGE)
    memoryview(Mapping(file.fd, PAGE, PAGE))[-1] = 33
    if sys.platform == "linux":
        taken = os.fstat(file.fd)
        assert (taken.st_size, taken.st_blocks * 512) == (4 * PAGE, PAGE)
    with pytest.raises(MemoryError, match=f"{PAGE} bytes"):
        commit(-1, 0, PAGE)


def test_many_slots():
    """The table grows; if all slots are in use, a MemoryError is raised."""
    _, slots = shared(2000)
    assert len(slots.owners()) == 1024
    assert [slots.take() for _ in range(1999)] == list(range(1, 2000))
    with pytest.raises(MemoryError, match="all 1999 slots"):
        slots.take()
    slots.free(7)
    assert slots.take() == 7


def test_slots_are_not_released_twice():
    """A slot that is not taken, or that does not exist, can be neither released nor leased."""
    _, slots = shared()
    with file_of(PAGE) as fd:
        mapping = Mapping(fd, 0, PAGE)
    for use in (slots.free, lambda slot: lease(slots, slot, mapping)):
        with pytest.raises(RuntimeError, match="slot 1"):
            use(1)
        for slot in (-1, 0, 2**40):
            with pytest.raises(IndexError, match=str(slot)):
                use(slot)
    held = lease(slots, slots.take(), mapping)
    with pytest.raises(RuntimeError, match="not taken"):
        lease(slots, 1, mapping)
    del held
    with pytest.raises(TypeError):
        lease(slots, slots.take(), None)


def test_decodes_of_one_ticket_share_a_lease():
    """An interrupted decode's result stays intact when the next decode's batch is dropped."""
    _, slots = shared()
    with file_of(PAGE) as fd:
        left = slots.lease(slots.take(), Mapping(fd, 0, PAGE))
        batch = lease(slots, 1, Mapping(fd, 0, PAGE))
    assert (batch is left, slots.leased, slots.leased_bytes) == (True, 1, PAGE)
    del batch
    assert (slots.leased, slots.take()) == (1, 2)
    del left
    assert (slots.leased, slots.leased_bytes, slots.take()) == (0, 0, 1)
    commit_ticket(slots, 1, 100)
    # The peak is the largest value, not the last.
    assert slots.peak() == (PAGE, 1)


def test_the_lowest_free_slot_is_found_again_and_again():
    """It holds whatever was freed (first, last or new slots), even if the search is long."""
    rng = random.Random(7)
    _, slots = shared()
    taken = set()
    for step in range(4000):
        # Half of the time many slots are taken, then nearly none.
        few = step % 800 < 400
        if taken and rng.random() < (0.1 if few else 0.9):
            slot = rng.choice(sorted(taken))
            slots.free(slot)
            taken.remove(slot)
        else:
            slot = next(slot for slot in itertools.count(1) if slot not in taken)
            assert slots.take() == slot
            taken.add(slot)


def test_slots_freed_on_other_threads_are_found():
    """A concurrent search misses none of them permanently."""
    _, slots = shared()

    def work(seed):
        rng = random.Random(seed)
        mine = []
        for _ in range(20000):
            if mine and rng.random() < 0.5:
                slots.free(mine.pop(rng.randrange(len(mine))))
            else:
                mine.append(slots.take())
        for slot in mine:
            slots.free(slot)

    together(*(partial(work, seed) for seed in range(3)))
    assert [slots.take() for _ in range(65)] == list(range(1, 66))


@pytest.mark.needs("Linux")
def test_a_file_cannot_be_cut():
    """The pages below a mapping cannot be taken away."""
    file = sparse_file(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 0)


@pytest.mark.needs("POSIX")
def test_a_system_without_anonymous_files(monkeypatch):
    """An unlinked temporary file replaces them, with slots as wide as the file system allows."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir(tempfile.gettempdir()))
    arena = Arena()
    writer = TicketWriter(arena.fd, arena.width)
    assert arena.width >= 1 << 28
    made = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in made if name.startswith("cseq-")]
    memories = [filled(arena, writer, value, 5 * MIB) for value in range(3)]
    for value, memory in enumerate(memories):
        assert (whole(memory, 5 * MIB) == value).all()


def test_a_file_system_without_long_files(monkeypatch):
    """If a file cannot be that long, slots are narrower and fewer."""
    real = os.ftruncate

    def cut(fd, length):
        if length > 1 << 40:
            raise OSError(errno.EFBIG, "File too large")
        real(fd, length)

    monkeypatch.setattr(os, "ftruncate", cut)
    arena = Arena()
    assert arena.width * arena.most <= 1 << 40
    assert arena.width >= 1 << 28


@pytest.mark.needs("POSIX")
def test_a_file_that_is_too_large(monkeypatch):
    """For slots and for rings, the error names the size, and the limit that may be the reason."""
    monkeypatch.setattr(os, "ftruncate", refusing(OSError, errno.EFBIG, "File too large"))
    for make in (Arena, lambda: sparse_file(3 << 20)):
        with pytest.raises(OSError, match=r"bytes .*: File too large; .*ulimit -f") as caught:
            make()
        assert caught.value.errno == errno.EFBIG
    assert "3,145,728 bytes" in str(caught.value)


@pytest.mark.parametrize(("tickets", "width"), [(0, 512), (64, 512), (65, 256), (140, 128)])
def test_more_tickets_make_narrower_slots_on_windows(tickets, width):
    """Slots cover the tickets of two epochs and as many leases, in 128 GiB or 64."""
    sizes = reserved(tickets)
    assert sizes[0][0] == width * MIB
    assert [width * slots for width, slots in sizes] == [1 << 37, 1 << 36]
    assert all(slots >= max(256, 4 * tickets) for _, slots in sizes)


@pytest.mark.needs("Linux")
def test_too_many_descriptors(monkeypatch):
    """The error says so, with their limit instead of the limit of a file's size."""
    full = refusing(OSError, errno.EMFILE, "Too many open files")
    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match=r"Too many open files.*ulimit -n") as caught:
        Arena()
    assert "ulimit -f" not in str(caught.value)


@pytest.mark.needs("Linux")
def test_a_sandbox_that_refuses_seals(monkeypatch):
    """A file that cannot be sealed serves as well."""
    monkeypatch.setattr("fcntl.fcntl", refusing(PermissionError, errno.EPERM, "no seals"))
    arena = Arena()
    assert os.fstat(arena.fd).st_size == arena.width * arena.most


def test_growth_is_geometric():
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


def test_steady_state_makes_no_mapping(arena, monkeypatch):
    """A known slot is not mapped again, in the worker or in the trainer."""
    writer = TicketWriter(arena.fd, arena.width)
    made = []

    def count(*args, **kwargs):
        made.append(args)
        return Mapping(*args, **kwargs)

    monkeypatch.setattr(arena_module, "Mapping", count)
    mapped = []
    for turn in range(20):
        filled(arena, writer, turn, MIB)
        known = {*map(id, mapped)}
        mapped += [one for one in writer.room.mapped.values() if id(one) not in known]
    assert mapped
    # There are a first and a grown mapping, each for the writer and for the trainer.
    assert len(made) + len(mapped) <= 4


@pytest.mark.parametrize(
    ("limit", "leases"), [(0, 0), (3 * MIB, 1), (4 * MIB, 2), ("7 MiB", 3), (None, 6)]
)
def test_too_many_held_batches_are_copied(limit, leases, caplog):
    """Beyond memory_limit, batches are copied, with one warning; later ones may be leased."""
    arena = Arena(limit)
    writer = TicketWriter(arena.fd, arena.width)
    with caplog.at_level(logging.WARNING, "cseq"):
        memories = [filled(arena, writer, value, 2 * MIB) for value in range(6)]
    assert arena.slots.leased == leases
    assert arena.copies == 6 - leases
    assert len(caplog.records) == (leases < 6)
    assert all("memory_limit" in record.getMessage() for record in caplog.records)
    for value, memory in enumerate(memories):
        assert (whole(memory, 2 * MIB) == value).all()
    del memory
    memories.clear()
    assert isinstance(filled(arena, writer, 0, 2 * MIB), Lease) == (leases > 0)
    assert arena.slots.leased_bytes == 0


def test_too_many_slots_held(arena, writer, monkeypatch, caplog):
    """The number of leased slots is limited as well: each is a separate mapping."""
    monkeypatch.setattr(arena_module, "MAX_LEASED", 3)
    memories = [filled(arena, writer, value, SMALL + 1) for value in range(5)]
    assert (arena.slots.leased, arena.copies) == (3, 2)
    # The warning has this limit, and not the other one's remedy.
    [told] = caplog.messages
    assert told.startswith("the loop holds 3 batches in ")
    assert ", and the maximum is 3 batches. Until it drops some" in told
    assert "memory_limit" not in told
    assert [whole(memory, 1)[0] for memory in memories] == list(range(5))


def test_no_room_for_a_new_slot(arena, monkeypatch):
    """If a worker cannot begin a slot, it raises MemoryError, and the slot stays its own."""
    slots = SlotTable(arena.fd, arena.width, arena.most, 1)
    writer = TicketWriter(arena.fd, arena.width, slots)
    with monkeypatch.context() as patch:
        patch.setattr(room_module, "commit", refusing(MemoryError, "full"))
        for _ in range(2):
            with pytest.raises(MemoryError, match="full"):
                writer.room.begin_slot()
    writer.room.begin_slot()
    assert (writer.room.slot, writer.room.capacity) == (1, FIRST)
    assert arena.slots.owners()[:3] == [TRAINER, 1, 0]


def committed(arena):
    """Return the bytes that the file really uses."""
    return os.fstat(arena.fd).st_blocks * 512


def through(arena, writer, nbytes, value=0):
    """Send one batch through the lowest free slot."""
    return whole(filled(arena, writer, value, nbytes), nbytes)


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("nbytes", [100, MIB, 5 * MIB])
def test_huge_slots_are_given_back_after_an_epoch_without_huge_batches(nbytes):
    """Pages that no batch needs any more are released; held ones stay."""
    arena = Arena(tickets=4)
    writer = TicketWriter(arena.fd, arena.width)
    huge = [through(arena, writer, 60 * MIB, value) for value in range(3)]
    held = huge.pop()
    del huge
    arena.tidy()
    assert committed(arena) >= 180 * MIB
    for number in range(5):
        assert (through(arena, writer, nbytes, number % 256) == number % 256).all()
    arena.tidy()
    assert 60 * MIB <= committed(arena) <= 61 * MIB + 10 * nbytes
    assert held.min() == held.max() == 2
    del held
    through(arena, writer, nbytes)
    arena.tidy()
    assert committed(arena) <= MIB + 10 * nbytes
    assert (through(arena, writer, 60 * MIB, 9) == 9).all()


@pytest.mark.needs("Linux")
def test_slots_that_were_held_once_are_given_back(arena, writer):
    """Slots that only many held batches needed do not stay committed."""
    held = [through(arena, writer, 2 * MIB, value) for value in range(30)]
    held.clear()
    arena.tidy()
    assert committed(arena) >= 58 * MIB
    through(arena, writer, 2 * MIB)
    arena.tidy()
    assert committed(arena) <= 5 * MIB


@pytest.mark.needs("Linux")
def test_page_locked_slots_are_given_back_unlocked(writer):
    """A mapping is unlocked before its pages are released, as a device would still use them."""
    locked = {}

    class Locks:
        def register(self, memory, /):
            locked[memory.address] = memory.nbytes
            return True

        def unregister(self, memory, /):
            del locked[memory.address]

    arena = Arena(locks=Locks())
    writer = TicketWriter(arena.fd, arena.width)
    through(arena, writer, 60 * MIB)
    assert max(locked.values()) >= 60 * MIB
    arena.tidy()
    for _ in range(3):
        through(arena, writer, MIB)
    arena.tidy()
    through(arena, writer, MIB)
    assert max(locked.values()) <= 2 * MIB


@given(sizes=st.lists(st.integers(0, 3 * MIB), max_size=8))
def test_a_slot_grows(sizes):
    """Arrays of any size can be placed; those made before the slot grew stay intact."""
    arena = Arena()
    writer = writer_of(arena)
    arrays = [writer.room.empty(size, np.uint8) for size in sizes]
    for value, array in enumerate(arrays):
        array[:] = value
    for value, array in enumerate(arrays):
        assert (array == value).all()
        if array.size:
            offset = writer.room.offset_of(array)
            assert offset % 64 == 0
            seen = writer.room.memory.view(offset, np.dtype(np.uint8), array.shape)
            assert (seen == value).all()
    assert writer.room.used <= writer.room.capacity == writer.room.memory.nbytes


def test_few_slots_stay_mapped(arena, monkeypatch):
    """A writer keeps a limited number of slots mapped: the first ones."""
    monkeypatch.setattr(room_module, "MAX_MAPPED", 3)
    writer = TicketWriter(arena.fd, arena.width)
    slots = [acquire(arena) for _ in range(8)]
    kept = []
    for _ in range(3):
        for slot in slots:
            writer.room.select(slot, FIRST)
            writer.room.empty(10)[:] = slot
        kept.append([writer.room.mapped[slot] for slot in slots[:2]])
    assert len(writer.room.mapped) == 3
    # Slots used in rotation are not all mapped again.
    assert kept[0] == kept[1] == kept[2]


def test_a_worker_may_know_less_than_the_trainer(arena):
    """What another worker has committed of a slot is not committed again."""
    slot = acquire(arena)
    first, second = (TicketWriter(arena.fd, arena.width) for _ in range(2))
    first.room.select(slot, FIRST)
    second.room.select(slot, FIRST)
    second.room.reserve(MIB)
    first.room.select(slot, second.room.capacity)
    assert first.room.capacity == first.room.memory.nbytes == second.room.capacity


def test_empty_refuses_what_cannot_be(writer):
    """Negative shapes and types with Python objects are errors, and nothing is placed."""
    used = writer.room.used
    with pytest.raises(ValueError, match="negative"):
        writer.room.empty((2, -1))
    with pytest.raises(ValueError, match=r"numpy\.empty"):
        writer.room.empty(3, object)
    with pytest.raises(TypeError):
        writer.room.empty("3")
    assert writer.room.used == used


def test_find(writer):
    """Only an array that is wholly in the used part of the slot, in one piece, is found."""
    array = writer.room.empty((10, 10), np.uint8)
    for found, offset in ((array, 0), (array[1:], 10), (array.T, 0)):
        assert writer.room.offset_of(found) == offset
    beyond = writer.room.memory.view(0, np.dtype(np.uint8), (101,))
    pieces = array[:, 1:], array[::-1], array[:0], array.ravel()[1:9].view(np.int64)
    for other in (*pieces, np.empty(100, np.uint8), beyond):
        assert writer.room.offset_of(other) == -1


def test_an_indexer_must_not_keep_arrays_of_the_slot(writer):
    """A view that outlives its batch is an error, once; copies and garbage are not."""
    kept = writer.room.empty(100, np.int64)[2:]
    with pytest.raises(RuntimeError, match=r"array\.copy\(\)"):
        writer.room.end_slot()
    writer.room.select(writer.room.slot, FIRST)
    copied = writer.room.empty(3).copy()
    cycle = [writer.room.empty(10)]
    cycle.append(cycle)
    del cycle
    writer.room.end_slot()
    del kept, copied


def test_no_room_leaves_the_writer_as_it_was(writer, monkeypatch):
    """A batch without room raises MemoryError; smaller ones still pass."""
    array = writer.room.empty(10)
    array[:] = 5
    before = (writer.room.used, writer.room.capacity, writer.room.memory)
    with monkeypatch.context() as patch:
        patch.setattr(room_module, "commit", refusing(MemoryError, "no room"))
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room"):
                writer.room.empty(10 * MIB)
            assert (writer.room.used, writer.room.capacity, writer.room.memory) == before
    assert (array == 5).all()
    assert writer.room.empty(10 * MIB).size


def test_more_than_there_is(writer, monkeypatch):
    """A batch larger than the free memory is refused; Linux would kill a process instead."""
    monkeypatch.setattr(system, "available_memory", lambda: 40 * MIB)
    with pytest.raises(MemoryError, match=str(40 * MIB)):
        writer.room.reserve(50 * MIB)
    writer.room.reserve(35 * MIB)
    monkeypatch.setattr(system, "available_memory", lambda: None)
    writer.room.reserve(50 * MIB)
    # Such a system tells no more than this.
    sizes = {"SC_PAGE_SIZE": MIB, "SC_PHYS_PAGES": 300}
    monkeypatch.setattr(os, "sysconf", sizes.get, raising=False)
    with pytest.raises(MemoryError, match=str(300 * MIB)):
        writer.room.reserve(400 * MIB)


def test_wider_than_a_slot():
    """A batch larger than a slot can become raises MemoryError with the maximum."""
    file = sparse_file(8 * MIB)
    writer = TicketWriter(file.fd, 4 * MIB)
    writer.room.select(1, FIRST)
    with pytest.raises(MemoryError, match=str(4 * MIB)):
        writer.room.reserve(4 * MIB + 1)
    assert writer.room.reserve(4 * MIB) == 0
