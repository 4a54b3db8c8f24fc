"""The indexer's large arrays are made in the slot, and may still be kept.

In threads, they reuse the memory of arrays that the loop has dropped.
"""

import contextvars
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import held
import numpy as np
import pytest
from refusing import refusing
from ringing import Trainer, make_ring
from waiting import together

import cseq
from cseq._memory import Reuse, SlotAllocator, fork
from cseq._work import Runner
from cseq.encoding import _room as room_module
from cseq.encoding import codec
from cseq.encoding._codec import TicketWriter
from cseq.encoding._room import KEEPS
from cseq.encoding.transport import SlotReader
from cseq.errors import WorkerError
from cseq.memory._slots import SlotTable
from cseq.memory.arena import Arena
from cseq.system import MIB

pytestmark = pytest.mark.needs("Linux")

# Elements of float32, which make 1 MiB.
SIZE = 1 << 18
SOURCE = np.arange(SIZE, dtype=np.float32)


class Bench:
    """A worker's and a trainer's side of one ring, with numpy's allocator in between."""

    def __init__(self):
        self.arena = Arena()
        arena, ring = self.arena, make_ring(cells=1, runners=1)
        self.trainer = Trainer(ring, slots=arena.slots)
        self.runner = Runner(ring, 0, 1, last=True)
        slots = SlotTable(arena.fd, arena.width, arena.most, 1)
        self.writer = TicketWriter(arena.fd, arena.width, slots)
        self.writer.room.slot_allocator = self.placement = SlotAllocator()

    def batch(self, make):
        """Send one ticket through; return what the trainer reads, on the slot itself."""
        assert self.runner.claim()
        self.writer.begin_ticket()
        made = make()
        record = self.writer.write(self.runner, made)
        del made
        self.writer.publish(self.runner, record)
        *_, slot, capacity, record = self.trainer.take()
        return codec.decode(self.arena.mapping_of(slot, capacity), record)

    def learn(self, make):
        """Let the slot grow, and the allocator learn the sizes."""
        for _ in range(2):
            self.batch(make)


@pytest.fixture
def bench():
    """Return a bench; numpy's allocator is replaced in the test's context only."""
    context = contextvars.copy_context()
    bench = context.run(Bench)
    bench.batch = functools.partial(context.run, bench.batch)
    yield bench
    bench.writer.room.close()
    bench.arena.close()


def fresh():
    """Make an array in the usual way."""
    return SOURCE + 1


def resident():
    """Return this process's resident memory in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_was_in_the_last_batch_is_made_in_the_slot(bench):
    """From the third batch on, an array is made in its final place, and not copied."""
    lives = []

    def watched():
        made = fresh()
        lives.append(bench.placement.live)
        return made

    for _ in range(4):
        np.testing.assert_array_equal(bench.batch(watched), SOURCE + 1)
    assert lives == [0, 0, 1, 1]
    assert bench.placement.live == 0


def test_what_is_written_meanwhile_is_not_lost(bench):
    """A thread may fill an array of the slot while its batch is published."""
    bench.learn(lambda: (fresh(), fresh()))
    kept = []

    def two():
        made = fresh(), fresh()
        kept.append(made[1])
        return made

    first = bench.batch(two)
    kept[0][:] = 5
    np.testing.assert_array_equal(first[1], SOURCE + 1)
    bench.learn(lambda: SOURCE * 2)
    assert kept[0].min() == kept[0].max() == 5


@pytest.mark.parametrize("count", [10, 100_000])
def test_arrays_of_empty_may_be_kept(bench, count):
    """An array of `empty`, small or large, belongs to the indexer while it keeps the array."""
    kept = []
    for number in range(8):

        def keep(number=number):
            kept.append(bench.writer.room.empty(count))
            kept[-1][:] = number
            return kept[-1]

        batch = bench.batch(keep)
        assert batch.min() == batch.max() == number
        batch[:] = -1
    for number, array in enumerate(kept):
        assert array.min() == array.max() == number
    assert sum(not array.flags.owndata for array in kept) == KEEPS


def test_an_exception_when_memory_is_short(bench, monkeypatch):
    """Only its text is written, which fits into the room that a slot always has."""
    assert bench.runner.claim()
    bench.writer.begin_ticket()
    monkeypatch.setattr(room_module, "commit", refusing(MemoryError, "no room"))
    bench.writer.fail(bench.runner, ValueError("y" * 50_000))
    cell, _, _, *where = bench.trainer.take()
    error = SlotReader(bench.arena).error(cell, *where)
    assert type(error) is WorkerError
    assert str(error).startswith("ValueError: yyy")


def test_temporaries_are_not_made_in_the_slot(bench):
    """Only what is in the batch at the end takes room in the slot."""

    def with_temporaries():
        first = np.ones(SIZE, np.float64)
        second = first * 2
        return (second + first).astype(np.float32)

    bench.learn(with_temporaries)
    bench.batch(with_temporaries)
    assert SIZE * 4 <= bench.writer.room.used < SIZE * 4 + 4096


def test_zeros_beside_the_slot_take_no_memory(bench):
    """The system's memory is zero, and is not cleared again."""
    grown = 0

    def beside():
        nonlocal grown
        before = resident()
        zeros = np.zeros(1 << 29, np.uint8)
        zeros[0] = 1
        grown = resident() - before
        return fresh()

    bench.learn(fresh)
    np.testing.assert_array_equal(bench.batch(beside), SOURCE + 1)
    assert grown < 1 << 27


def test_an_array_that_is_resized(bench):
    """An array that grows or shrinks in place leaves the slot, with its content."""

    def resized(count):
        made = fresh()
        made.resize(count, refcheck=False)
        return made

    bench.learn(fresh)
    for count in (SIZE // 2, 2 * SIZE, SIZE):
        batch = bench.batch(functools.partial(resized, count))
        np.testing.assert_array_equal(batch[: min(count, SIZE)], (SOURCE + 1)[:count])


@pytest.mark.skipif(
    getattr(sys.flags, "thread_inherit_context", 0),
    reason="a thread inherits the context: by default without a GIL, where there is no placement",
)
def test_other_threads_allocate_as_ever(bench):
    """The indexer's threads have their own contexts."""
    bench.learn(fresh)
    made = []

    def make():
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: made.append(fresh())).result()
        made.append(bench.placement.count)
        return fresh()

    bench.batch(make)
    assert made[1] == 0


# In bytes; malloc maps such a block each time, with zeros.
WIDE = 40 * MIB
MARK = 77


def in_thread(function):
    """Call a function in a worker's thread."""

    def work():
        with Reuse():
            return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def dropped(nbytes):
    """Make an array, mark its memory, and drop it."""
    np.empty(nbytes, np.uint8).fill(MARK)


def test_memory_is_used_again_for_arrays_of_about_its_size():
    """A block serves arrays up to an eighth smaller; an array of zeros is zero."""

    def found():
        first = []
        for nbytes in (WIDE, WIDE - 3 * MIB, WIDE - 6 * MIB):
            dropped(WIDE)
            first.append(int(np.empty(nbytes, np.uint8)[0]))
        dropped(WIDE)
        zeros = np.zeros(WIDE, np.uint8)
        return [*first, int(zeros.max())]

    assert in_thread(found) == [MARK, MARK, 0, 0]


def test_an_array_of_a_thread_is_resized():
    """It keeps its content, and its memory is reused for arrays of the new size."""

    def resized():
        array = np.full(WIDE, MARK, np.uint8)
        array.resize(2 * WIDE, refcheck=False)
        array.resize(WIDE - MIB, refcheck=False)
        array.resize(WIDE, refcheck=False)
        kept = bool((array[: WIDE - MIB] == MARK).all())
        del array
        return kept, int(np.empty(WIDE, np.uint8)[0])

    assert in_thread(resized) == (True, MARK)


def test_arrays_outlive_their_thread():
    """They stay intact, and any thread may free them; then nothing is kept."""
    before = resident()
    arrays = in_thread(lambda: [np.full(WIDE, number, np.uint8) for number in range(3)])
    assert [(int(array.min()), int(array.max())) for array in arrays] == [(0, 0), (1, 1), (2, 2)]
    del arrays
    assert resident() - before < WIDE // 2


def test_free_memory_is_bounded_and_ends_with_the_threads():
    """At most 128 MiB are free, the oldest goes first; without a worker, none are."""
    before = resident()

    def held():
        arrays = [np.full(WIDE, MARK, np.uint8) for _ in range(5)]
        arrays.clear()
        return resident() - before

    assert 3 * WIDE // 2 < in_thread(held) < 4 * WIDE
    assert resident() - before < WIDE // 2


def test_a_forked_process_frees_arrays_of_threads():
    """Its copy of the table of free memory is empty."""

    def forked():
        dropped(WIDE)
        array = np.full(WIDE, MARK, np.uint8)
        child = fork()
        if child == 0:
            was = int(array.max())
            del array
            os._exit(0 if was == MARK and np.empty(WIDE, np.uint8)[0] == 0 else 1)
        return os.waitpid(child, 0)[1]

    assert in_thread(forked) == 0


def test_many_threads_make_and_drop_arrays():
    """No memory belongs to two arrays at a time, even if other threads drop them."""
    left = []
    wrong = []

    def work(number):
        with Reuse():
            for k in range(300):
                array = np.empty(MIB // 8 * (1 + k % 3), np.uint8)
                array[:: MIB // 16] = number
                left.append((array, number))
                del array
                array, written = left.pop(0)
                if (array[:: MIB // 16] != written).any():
                    wrong.append(written)

    together(*(functools.partial(work, number) for number in range(4)))
    assert not wrong


@pytest.mark.parametrize("make", [np.empty, cseq.empty])
def test_what_the_loop_drops_is_used_again(make):
    """A batch is in an earlier one's memory, once the loop has dropped that one."""

    class Found:
        def __getitem__(self, indices):
            batch = make(WIDE, np.uint8)
            found, batch[0] = batch[0], MARK
            return batch, found

    with cseq.MTSequence(Found, 8, 1, batch_size=1, buffer=1, out_type="null").start() as batches:
        assert [int(found) for _, found in batches][4:] == [MARK] * 4


KEEPING = """
import numpy as np
import cseq
import held
from cseq import _memory, testing
from cseq.processes import deaths
from cseq.encoding._room import KEEPS
from waiting import until
deaths.TRIES = 1000  # all workers come to the fatal step at about the same time
class Worker:
    def __init__(self):
        self.kept, self.count = [], 0
    def __getitem__(self, indices):
        for array, number in self.kept:
            assert array.min() == array.max() == number
        made = np.full(30_000, indices[0]), cseq.empty(20_000)
        made[1][:] = indices[0]
        self.kept = [*self.kept[-1:], (made[self.count % 2], indices[0])]
        self.count += 1
        return made
def few():
    testing.await_workers(m)
    slots = held.slots(m)
    return slots.taken == 0 and slots.owned <= 2 * KEEPS
assert _memory.DEBUG
m = cseq.MPSequence(Worker, 300, batch_size=1, num_workers=2, buffer=6, out_type="null",
                    shuffle=False, max_restarts=1000)
with m.start() as batches:
    for number, made in enumerate(batches):
        assert all(a.min() == a.max() == number for a in made), number
        for array in made:
            array[:] = -1
    del made, array
    assert number == 299
    restarts = m.stats().restarts
    until(few)  # one may be in the place of another
    print(restarts > 0, held.slots(m).leased, held.slots(m).total <= 20)
"""


@pytest.mark.parametrize("point", ["index", "encode", "taken", "named", "publish", "published"])
def test_deaths_of_workers_that_keep_arrays(run_script, debug_build, point):
    """A worker that dies while it changes slots loses no batch, and no slot."""
    path = f"{debug_build}{os.pathsep}{os.path.dirname(held.__file__)}"
    done = run_script(KEEPING, CSEQ_FAULT=f"{point}:23", PYTHONPATH=path)
    assert (done.stdout, done.stderr.count("Error")) == ("True 0 True\n", 0), done.stderr
