"""The managers' interface: arguments, life cycle, epochs, and the form of batches."""

import platform
import re
import sys
import threading
import warnings
from functools import partial
from itertools import islice

import kinds
import numpy as np
import pytest
from conftest import complaints
from indexers import Broken, Indices1, Nested, Raising, Rows
from kinds import FEW, FIRST_PROCESS, THREAD, assert_same, by_name, every_class, make_small
from waiting import together

import cseq
from cseq import MPSequence, MTSequence

every_kind = pytest.mark.parametrize("kind", FEW, ids=by_name)


def test_repr():
    """It shows samples, batches, workers, seed and state, and computes nothing for that."""
    manager = MTSequence(Indices1, 10, 3, batch_size=4, out_type="null", seed=7, shard="auto")
    assert repr(manager) == (
        "MTSequence(samples=10, batch_size=4, workers=3 threads, seed=7, shard='auto', "
        "epoch=0, not started)"
    )
    manager = MPSequence(Indices1, 10**7, 0, batch_size=4, out_type="null", shard=(1, 2), seed=3)
    with manager.start_test() as m:
        next(iter(m))
        assert repr(m) == (
            "MPSequence(samples=10,000,000, batches=1,250,000, batch_size=4, workers=0, seed=3, "
            "rank 1 of 2, epoch=0, 8 samples in, in its own 'with')"
        )
    order = cseq.Buckets([1, 2], 4)
    shown = repr(MTSequence(Indices1, order=order))
    assert f"batch_size=the order's, order={order!r}, " in shown
    manager = MTSequence(Indices1, 10, batch_size=4, drop_last=True, out_type="null")
    assert ", drop_last=2 of 10 samples, " in repr(manager)
    drawn = make_small()
    assert f"seed={drawn.seed} (drawn)" in repr(drawn)


@every_class
def test_nothing_is_done_to_construct(make):
    """The constructor calls nothing, starts nothing and allocates no shared memory."""
    manager = make(Broken, 10**12, shuffle="feistel")
    assert (manager.dset_size, len(manager)) == (10**12, 31_250_000_000)


def test_properties():
    """Lengths count batches, `dset_size` counts samples; all arguments are shown."""
    manager = make_small(batch_size=4, seed=11)
    assert (len(manager), manager.length, manager.dset_size, manager.batch_size) == (3, 3, 10, 4)
    assert (manager.seed, manager.epoch, manager.use_cuda) == (11, 0, False)
    assert len(make_small(batch_size=4, drop_last=True)) == 2
    assert len(make_small(batch_size=2, shard=(0, 3), seed=1)) == 2
    assert len(make_small(batch_size=100)) == 1


def test_a_drawn_seed_is_shown():
    """seed=None draws a seed once; with this seed, the stream can be repeated."""
    manager = make_small()
    assert manager.seed == manager.seed
    # With 2^32 seeds, this fails once in four billion runs.
    assert make_small().seed != manager.seed
    with manager.start_test() as m:
        got = list(m)
    with make_small(seed=manager.seed).start_test() as m:
        assert_same(list(m), got)


@pytest.mark.parametrize("samples", [[3, 1, 4, 1, 5], (2, 7), np.array([2**62, -1]), range(4, 9)])
def test_samples_of_every_kind(samples):
    """Any one-dimensional sequence of integers may be the samples, even with negative ones."""
    manager = MTSequence(Indices1, samples, shuffle=False, batch_size=2, out_type="null")
    with manager.start_test() as m:
        assert [int(i) for batch in m for i in batch] == [int(i) for i in samples]


@every_kind
def test_epochs_count_over_everything(kind):
    """Each `iter` begins the next epoch, from 0 on, in `start` and `start_test` alike."""
    manager = kind.make(Indices1, 50, batch_size=50)
    orders = [cseq.permutation(50, 42, e).tolist() for e in range(6)]
    assert manager.epoch == 0
    seen = []
    for start in (manager.start, manager.start_test, manager.start):
        with start() as m:
            for _ in range(2):
                seen += [batch.tolist() for batch in m]
                assert m.epoch == len(seen) - 1
    assert seen == orders


@every_kind
def test_an_epoch_whose_end_the_loop_knows(kind):
    """It is over even if its last batch raised, or if it had no batch."""
    worker = partial(Raising, partial(ValueError, "the last sample"), 9)
    with kind.start(worker, 10, batch_size=2, shuffle=False) as batches:
        iterator = iter(batches)
        for _ in range(4):
            next(iterator)
        with pytest.raises(ValueError, match="the last sample"):
            next(iterator)
        assert batches.state_dict()["consumed"] == 8
        assert next(iterator, None) is None
        state = batches.state_dict()
    assert (state["epoch"], state["consumed"]) == (1, 0)
    assert batches.state_dict() == state
    with kind.start(Indices1, 3, batch_size=4, drop_last=True) as batches:
        for epoch in (1, 2):
            assert list(batches) == []
            assert batches.state_dict()["epoch"] == epoch


@every_kind
def test_a_start_interrupts(kind):
    """A newer iterator, a start of either kind, or a finish interrupts the existing iterators."""
    manager = kind.make(Indices1, 40, batch_size=4)
    for interrupt, said in (
        (manager.__iter__, "for two loops, make two managers"),
        *((verb, None) for verb in (manager.start, manager.start_test, manager.finish)),
    ):
        batches = iter(kind.begin(manager))
        next(batches)
        newer = interrupt()
        for _ in range(2):
            with pytest.raises(InterruptedError, match=said):
                next(batches)
        if said:
            assert len(list(newer)) == 10
    manager.finish()


@every_kind
def test_forbidden_inside_with(kind):
    """In the manager's own `with`, start, start_test, finish and a second `with` raise OSError.

    The `with` block passes an exception on unchanged, after the workers have ended.
    """
    with pytest.raises(ZeroDivisionError), kind.start(Indices1, 40, batch_size=4) as m:
        for verb in (m.start, m.start_test, m.finish, m.__enter__):
            with pytest.raises(OSError, match="with"):
                verb()
        assert len(list(m)) == 10
        for _ in m:
            raise ZeroDivisionError
    with pytest.raises(OSError, match="start"), m:
        pass


@pytest.mark.parametrize("kind", [THREAD, FIRST_PROCESS], ids=by_name)
def test_iterating_without_a_start(kind):
    """A loop over a manager that has not started starts it, with a UserWarning at that line."""
    manager = kind.make(Indices1, 40, batch_size=4)
    with pytest.warns(UserWarning, match=r"start\(\)") as caught:
        assert len(list(manager)) == 10
    assert [w.filename for w in caught] == [__file__]
    # The manager is running now, so no second warning comes.
    assert len(list(manager)) == 10
    manager.finish()


def test_a_refused_start_without_a_start():
    """If that warning is an error, nothing was started."""
    manager = make_small()
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="start"):
        warnings.simplefilter("error")
        iter(manager)
    with pytest.raises(OSError, match="start"), manager:
        pass
    assert manager.epoch == 0


@every_kind
def test_finished_by_another_thread(kind):
    """`finish` from another thread ends a waiting loop with InterruptedError."""
    manager = kind.start(Indices1, 10**6, batch_size=1)
    batches = iter(manager)
    next(batches)

    def loop():
        with pytest.raises(InterruptedError):
            for _ in batches:
                pass

    together(loop, manager.finish)


@every_kind
def test_a_newer_iterator_while_another_thread_loops(kind):
    """A newer `iter`, which begins its own epoch, interrupts a loop in another thread."""

    def loop(batches, begun):
        try:
            for _ in batches:
                begun.set()
        except InterruptedError:
            interrupted.append(batches)

    interrupted = []
    with kind.start(Indices1, 10**6, batch_size=1) as manager:
        for count in range(1, 4):
            begun = threading.Event()
            thread = threading.Thread(target=loop, args=(iter(manager), begun))
            thread.start()
            begun.wait()
            got = [int(batch[0]) for batch in islice(manager, 200)]
            thread.join()
            assert len(interrupted) == count
            assert got == cseq.permutation(10**6, 42, manager.epoch)[:200].tolist()


@every_kind
def test_threads_share_an_iterator(kind):
    """Together, threads that share an iterator get each batch once."""
    with kind.start(Indices1, 1000, batch_size=1) as manager:
        batches = iter(manager)
        shares = [[], [], []]
        together(*(partial(share.extend, batches) for share in shares))
    assert sorted(int(i) for share in shares for batch in share for i in batch) == list(range(1000))


@pytest.fixture
def no_cuda(monkeypatch):
    """Return torch, on a machine without CUDA."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return torch


@pytest.mark.parametrize(
    ("out_type", "dtype", "mode", "want"),
    [
        ("cpu", "float32", "default", "torch.float32"),
        (None, "float32", "default", "torch.float32"),
        ("cuda", "float32", "default", "torch.float32"),
        ("cuda:1", "float64", "default", "torch.float64"),
        ("cpu", "int16", "default", "torch.int16"),
        ("cpu", None, "default", "torch.int64"),
        ("cuda", "auto", "default", "torch.float32"),
        ("cuda", "auto", "cpu", "torch.float32"),
        ("cuda", "auto", "numpy", "int64"),
        ("null", "auto", "default", "int64"),
        ("null", "auto", "cpu", "torch.float32"),
    ],
)
def test_tensors(no_cuda, out_type, dtype, mode, want):
    """out_type 'cpu', None and, without CUDA, 'cuda' give CPU tensors of the type `dtype`.

    In test mode, 'default' gives what start gives, 'cpu' tensors, and 'numpy' the indexer's batch.
    """
    manager = MTSequence(
        Indices1, 6, batch_size=4, out_type=out_type, dtype=dtype, shuffle=False, num_workers=1
    )
    assert manager.use_cuda is False
    for start in (partial(manager.start_test, mode), manager.start)[: 1 + (mode == "default")]:
        with start() as m:
            got = list(m)
        assert [t.tolist() for t in got] == [[0, 1, 2, 3], [4, 5]]
        assert {str(t.dtype) for t in got} == {want}
        assert {str(getattr(t, "device", "cpu")) for t in got} == {"cpu"}


@pytest.mark.parametrize("out_type", ["cuda", "cpu", None, "null", "call"])
@pytest.mark.parametrize("kind", [THREAD, FIRST_PROCESS], ids=by_name)
def test_every_out_type_as_in_test_mode(no_cuda, kind, out_type):
    """For every out_type, start() gives what start_test() gives."""
    worker, given = (Rows, np.negative) if out_type == "call" else (Nested, out_type)
    manager = kind.make(worker, 30, out_type=given, batch_size=8)
    with manager.start_test() as m:
        want = list(m)
    manager.set_epoch(0)
    with manager.start() as m:
        got = list(m)
    assert_same(got, want)
    if out_type in ("cuda", "cpu", None):
        batch = got[0]
        assert batch["pair"].label.dtype is no_cuda.float32
        assert batch["list"][4:6] == ["text", b"bytes"]
        assert isinstance(batch["record"], np.ndarray)
        assert type(batch["sample"]).__name__ == "Sample"


@every_kind
def test_a_function_for_every_array(kind):
    """A callable out_type is applied to every array of a batch, and to nothing else."""

    class Mixed:
        def __getitem__(self, indices):
            return {"a": [indices, 3], "b": ("text", indices.astype("f4"))}

    got = next(iter(kind.start(Mixed, 4, shuffle=False, out_type=lambda a: a.sum())))
    assert_same(got, {"a": [np.int64(6), 3], "b": ("text", np.float32(6))})


def test_without_torch(run_script):
    """Without torch, every out_type gives arrays of the same values; the log says so once."""
    done = run_script("""
import sys
sys.modules["torch"] = None  # so that its import fails
import logging, numpy as np, cseq
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
class W:
    def __getitem__(self, indices):
        return {"x": indices / 1, "s": np.array(["text"])}
outputs = [(out_type, "float32") for out_type in ("cuda", "cpu", None, "cuda:1")]
for make in (cseq.MTSequence, cseq.MPSequence):
    for out_type, dtype in (*outputs, ("null", "float32"), ("cpu", None), ("cpu", "bfloat16")):
        m = make(W, 5, 2, batch_size=5, shuffle=False, out_type=out_type, dtype=dtype)
        assert m.use_cuda is False
        for start in (m.start, m.start_test):
            with start() as s:
                (batch,) = s
            assert type(batch["x"]) is np.ndarray and batch["s"].tolist() == ["text"]
            is_cast = (out_type, dtype) in outputs
            assert batch["x"].dtype == ("float32" if is_cast else "float64"), out_type
            assert batch["x"].tolist() == [0, 1, 2, 3, 4]
print("done", sys.modules["torch"])
""")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "done None"
    assert len(lines) == 2
    assert re.match(r"WARNING .*torch", lines[0])


@pytest.mark.parametrize("kind", kinds.PROCESSES[:2], ids=by_name)
def test_workers_do_not_import_torch(no_cuda, kind):
    """Workers do not import torch for cseq, for any out_type."""

    class Modules:
        def __getitem__(self, indices):
            return indices, sorted(name for name in sys.modules if name == "torch")

    with kind.start(Modules, 4, out_type="cpu") as m:
        ((batch, modules),) = m
    assert isinstance(batch, no_cuda.Tensor)
    assert modules == []


@pytest.mark.parametrize("kind", kinds.PARALLEL, ids=by_name)
def test_a_script_that_just_ends(run_script, kind):
    """A script that ends in the middle of a loop, without `finish`, ends at once and silently."""
    way = f"start_method={kind.start_method!r}" if kind.processes else "thread_type='thread'"
    done = run_script(f"""
import cseq, numpy as np
class W:
    def __getitem__(self, indices):
        return np.ones((100, 1000))
manager = cseq.MSequence(W, 1000, 2, {way}, out_type="null").start()
for batch in manager:
    break
print("end")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


READS_ON = """
import sys, threading
import numpy as np
import cseq
from cseq.stream import Streams

class Producer:
    def begin(self, assignment): pass
    def items(self, start): return iter(range(start, 1000))

class W:
    def __getitem__(self, indices): return np.ones((100, 1000))

kind, again = sys.argv[1:]
if kind == "streams":
    loader = Streams(lambda number, count: Producer(), 2, kind="threads")
    loader.begin([None] * 2)
else:
    loader = cseq.MSequence(W, 1000, 2, thread_type=kind, out_type="null", repeat=10**6).start()
reads = threading.Event()

def read():
    while True:
        try:
            for batch in loader:
                reads.set()
            if kind == "streams":
                loader.begin([None] * 2)
        except InterruptedError:
            if not again:
                raise

threading.Thread(target=read, daemon=True).start()
reads.wait()
"""


@pytest.mark.parametrize("kind", ["thread", "proc", "streams"])
@pytest.mark.parametrize("again", ["", "again"])
def test_a_daemon_thread_that_reads_when_the_script_ends(run_script, kind, again):
    """The thread stays in its current or next call, without a traceback or an abort."""
    done = run_script(READS_ON, kind, again)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


ONE_PICKLE = """
import sys
import cseq
from counted import Counted

manager = cseq.MPSequence(Counted(), 10, 2, out_type="null", start_method=sys.argv[1])
with manager.start_test() as batches:
    assert len(list(batches)) == 1
made = Counted.pickled
with manager.start() as batches:
    print(made, Counted.pickled, sum(int(batch.sum()) for batch in batches))
"""

COUNTED = """
class Counted:
    pickled = 0
    def __getitem__(self, indices):
        return indices
    def __reduce__(self):
        Counted.pickled += 1
        return Counted, ()
"""


@pytest.mark.parametrize("kind", kinds.PROCESSES, ids=by_name)
def test_one_pickle_a_start(run_script, tmp_path, kind):
    """The constructor and test mode pickle nothing; a start pickles once, but never with fork."""
    (tmp_path / "counted.py").write_text(COUNTED)
    done = run_script(ONE_PICKLE, kind.name)
    assert done.stdout == ("0 0 45\n" if kind.name == "fork" else "0 1 45\n"), done.stderr


OWN_MEMORY = """
import ctypes
import numpy as np
import cseq

MIB = 1 << 20

class Memory:
    def __init__(self):
        self.libc = ctypes.CDLL(None)
        self.libc.malloc.restype = ctypes.c_void_p
        self.libc.free.argtypes = [ctypes.c_void_p]

    def used(self, mib):
        block = self.libc.malloc(ctypes.c_size_t(mib * MIB))
        ctypes.memset(block, 1, mib * MIB)
        self.libc.free(block)
        return self.resident()

    def resident(self):
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmRSS"].split()[0]) // 1024

    def __getitem__(self, indices):
        before = self.resident()
        sizes = [self.used(mib) for mib in (24, 40, 400)]
        zeros = np.zeros(512 * MIB, np.uint8)
        zeros[0] = 1
        there = self.resident()
        return np.array([*sizes, there]) - before

with cseq.MPSequence(Memory, 3, batch_size=1, out_type="null").start() as batches:
    first = next(iter(batches))
    print(first[0] > 20, *first[1:] < [36, 100, 100])
"""


@pytest.mark.needs("Linux")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc")
def test_memory_that_a_worker_frees(run_script):
    """A worker keeps a block of usual size and frees a large one; large zeros take no memory."""
    done = run_script(OWN_MEMORY)
    assert done.stdout == "True True True True\n", done.stderr


class Labelled:
    """Images, and labels of a given type."""

    def __init__(self, dtype="i8", images="f4"):
        self.dtype, self.images = dtype, images

    def __getitem__(self, indices):
        return np.zeros((len(indices), 2, 2), self.images), {"y": indices.astype(self.dtype)}


HINTED = [
    (Labelled("i8"), {}, True),
    (Labelled("u1"), {}, True),
    (Labelled("f8"), {}, False),
    (Labelled("i8"), {"dtype": None}, False),
    (Labelled("i8"), {"dtype": "int64"}, False),
    (Labelled("i8"), {"out_type": "null"}, False),
    # The integer array holds images.
    (Labelled("f4", "u1"), {}, False),
    # A single array may be all that there is to learn from.
    (np.arange(8), {}, False),
]


@pytest.mark.parametrize("start", ["start", "start_test"])
@pytest.mark.parametrize("kind", [THREAD, FIRST_PROCESS], ids=by_name)
def test_labels_that_become_floats(kind, start, caplog):
    """If labels lose their type, each start warns once, with dtype=None as the remedy."""
    for worker, options, hinted in HINTED:
        caplog.clear()
        m = kind.make(worker, 8, batch_size=2, **({"out_type": "cpu"} | options))
        with getattr(m, start)():
            for _ in range(2):
                assert len(list(m)) == 4
        messages = [record.getMessage() for record in caplog.records]
        # Messages for a machine without torch, or a busy one, do not matter here.
        told = [text for text in complaints(messages) if not text.startswith("torch is not")]
        assert len(told) == hinted, (worker, options, told)
        assert all("dtype=None" in text and "shape (2,)" in text for text in told)
