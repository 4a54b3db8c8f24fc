"""Abandoned loops, and repeated starts: nothing mixes, and nothing remains."""

import gc
import itertools
import os
import signal
import sysconfig
import threading
from functools import partial
from pathlib import Path

import held
import numpy as np
import pytest
from adverse import BATCH, SAMPLES, Squares, digest, manager, reference
from forking import in_child
from kinds import FIRST_PROCESS, QUICKEST, THREAD, by_name
from waiting import together

import cseq


class Acting(cseq.Order):
    """An order that acts once, when it is read."""

    name = "acting-v1"
    samples = units = 4096

    def __init__(self, act, read):
        self.act, self.left = act, read

    def read(self, seed, epoch, start, count):
        self.left -= 1
        if self.left == 0:
            self.act()
        return np.arange(start, start + count), None


@pytest.mark.parametrize("kind", ["test", "proc", "thread"])
@pytest.mark.parametrize("where", ["iter", "next", "handler", "out_type", "indexer"])
def test_finish_in_the_middle_of_a_call(kind, where):
    """A call of an order, a handler, a conversion or an indexer may end the run on its way out."""
    if (kind, where) in {("proc", "indexer"), ("thread", "indexer"), ("thread", "out_type")}:
        pytest.skip("there, it is not called on the loop's thread")
    calls = itertools.count()
    made, closed = [], []

    class Indexer:
        def __init__(self):
            made.append(os.getpid())

        def __getitem__(self, indices):
            if where == "indexer" and next(calls) == 3:
                m.finish()
                assert not closed
            return indices

        def close(self):
            closed.append(os.getpid())

    def convert(batch):
        if where == "out_type" and next(calls) == 3:
            m.finish()
        return batch

    def act():
        if where == "handler":
            signal.raise_signal(signal.SIGINT)
            return
        m.finish()
        for verb in (m.start, m.start_test, lambda: iter(m), lambda: m.load_state_dict(state)):
            with pytest.raises(RuntimeError, match="in the middle of another call"):
                verb()
        assert m.state_dict().keys() == state.keys()
        assert m.stats().batches <= 20

    read = {"iter": 1, "next": 3, "handler": 3}.get(where, 0)
    m = cseq.MSequence(
        np.arange(4096) if kind == "proc" else Indexer, batch_size=200, num_workers=2,
        order=Acting(act, read), out_type=convert,
        thread_type="thread" if kind == "thread" else "proc",
    )  # fmt: skip
    state = m.state_dict()
    start = m.start_test if kind == "test" else m.start
    before = signal.signal(signal.SIGINT, lambda *_: m.finish())
    try:
        start()
        with pytest.raises(InterruptedError, match="interrupted"):
            list(m)
    finally:
        signal.signal(signal.SIGINT, before)
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert len(made) == {"test": 1, "proc": 0, "thread": 2}[kind]
    # Without a GIL, a thread may be told to end before it makes an indexer.
    assert closed == made
    m.finish()
    m.load_state_dict(state)
    assert np.concatenate(list(start())).tolist() == list(range(4096))
    m.finish()


@pytest.mark.needs("fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [FIRST_PROCESS, THREAD], ids=by_name)
def test_a_forked_child_takes_no_batches(kind):
    """After os.fork by the user, the child cannot iterate what it inherited, and ends nothing."""
    m = kind.make(Squares, SAMPLES, batch_size=BATCH, seed=11)
    with m.start():
        iterator = iter(m)
        got = digest([next(iterator)])

        def child():
            nonlocal iterator
            with pytest.raises(InterruptedError):
                next(iterator)
            with pytest.raises(OSError, match="forked this one"):
                iter(m)
            del iterator
            gc.collect()
            return True

        assert in_child(child)
        assert got + digest(iterator) == reference()


DROPPED = """
import _thread, gc, os, sys, threading
import numpy as np
import cseq
from cseq.stream import Streams

class Producer:
    def begin(self, assignment): pass
    def items(self, start): return iter(range(start, 9))

def made(kind):
    if kind == "streams":
        streams = Streams(lambda number, count: Producer(), 1)
        streams.begin([None])
        return streams
    if kind == "loader":
        return iter(cseq.DataLoader(range(9), num_workers=1, multiprocessing_context="fork"))
    return cseq.MSequence(np.arange(9), num_workers=1, out_type="null", thread_type=kind).start()

def hold(held, over):
    try:
        raise LookupError(made(sys.argv[1]))
    except LookupError:
        held.set()
        over.wait()

held, over, begun, start = threading.Event(), threading.Event(), [], _thread.start_new_thread
thread = threading.Thread(target=hold, args=(held, over))
thread.start()
held.wait()
_thread.start_new_thread = lambda *args: begun.append(args) or start(*args)
child = os.fork()
if not child:
    gc.collect()
    os._exit(len(begun))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
thread.join()
"""


@pytest.mark.needs("fork")
@pytest.mark.parametrize("kind", ["proc", "thread", "streams", "loader"])
def test_what_a_forked_child_drops_starts_no_thread(run_anew, kind):
    """At the fork, the exception of a thread that the child lacks may hold it."""
    if kind == "loader":
        pytest.importorskip("torch")
    script = "import warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\n" + DROPPED
    done = run_anew(script, kind)
    assert (done.stdout, done.stderr) == ("0\n", "")


def census():
    """Count descriptors, threads and mappings."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


@pytest.mark.needs("Linux")
@pytest.mark.parametrize(("kind", "times"), [(QUICKEST, 30), (THREAD, 300)])
def test_starts_and_finishes_leave_nothing(kind, times):
    """Many starts leave as many descriptors, threads and mappings as one."""
    m = kind.make(Squares, 32, batch_size=BATCH)
    before = census()
    for _ in range(times):
        with m.start():
            next(iter(m))
    # A thread that closed something for an earlier test may have ended in between.
    assert all(now <= then for now, then in zip(census(), before, strict=True))


IN_USE = """
import ctypes, gc, os, sys
import numpy as np
import cseq

class Counts(ctypes.Structure):  # struct mallinfo2, over all of the allocator's arenas
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split())]

libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    raise SystemExit(77)
libc.mallinfo2.restype = Counts

class Worker:
    def __getitem__(self, indices):
        return np.repeat(indices, int(sys.argv[1]))

alone = len(os.listdir("/proc/self/task"))

def in_use():
    gc.collect()
    while len(os.listdir("/proc/self/task")) > alone:  # joined, but not gone yet, with its cache
        os.sched_yield()
    counts = libc.mallinfo2()
    return counts.uordblks + counts.hblkhd

def go(times):
    for _ in range(times):
        with m.start():
            next(iter(m))
    return in_use()

m = cseq.MTSequence(Worker, 32, batch_size=8, out_type="null", num_workers=2)
go(100)
print(*(go(500) for _ in range(3)))
"""


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="a Python without a GIL refuses PYTHONMALLOC=malloc, and keeps memory of its own",
)
@pytest.mark.needs("Linux")
@pytest.mark.parametrize("width", ["1", pytest.param("4096", marks=pytest.mark.nightly)])
def test_starts_and_finishes_of_threads_keep_no_memory(run_anew, width):
    """1600 starts leave as much memory allocated as 600, to a few bytes a start.

    The process's RSS is less exact: glibc keeps the memory that each start's threads have freed, in
    an arena for each, which grows and shrinks by tens of megabytes. Its cache for each thread
    counts as allocated unless the cache is switched off.
    """
    none_ready = "glibc.malloc.tcache_count=0"
    done = run_anew(IN_USE, width, PYTHONMALLOC="malloc", GLIBC_TUNABLES=none_ready)
    if done.returncode == 77:
        pytest.skip("this C library does not say what is in use")
    assert done.returncode == 0, done.stderr
    used = list(map(int, done.stdout.split()))
    assert used[2] - used[0] < 16_000, used


@pytest.mark.needs("Linux")
def test_epochs_leave_nothing():
    """Many epochs leave as many descriptors, threads, mappings and slots as two."""
    with manager().start() as m:
        for _ in range(2):
            list(m)
        before = census()
        slots = held.slots(m).total
        for _ in range(20):
            for _ in m:
                pass
        assert census()[:2] == before[:2]
        assert held.slots(m).total <= slots


def test_managers_in_several_threads():
    """Managers do not affect each other."""
    results = {}

    def train(number):
        with manager(num_workers=2).start() as m:
            results[number] = digest(m)

    together(*(partial(train, number) for number in range(3)))
    assert results == dict.fromkeys(range(3), reference())


class Nested(Squares):
    """Makes its batch with its own manager."""

    def __getitem__(self, indices):
        with cseq.MPSequence(
            Squares, indices, batch_size=3, shuffle=False, out_type="null", num_workers=2
        ).start() as m:
            parts = [part["squares"] for part in m]
        outer = cseq.rng().random(4)
        return {"indices": indices, "squares": np.concatenate(parts), "draw": outer}


def test_a_manager_inside_a_worker():
    """A worker may use its own manager of processes."""
    m = cseq.MPSequence(Nested, SAMPLES, batch_size=100, seed=11, out_type="null", num_workers=2)
    plain = cseq.MPSequence(Squares, SAMPLES, batch_size=100, seed=11, out_type="null")
    with m.start(), plain.start_test():
        assert digest(m) == digest(plain)
