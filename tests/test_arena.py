"""Slots are lent, grow, come back, and leave nothing behind."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cseq import arena as arena_module
from cseq._core import Block, Lease, Mapping
from cseq.arena import (
    FIRST,
    GIB,
    LARGE,
    MIB,
    SMALL,
    WINDOW,
    Arena,
    Segment,
    Writer,
    available_memory,
    default_memory_limit,
    memory_limit_of,
    oom_kills,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunScript

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about this process")


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena, closed after the test."""
    arena = Arena()
    yield arena
    arena.close()


@pytest.fixture
def writer(arena: Arena) -> Iterator[Writer]:
    """A writer that has begun with slot 0."""
    writer = Writer(arena.segment.fd, arena.segment.width)
    slot = arena.acquire()
    writer.begin(slot, arena.capacity(slot))
    yield writer
    writer.close()


def filled(arena: Arena, writer: Writer, value: int, nbytes: int) -> Any:
    """Fill a slot with a value, and take it."""
    slot = arena.acquire()
    writer.begin(slot, arena.capacity(slot))
    array = writer.empty(nbytes, np.uint8)
    array[:] = value
    del array
    writer.end()
    return take(arena, slot, writer.used, writer.capacity)


def take(arena: Arena, slot: int, used: int, capacity: int) -> Any:
    """Decode a slot, and be done with its ticket."""
    memory = arena.lend(slot, used, capacity)
    if arena.slots.vacate(slot):
        arena.release(slot)
    return memory


def whole(memory: Any, nbytes: int) -> np.ndarray[Any, Any]:
    """Make an array of the beginning of a memory."""
    array: np.ndarray[Any, Any] = memory.view(0, np.dtype(np.uint8), (nbytes,))
    return array


# -- the file -----------------------------------------------------------------------------------


def test_a_segment_takes_no_memory_yet() -> None:
    """A segment is as long as it has to be and has no pages."""
    segment = Segment.for_slots()
    assert os.fstat(segment.fd).st_size == segment.width * segment.slots
    assert os.fstat(segment.fd).st_blocks == 0
    assert not os.get_inheritable(segment.fd)
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(segment.fd)


def test_a_dropped_segment_is_closed() -> None:
    """The descriptor goes with the segment."""
    segment = Segment.create(4096)
    fd = segment.fd
    del segment
    gc.collect()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


@linux
def test_a_segment_cannot_be_cut() -> None:
    """Nobody can take the pages away under a mapping."""
    segment = Segment.create(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    segment.close()


def test_a_system_without_anonymous_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlinked temporary file does as well, with slots as wide as the file system takes."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir(tempfile.gettempdir()))
    arena = Arena()
    writer = Writer(arena.segment.fd, arena.segment.width)
    assert arena.segment.width >= 1 << 28
    made = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in made if name.startswith("cseq-")]
    memories = [filled(arena, writer, value, 5 * MIB) for value in range(3)]
    for value, memory in enumerate(memories):
        assert (whole(memory, 5 * MIB) == value).all()
    writer.close()
    arena.close()


def test_a_system_that_refuses_executable_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that a kernel does not know, or files that it refuses, are not the end."""
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no anonymous files")
    asked = []

    def refuse(_name: str, flags: int) -> int:
        asked.append(flags)
        raise OSError(errno.EINVAL, "unknown flag")

    monkeypatch.setattr(os, "memfd_create", refuse)
    segment = Segment.create(4096)
    segment.close()
    assert len(asked) == 2


def test_a_file_system_without_long_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are narrower and fewer where a file cannot be that long."""
    real = os.ftruncate

    def cut(fd: int, length: int) -> None:
        if length > 1 << 40:
            raise OSError(errno.EFBIG, "File too large")
        real(fd, length)

    monkeypatch.setattr(os, "ftruncate", cut)
    segment = Segment.for_slots()
    assert segment.width * segment.slots <= 1 << 40
    assert segment.width >= 1 << 28
    segment.close()


def test_no_file_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that can have no file says so, and nothing stays open."""
    monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(27, "too large")))
    with pytest.raises(OSError, match="too large"):
        Segment.for_slots()


# -- a worker's side ----------------------------------------------------------------------------


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
    writer = Writer(arena.segment.fd, arena.segment.width)
    slot = arena.acquire()
    writer.begin(slot, arena.capacity(slot))
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


def test_growth_is_geometric() -> None:
    """Small slots double, large ones grow by whole huge pages; none exceeds its width."""
    room = arena_module.room_of
    width = 64 * MIB
    assert room(1, 0, width) == FIRST
    assert room(FIRST + 1, FIRST, width) == 2 * FIRST
    assert room(LARGE, FIRST, width) == LARGE
    assert room(LARGE + 1, FIRST, width) == 2 * LARGE
    assert room(5 * LARGE, 3 * LARGE, width) == 5 * LARGE
    assert room(3 * LARGE - 1, LARGE, 3 * LARGE - 1) == 3 * LARGE - 1
    with pytest.raises(MemoryError, match="batch_size"):
        room(width + 1, 0, width)


def test_steady_state_makes_no_mapping(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot seen before is not mapped again, in the worker or in the trainer."""
    writer = Writer(arena.segment.fd, arena.segment.width)
    made = []

    def count(*args: Any, **kwargs: Any) -> Mapping:
        made.append(args)
        return Mapping(*args, **kwargs)

    monkeypatch.setattr(arena_module, "Mapping", count)
    for turn in range(20):
        filled(arena, writer, turn, MIB)
    assert len(made) <= 4  # at first, grown; for the writer and for the trainer
    writer.close()


def test_few_slots_stay_mapped(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer keeps a limited number of slots mapped."""
    monkeypatch.setattr(arena_module, "MAX_MAPPED", 3)
    writer = Writer(arena.segment.fd, arena.segment.width)
    slots = [arena.acquire() for _ in range(8)]
    for _ in range(2):
        for slot in slots:
            writer.begin(slot, FIRST)
            writer.empty(10)[:] = slot
    assert len(writer.mapped) == 3
    writer.close()


def test_a_worker_may_know_more_than_the_trainer(arena: Arena) -> None:
    """A capacity that the trainer never heard of, since the worker died, does no harm."""
    slot = arena.acquire()
    first, second = (Writer(arena.segment.fd, arena.segment.width) for _ in range(2))
    for writer in (first, second, first):
        writer.begin(slot, arena.capacity(slot))
        writer.empty(MIB, np.uint8)[:] = 7
        writer.end()
    memory = take(arena, slot, first.used, first.capacity)
    assert (whole(memory, MIB) == 7).all()
    first.close()
    second.close()


def test_a_worker_may_know_less_than_the_trainer(arena: Arena) -> None:
    """What another worker has committed of a slot is not committed once more."""
    slot = arena.acquire()
    first, second = (Writer(arena.segment.fd, arena.segment.width) for _ in range(2))
    first.begin(slot, FIRST)
    second.begin(slot, FIRST)
    second.place(MIB)
    first.begin(slot, second.capacity)
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
    writer.begin(0, FIRST)
    writer.empty(3)
    writer.end()
    del kept


def test_an_array_kept_since_the_slot_grew(writer: Writer) -> None:
    """An array that lies in an older mapping of the slot must not be kept either."""
    kept = writer.empty(10)
    writer.empty(10 * MIB)
    writer.empty(10)
    with pytest.raises(RuntimeError):
        writer.end()
    del kept


def test_dropped_arrays_are_no_error(writer: Writer) -> None:
    """Arrays that are dropped, or held by nothing but garbage, are fine; and so are copies."""
    array = writer.empty(10)
    kept = array.copy()
    del array
    writer.end()
    writer.begin(0, FIRST)
    cycle: list[Any] = [writer.empty(10)]
    cycle.append(cycle)
    del cycle
    writer.end()
    assert kept.size == 10


def test_a_tensor_of_the_slot_must_not_be_kept(writer: Writer) -> None:
    """A tensor on an array from `empty` belongs to the batch as well."""
    torch = pytest.importorskip("torch")
    kept = torch.from_numpy(writer.empty(10, np.float32))[3:]
    with pytest.raises(RuntimeError):
        writer.end()
    del kept
    writer.begin(0, FIRST)
    writer.end()


# -- when memory is short -----------------------------------------------------------------------


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
        patch.setattr(arena_module, "commit", full)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room"):
                writer.empty(10 * MIB)
            assert (writer.used, writer.capacity, writer.memory) == before
    assert (array == 5).all()
    assert writer.empty(10 * MIB).size


def test_a_full_file_is_a_memory_error() -> None:
    """What the system refuses to commit is a MemoryError with the number of bytes."""
    segment = Segment.create(1 << 20)
    writer = Writer(segment.fd, 1 << 30)
    writer.begin(0, FIRST)
    with pytest.raises(MemoryError, match=str(2 * MIB - FIRST)):
        writer.place(MIB + 1)
    assert writer.place(100) == 0
    writer.close()
    segment.close()


def test_more_than_there_is(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch larger than the free memory is refused; Linux would kill somebody instead."""
    monkeypatch.setattr(arena_module, "available_memory", lambda: 40 * MIB)
    with pytest.raises(MemoryError, match=str(40 * MIB)):
        writer.place(50 * MIB)
    writer.place(35 * MIB)
    monkeypatch.setattr(arena_module, "available_memory", lambda: None)
    writer.place(50 * MIB)


def test_wider_than_a_slot() -> None:
    """A batch larger than a slot can become is a MemoryError that says how large it may be."""
    segment = Segment.create(4 * MIB, 2)
    writer = Writer(segment.fd, segment.width)
    writer.begin(1, FIRST)
    with pytest.raises(MemoryError, match=str(4 * MIB)):
        writer.place(4 * MIB + 1)
    assert writer.place(4 * MIB) == 0
    writer.close()
    segment.close()


LIMITED = """
import resource
from pathlib import Path
from cseq.arena import MIB, Arena, Writer
arena = Arena()
writer = Writer(arena.segment.fd, arena.segment.width)
slot = arena.acquire()
writer.begin(slot, arena.capacity(slot))
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, resource.RLIM_INFINITY))
try:
    writer.place(256 * MIB)
except MemoryError as error:
    print("in the worker:", error)
writer.empty(8 * MIB, "u1")[:] = 1
try:
    arena.lend(slot, writer.used, 256 * MIB)
except MemoryError as error:
    print("in the trainer:", error)
arena.release(slot)
arena.close()
"""


@linux
def test_no_address_space() -> None:
    """What cannot be mapped is a MemoryError; the slot stays with whoever had it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == ""
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "in the worker",
        "in the trainer",
    ]


def test_no_room_for_a_new_slot(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that cannot be made is a MemoryError, and is tried again later."""
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "commit", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        for _ in range(2):
            with pytest.raises(MemoryError, match="full"):
                arena.acquire()
    assert arena.acquire() == 0


def test_all_slots_in_use(arena: Arena) -> None:
    """When there can be no more slots, that is a MemoryError."""
    arena.segment.slots = 3
    assert [arena.acquire() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(MemoryError, match="3 slots"):
        arena.acquire()
    arena.release(1)
    assert arena.acquire() == 1


# -- the trainer's side -------------------------------------------------------------------------


def test_the_lowest_free_slot_is_taken(arena: Arena) -> None:
    """Slots are used again, the lowest first; new ones are made when none is free."""
    assert [arena.acquire() for _ in range(40)] == list(range(40))
    for slot in (30, 7, 12):
        arena.release(slot)
    assert [arena.acquire() for _ in range(4)] == [7, 12, 30, 40]
    assert all(arena.capacity(slot) == FIRST for slot in range(41))


def test_an_error_report_always_fits(arena: Arena) -> None:
    """The first bytes of a slot are there before any worker sees it."""
    slot = arena.acquire()
    assert arena.capacity(slot) >= FIRST
    assert os.fstat(arena.segment.fd).st_blocks * 512 >= FIRST


def test_small_batches_are_copied_out(arena: Arena, writer: Writer) -> None:
    """A small batch gives its slot back at once."""
    memories = [filled(arena, writer, value, 1000) for value in range(5)]
    assert all(isinstance(memory, Block) for memory in memories)
    assert [whole(memory, 1000)[-1] for memory in memories] == list(range(5))
    assert (arena.leased, arena.copies) == (0, 0)
    assert arena.acquire() == 1


def test_large_batches_are_leased(arena: Arena, writer: Writer) -> None:
    """A large batch keeps its slot until the last view is gone."""
    first = filled(arena, writer, 1, SMALL + 1)
    second = filled(arena, writer, 2, SMALL + 1)
    assert isinstance(first, Lease)
    assert arena.leased == 2
    assert arena.leased_bytes == arena.capacity(1) + arena.capacity(2)
    view = whole(first, SMALL)
    del first
    assert arena.leased == 2
    part = view[100:].view(np.int8)[::2][3:7]
    del view
    assert arena.acquire() == 3
    assert (part == 1).all()
    del part
    assert (arena.leased, arena.leased_bytes) == (1, arena.capacity(2))
    assert arena.acquire() == 1
    assert (whole(second, SMALL) == 2).all()


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "memoryview": lambda array: memoryview(array)[5:],
    "frombuffer": lambda array: np.frombuffer(array, np.uint8)[4:],
    "ndarray": lambda array: np.ndarray(5, np.uint8, array)[1:],
    "dlpack": lambda array: np.from_dlpack(array)[3:],
    "asarray": lambda array: np.asarray(memoryview(array))[3:],
    "broadcast": lambda array: np.broadcast_to(array, (2, *array.shape))[1, 3:],
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_whatever_holds_the_data_keeps_the_slot(
    arena: Arena, writer: Writer, holder: Callable[[Any], Any]
) -> None:
    """The slot is not used again while anything can still see its data."""
    held = holder(whole(filled(arena, writer, 7, MIB), MIB))
    for value in range(3):
        filled(arena, writer, value, MIB)
    assert arena.leased == 1
    assert np.asarray(held)[0] == 7
    del held
    gc.collect()
    assert arena.leased == 0


def test_tensors_keep_the_slot(arena: Arena, writer: Writer) -> None:
    """A tensor made from a batch, or a slice of one, keeps the slot."""
    torch = pytest.importorskip("torch")
    held = torch.from_numpy(whole(filled(arena, writer, 7, MIB), MIB))[5:].view(-1)[2:4]
    filled(arena, writer, 1, MIB)
    assert arena.leased == 1
    assert held.tolist() == [7, 7]
    del held
    assert arena.leased == 0


def test_a_pickled_view_is_a_copy(arena: Arena, writer: Writer) -> None:
    """A pickled view has its own memory."""
    array = pickle.loads(pickle.dumps(whole(filled(arena, writer, 7, MIB), MIB)[:10]))
    assert arena.leased == 0
    assert array.tolist() == [7] * 10


def test_slots_are_warm(arena: Arena, writer: Writer) -> None:
    """Batches that are dropped in time all lie in the same slot."""
    addresses = {filled(arena, writer, 0, MIB).address for _ in range(10)}
    assert len(addresses) == 1
    assert arena.copies == 0


@pytest.mark.parametrize(
    ("limit", "leases"), [(0, 0), (3 * MIB, 1), (4 * MIB, 2), ("7 MiB", 3), (None, 6)]
)
def test_too_many_held_batches_are_copied(
    limit: int | str | None, leases: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond memory_limit, batches are copied, intact, with one warning; later ones may be lent."""
    arena = Arena(limit)
    writer = Writer(arena.segment.fd, arena.segment.width)
    with caplog.at_level(logging.WARNING, "cseq"):
        memories = [filled(arena, writer, value, 2 * MIB) for value in range(6)]
    assert arena.leased == leases
    assert arena.copies == 6 - leases
    assert len(caplog.records) == (leases < 6)
    assert all("memory_limit" in record.getMessage() for record in caplog.records)
    for value, memory in enumerate(memories):
        assert (whole(memory, 2 * MIB) == value).all()
    del memory
    memories.clear()
    assert isinstance(filled(arena, writer, 0, 2 * MIB), Lease) == (leases > 0)
    assert arena.leased_bytes == 0
    writer.close()
    arena.close()


def test_too_many_slots_held(arena: Arena, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of lent slots is limited as well: each is a mapping of its own."""
    monkeypatch.setattr(arena_module, "MAX_LEASED", 3)
    memories = [filled(arena, writer, value, SMALL + 1) for value in range(5)]
    assert (arena.leased, arena.copies) == (3, 2)
    assert [whole(memory, 1)[0] for memory in memories] == list(range(5))


def test_leases_end_on_any_thread(arena: Arena, writer: Writer) -> None:
    """A lease may end on another thread, while this one goes on."""
    memories: list[Any] = []

    def drop() -> None:
        while (memory := wait()) is not None:
            del memory

    ready = threading.Semaphore(0)

    def wait() -> Any:
        ready.acquire()
        return memories.pop(0)

    thread = threading.Thread(target=drop)
    thread.start()
    for value in range(200):
        memories.append(filled(arena, writer, value % 250, SMALL + 1))
        ready.release()
    memories.append(None)
    ready.release()
    thread.join()
    assert (arena.leased, arena.leased_bytes) == (0, 0)


def test_leases_end_inside_garbage_collection(arena: Arena, writer: Writer) -> None:
    """A lease that is part of a cycle ends when the collector finds it."""
    cycle: list[Any] = [whole(filled(arena, writer, 1, MIB), MIB)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert arena.leased == 0


def test_leases_outlive_the_arena(writer: Writer, arena: Arena) -> None:
    """Data stays intact after the arena was closed and is gone itself."""
    other = Arena()
    hand = Writer(other.segment.fd, other.segment.width)
    memory = filled(other, hand, 9, MIB)
    hand.close()
    other.close()
    other.close()
    del other, hand
    gc.collect()
    filled(arena, writer, 1, MIB)
    assert (whole(memory, MIB) == 9).all()
    whole(memory, MIB)[:] = 3
    assert (whole(memory, MIB) == 3).all()


@linux
def test_nothing_is_left_when_the_last_view_is_gone() -> None:
    """Descriptor and mappings go with the arena and its leases; even if it was not closed."""

    def state() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        return maps.count("memfd:cseq"), len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = state()
    for close in (True, False):
        arena = Arena()
        writer = Writer(arena.segment.fd, arena.segment.width)
        view = whole(filled(arena, writer, 9, MIB), MIB)[5:]
        if close:
            arena.close()
            writer.close()
        assert state() > before
        del arena, writer
        gc.collect()
        assert view[0] == 9
        assert state() == (before[0] + 1, before[1])
        del view
        assert state() == before


def test_look_does_not_take(arena: Arena, writer: Writer) -> None:
    """A slot can be looked at without being lent."""
    writer.empty(MIB, np.uint8)[:] = 4
    memory = arena.look(0, writer.capacity)
    assert whole(memory, MIB)[-1] == 4
    assert arena.leased == 0
    arena.release(0)


@given(data=st.data())
def test_no_view_ever_changes(data: st.DataObject) -> None:
    """Whatever is held, sliced and dropped in whatever order: what is held keeps its values."""
    arena = Arena(data.draw(st.sampled_from([0, 200_000, None])))
    writer = Writer(arena.segment.fd, arena.segment.width)
    held: list[tuple[int, Any]] = []
    for value in range(data.draw(st.integers(1, 12))):
        nbytes = data.draw(st.sampled_from([100, SMALL, SMALL + 1, 100_000]))
        held.append((value, whole(filled(arena, writer, value, nbytes), nbytes)))
        if data.draw(st.booleans()):
            number, array = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if data.draw(st.booleans()):
                held.append((number, array[len(array) // 2 :].reshape(-1, 1)))
            del array
        assert all((array == number).all() for number, array in held)
    writer.close()
    arena.close()
    assert all((array == number).all() for number, array in held)


# -- how much memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(0, 0), (10**12, 10**12), (np.int64(5), 5), ("2GiB", 2 * GIB), ("500 MB", 500 * 10**6),
     ("1.5 KiB", 1536), ("7B", 7), ("3 TiB", 3 << 40), ("1kB", 1000)],
)  # fmt: skip
def test_memory_limits(value: Any, nbytes: int) -> None:
    """A limit is a number of bytes, or a text with a unit."""
    assert memory_limit_of(value) == nbytes


@pytest.mark.parametrize("value", [-1, "2", "GiB", "2 gib", "-1GiB", "2GiB ram", "1e9B", ""])
def test_wrong_memory_limits(value: Any) -> None:
    """A limit that means nothing is an error that shows it."""
    with pytest.raises(ValueError, match="memory_limit"):
        memory_limit_of(value)


@pytest.mark.parametrize("value", [2.5, True, [], b"2GiB"])
def test_memory_limits_of_other_types(value: Any) -> None:
    """A limit of another type is an error that names the type."""
    with pytest.raises(TypeError, match=type(value).__name__):
        memory_limit_of(value)


def files(root: Path, contents: dict[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def test_the_default_is_a_quarter_of_the_machine(tmp_path: Path) -> None:
    """Without control groups, the machine's memory counts."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert default_memory_limit(tmp_path) == ram // 4
    assert 0 < memory_limit_of(None) <= ram // 4


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("contents", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "4000\n"}, 1000),
        ({"proc/self/cgroup": "0::/a b/c\n", f"{V2}/a b/memory.max": "4000\n",
          f"{V2}/a b/c/memory.max": "max\n"}, 1000),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/memory.max": "8000\n",
          f"{V2}/a/b/memory.max": "4000\n"}, 1000),
        ({"proc/self/cgroup": "2:cpu:/x\n1:memory:/a\n",
          f"{V1}/a/memory.limit_in_bytes": "4000\n"}, 1000),
        ({"proc/self/cgroup": "1:hugetlb,memory:/host/path\n",
          f"{V1}/memory.limit_in_bytes": "4000\n"}, 1000),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "1:memory:/\n",
          f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)  # fmt: skip
def test_the_default_obeys_control_groups(
    tmp_path: Path, contents: dict[str, str], limit: int | None
) -> None:
    """The smallest limit of all groups above this process counts, in both versions."""
    expected = default_memory_limit(tmp_path) if limit is None else limit
    assert default_memory_limit(files(tmp_path, contents)) == expected


def test_available_memory(tmp_path: Path) -> None:
    """What is free in the machine and in every group, pages of files included, is available."""
    assert available_memory(tmp_path) is None
    machine = {"proc/meminfo": "MemTotal: 90 kB\nMemAvailable: 40 kB\nSwapFree: 10 kB\n"}
    assert available_memory(files(tmp_path, machine)) == 50 * 1024
    group = {
        "proc/self/cgroup": "0::/a\n",
        f"{V2}/a/memory.max": "10000\n",
        f"{V2}/a/memory.current": "9000\n",
        f"{V2}/a/memory.stat": "anon 5\ninactive_file 500\n",
    }
    assert available_memory(files(tmp_path, group)) == 1500
    older = {
        "proc/self/cgroup": "1:memory:/a\n",
        f"{V1}/a/memory.limit_in_bytes": "10000\n",
        f"{V1}/a/memory.usage_in_bytes": "10500\n",
        f"{V1}/a/memory.stat": "inactive_file 1\ntotal_inactive_file 400\n",
    }
    assert available_memory(files(tmp_path, older)) == 0


def test_kills_for_want_of_memory(tmp_path: Path) -> None:
    """The count of the innermost control group that has one, in both versions."""
    assert oom_kills(tmp_path) is None
    older = {
        "proc/self/cgroup": "1:memory:/a/b\n",
        f"{V1}/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    assert oom_kills(files(tmp_path, older)) == 3
    newer = {
        "proc/self/cgroup": "0::/a\n",
        f"{V2}/a/memory.events": "low 0\nmax 9\noom 8\noom_kill 7\noom_group_kill 0\n",
    }
    assert oom_kills(files(tmp_path, newer)) == 7


@linux
def test_this_machine_has_memory() -> None:
    """The real files are understood."""
    free = available_memory()
    assert free is not None
    assert free > 0


# -- memory comes back --------------------------------------------------------------------------


def committed(arena: Arena) -> int:
    """Bytes that the file really takes."""
    return os.fstat(arena.segment.fd).st_blocks * 512


def through(arena: Arena, writer: Writer, nbytes: int, value: int = 0) -> Any:
    """Send one batch through the lowest free slot."""
    return whole(filled(arena, writer, value, nbytes), nbytes)


@linux
@pytest.mark.parametrize("nbytes", [100, MIB, 5 * MIB])
def test_slots_shrink_after_a_rare_huge_batch(arena: Arena, writer: Writer, nbytes: int) -> None:
    """Two windows later, pages that no batch needed are given back; what is held stays."""
    huge = [through(arena, writer, 60 * MIB, value) for value in range(3)]
    held = huge.pop()
    del huge
    assert committed(arena) >= 180 * MIB
    for number in range(3 * WINDOW):
        assert (through(arena, writer, nbytes, number % 256) == number % 256).all()
    assert 60 * MIB <= committed(arena) <= 61 * MIB + 5 * nbytes
    assert held.min() == held.max() == 2
    del held
    for _ in range(WINDOW):
        through(arena, writer, nbytes)
    assert committed(arena) <= MIB + 5 * nbytes
    assert (through(arena, writer, 60 * MIB, 9) == 9).all()


@linux
def test_slots_that_were_held_once_are_given_back(arena: Arena, writer: Writer) -> None:
    """Slots that only many held batches needed do not stay committed."""
    held = [through(arena, writer, 2 * MIB, value) for value in range(30)]
    assert committed(arena) >= 60 * MIB
    held.clear()
    for _ in range(3 * WINDOW):
        through(arena, writer, 2 * MIB)
    assert committed(arena) <= 5 * MIB


@linux
def test_the_limit_is_for_free_slots_too() -> None:
    """What is free and committed counts as what is held does, but for what tickets need."""
    arena = Arena(20 * MIB, tickets=4)
    writer = Writer(arena.segment.fd, arena.segment.width)
    slots = [arena.acquire() for _ in range(30)]
    for slot in slots:
        writer.begin(slot, arena.capacity(slot))
        writer.place(2 * MIB)
        arena.look(slot, writer.capacity)
    for slot in slots:
        arena.release(slot)
    assert committed(arena) == 60 * MIB
    for _ in range(WINDOW):
        through(arena, writer, 2 * MIB)
    assert 8 * MIB <= committed(arena) <= 28 * MIB
    writer.close()
    arena.close()


@linux
def test_page_locked_slots_shrink_unlocked(writer: Writer) -> None:
    """A mapping is unlocked before its pages are given back: a device would go on using them."""
    locked: dict[int, int] = {}

    class Locks:
        def register(self, memory: Any, /) -> bool:
            locked[memory.address] = memory.nbytes
            return True

        def unregister(self, memory: Any, /) -> None:
            del locked[memory.address]

    arena = Arena(locks=Locks())
    writer = Writer(arena.segment.fd, arena.segment.width)
    through(arena, writer, 60 * MIB)
    assert max(locked.values()) >= 60 * MIB
    for _ in range(3 * WINDOW):
        through(arena, writer, MIB)
    assert max(locked.values()) <= 2 * MIB
    writer.close()
    arena.close()


RARE = """
import numpy as np
import cseq
from cseq import testing

class Worker:
    kept = None
    def __getitem__(self, indices):
        number = int(indices[0])
        made = np.full(4_000_000 if 20 <= number < 32 else SIZE, number)
        self.kept = made if number % 5 == 0 else None
        return made

def committed(m):
    return testing.slots(m).committed / 2**20

m = cseq.MPSequence(Worker, 700, batch_size=1, num_workers=2, shuffle=False, out_type="null")
with m.start() as batches:
    for number, batch in enumerate(batches):
        assert batch.min() == batch.max() == number
        if number == 31:
            print(committed(m) > 300)
    del batch
    print(committed(m) < 32)
"""


@linux
@pytest.mark.parametrize("size", [10, 50_000])
def test_a_script_with_rare_huge_batches(run_script: RunScript, size: int) -> None:
    """Workers that keep arrays, and small batches that go the short way, do not hold memory."""
    done = run_script(RARE.replace("SIZE", str(size)))
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")
