"""A forked process shares the held batches: their slots are pinned for the epoch."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from forking import in_child
from slots import filled, whole

from cseq._memory import fork
from cseq.encoding._codec import TicketWriter
from cseq.memory.arena import Arena
from cseq.system import MIB

pytestmark = pytest.mark.needs("fork")

NBYTES = MIB


def held(arena, value):
    """Make an array on a leased slot."""
    writer = TicketWriter(arena.fd, arena.width)
    array = whole(filled(arena, writer, value, NBYTES), NBYTES)
    writer.room.close()
    return array


def test_a_leased_slot_is_not_used_again_before_the_next_epoch(arena):
    """It holds even if the parent drops its batch; a child that drops it frees nothing."""
    array = held(arena, 1)
    slots, reader, writer = arena.slots, *os.pipe()
    child = os.fork()
    if not child:
        # Wait until the parent has dropped its own array, and filled another slot.
        os.read(reader, 1)
        good = array.min() == array.max() == 1
        del array
        os._exit(0 if good and slots.is_leased(1) else 1)
    del array
    assert slots.leased == 0
    assert slots.is_leased(1)
    other = held(arena, 2)
    assert slots.is_leased(2)
    os.write(writer, b"!")
    assert os.waitpid(child, 0)[1] == 0
    assert slots.is_leased(1)
    arena.tidy()
    assert not slots.is_leased(1)
    assert slots.is_leased(2)
    assert slots.take() == 1
    assert other.min() == other.max() == 2
    os.close(reader)
    os.close(writer)


def test_a_lease_that_outlives_the_epoch_frees_its_slot(arena):
    """It holds no matter which ends last."""
    array = held(arena, 1)
    for _ in range(2):
        assert in_child(lambda: True)
    arena.tidy()
    assert arena.slots.is_leased(1)
    assert arena.slots.leased_bytes > 0
    del array
    assert not arena.slots.is_leased(1)
    assert arena.slots.leased_bytes == 0


def test_what_is_pinned_counts_for_the_limit():
    """Beyond the limit, batches are copied from their slots."""
    arena = Arena(5 * NBYTES)
    for number in range(8):
        array = held(arena, number)
        assert in_child(lambda: True)
    assert array.min() == array.max() == 7
    assert arena.copies > 0
    assert arena.slots.leased_bytes <= 5 * NBYTES
    del array
    arena.tidy()
    assert arena.slots.leased_bytes == 0
    arena.close()


def test_a_childs_own_children_pin_nothing(arena):
    """A child's copy of the table is not the owner, and would never unpin."""
    arrays = [held(arena, 1)]
    assert in_child(lambda: in_child(lambda: bool(arrays[0].max() == 1)))
    arena.tidy()
    arrays.clear()
    assert not arena.slots.is_leased(1)


def test_leases_begin_and_end_while_processes_are_forked(arena):
    """Each slot is free in the end, and is never given out twice."""
    slots, ending = arena.slots, threading.Event()

    def hold():
        arrays = []
        while not ending.is_set():
            arrays.append(held(arena, 1))
            if len(arrays) > 3:
                arrays.clear()

    with ThreadPoolExecutor(3) as pool:
        holding = [pool.submit(hold) for _ in range(3)]
        for _ in range(10):
            child = fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            arena.tidy()
        ending.set()
    assert [each.result() for each in holding] == [None] * 3
    arena.tidy()
    assert slots.spare()[1] == 0
    assert slots.leased == slots.leased_bytes == 0


HELD = """
import numpy as np
import cseq
from cseq import testing
class Worker:
    def __getitem__(self, indices):
        return np.full((len(indices), 1 << 20), indices[0], np.int64)  # 8 MiB
def private(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private")) >> 10
options = dict(batch_size=1, num_workers=2, shuffle=False, out_type="null", start_method="fork")
m = cseq.MPSequence(Worker, 16, buffer=4, **options)
with m.start() as batches:
    held = list(batches)
again = cseq.MPSequence(np.arange(8), 8, **options)
with again.start() as batches:
    testing.await_workers(again)
    print([private(pid) < 64 for pid in testing.pids(again)])
    del held[8:]
    testing.kill(again, 0)
    print(len(list(batches)), [int(batch[0, 0]) == batch.max() for batch in held] == [True] * 8)
"""


@pytest.mark.needs("Linux")
def test_held_batches_are_not_copied_into_forked_workers(run_script):
    """Of 128 MiB of held batches, some from a manager that has ended, a worker copies none."""
    done = run_script(HELD)
    assert done.stdout == "[True, True]\n8 True\n"


FORKING = """
import os, sys, threading
import numpy as np
import cseq
class Forking:
    '''Forks, from this thread or another, while arrays lie in the slot.'''
    def __init__(self):
        self.children = []
        self.kept = None
    def __getitem__(self, indices):
        number = int(indices[0])
        made = np.full(100_000, number), cseq.empty(100_000)
        made[1][:] = number
        if number % 3 == 0:
            self.kept = made[1]
        before = None if self.kept is None else int(self.kept[0])
        (reader, writer), (seen, looked) = os.pipe(), os.pipe()
        def fork():
            child = os.fork()
            if not child:
                good = all(a.min() == a.max() == number for a in made)
                os.write(looked, b"!")
                mine = np.full(100_000, 3.0), cseq.empty(100_000)
                mine[1][:] = 4
                os.read(reader, 1)  # some batches later
                good = good and mine[0].max() == 3 and mine[1].max() == 4
                os._exit(0 if good else 1)
            self.children.append((child, writer))
        if number % 2:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        else:
            fork()
        os.read(seen, 1)
        for end in (reader, seen, looked):
            os.close(end)
        assert before is None or self.kept[0] == before
        if len(self.children) == 6:
            for child, end in self.children:
                os.write(end, b"!")
                os.close(end)
                assert os.waitpid(child, 0)[1] == 0
            self.children.clear()
        return made
manager = cseq.MPSequence(
    Forking, 60, num_workers=1, batch_size=1, buffer=3, shuffle=False, out_type="null",
    start_method=sys.argv[1],
)
with manager.start() as batches:
    for number, made in enumerate(batches):
        assert all(array.min() == array.max() == number for array in made), number
print(number)
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_an_indexer_that_forks(run_script, start_method):
    """A child sees the arrays of its batch, and makes its own arrays."""
    done = run_script(FORKING, start_method)
    assert (done.stdout, done.stderr) == ("59\n", "")


FORKED_MEANWHILE = """
import os, signal, sys, threading
import numpy as np
import cseq
class Slow:
    def __getitem__(self, indices):
        return indices
    def __reduce__(self):
        sys.pickling.set()  # not this script's: the class travels by value
        sys.forked.wait()
        return Slow, ()
sys.pickling, sys.forked = threading.Event(), threading.Event()
m = cseq.MPSequence(Slow(), 10, out_type="null", num_workers=1)
starting = threading.Thread(target=m.start)
starting.start()
sys.pickling.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    repr(m), m.epoch, m.stats()
    m.finish()
    with m.start_test():
        assert len(list(m)) == 1
    os._exit(0)
sys.forked.set()
starting.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(m)))
m.finish()
"""


def test_a_fork_while_another_thread_starts_a_manager(run_script):
    """The child has that thread's manager, but not the thread, and does not wait for it."""
    done = run_script(FORKED_MEANWHILE)
    assert (done.stdout, done.stderr) == ("0 1\n", "")


LOCKED = """
import threading, time
import cseq
from cseq import testing
lock = threading.Lock()
class Locking:
    def __getitem__(self, indices):
        with lock:
            return indices
m = cseq.MPSequence(
    Locking, 40, 2, batch_size=4, out_type="null", start_method="fork", shuffle=False, buffer=4
)
got = []
with m.start() as batches:
    for number, batch in enumerate(batches):
        if number == 1:
            testing.await_workers(m)
            with lock:
                before = testing.pids(m)
                testing.kill(m, 0)
                testing.kill(m, 1)
                while set(before) & set(testing.pids(m)):
                    time.sleep(0.001)
                time.sleep(0.2)  # a replacement forked now would have the lock
        got += batch.tolist()
print(got == list(range(40)), m.stats().restarts)
"""


def test_a_replacement_is_not_forked_while_the_loop_holds_a_lock(run_script):
    """It would wait for that lock forever, and the loop for it."""
    done = run_script(LOCKED)
    assert done.stdout == "True 2\n"


SILENT = """
import _thread, logging, os, threading
import cseq
from cseq import DataLoader
from cseq.processes import supervisor
supervisor.SLOW = 0.2
told, tell = os.pipe()
class Handler(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
        if "__getitem__" in record.getMessage():  # or it is busy with the start
            os.write(tell, b"!")
class Waiting:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return os.read(told, 1)  # until the log has said what it waits for
logging.getLogger("cseq").addHandler(Handler())
lock = threading.Lock()
with lock:
    for _ in range(IS_BESIDE):
        _thread.start_new_thread(lock.acquire, ())  # which threading does not know: a library's
    print(list(DataLoader(Waiting(), num_workers=1, multiprocessing_context="fork")))
"""


@pytest.mark.parametrize("is_beside", [True, False])
def test_workers_that_hang_after_a_fork(run_prepared, is_beside):
    """The log says where the worker is, and which other threads existed."""
    pytest.importorskip("torch")
    done = run_prepared(f"IS_BESIDE = {int(is_beside)}\n{SILENT}")
    assert "worker 0 is still in script.py:18 in __getitem__, torch/" in done.stdout
    assert done.stdout.endswith("[[b'!']]\n")
    assert ("The workers were forked while other threads" in done.stdout) == is_beside
    assert ("multiprocessing_context='forkserver'" in done.stdout) == is_beside


STRAYING = """
import functools, os, sys
import numpy as np
import cseq
from cseq.stream import Streams
class Straying:
    def __init__(self, how):
        self.how = how
    def __getitem__(self, indices):
        child = os.fork()
        if child == 0:
            if self.how == "exit":
                sys.exit(3)
            if self.how == "raise":
                raise LookupError("astray")
            return np.full((len(indices), 5000), -1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (3 if self.how == "exit" else 1), code
        return np.repeat(indices[:, None], 5000, 1)
class Producing(Straying):
    def __call__(self, number, num_workers):
        return self
    def begin(self, assignment):
        pass
    def items(self, start):
        yield self[np.arange(3)]
how, method = sys.argv[1:]
options = {"thread_type": "thread"} if method == "thread" else {"start_method": method}
m = cseq.MSequence(
    functools.partial(Straying, how), 40, num_workers=2, batch_size=10, out_type="null",
    shuffle=False, **options
)
with m.start() as batches:
    print(np.concatenate(list(batches))[:, 0].tolist() == list(range(40)))
if method != "thread":
    with Streams(Producing(how), 1, **options) as streams:
        streams.begin([None])
        print([item[:, 0].tolist() for item in streams])
"""


@pytest.mark.parametrize(
    ("how", "said"), [("exit", 0), ("raise", "LookupError: astray"), ("return", "did not end")]
)
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork", "thread"])
def test_a_process_that_an_indexer_forks_is_no_worker(run_script, how, said, method):
    """If it returns to the engine, it ends, and says why unless it has called `sys.exit`."""
    done = run_script(STRAYING, how, method)
    assert done.stdout == "True\n" + ("[[0, 1, 2]]\n" if method != "thread" else "")
    assert (str(said) in done.stderr) if said else not done.stderr
