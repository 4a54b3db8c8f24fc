"""The contract of all pools: the same stream, each sample once, and intact held batches.

The tests of how workers start use every start method. What they do then is the same code for all
methods, so those tests use processes of the quickest one.
"""

import gc
import itertools
import os
import re
import threading
import weakref
from pathlib import Path

import indexers
import kinds
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexers import Augmented, Closing, Indices1, Labelled, Large, NotAnIndexer, Rows, here
from kinds import INLINE, KINDS, QUICK, QUICKEST, THREAD, assert_same, by_name, expected, stream

import cseq

every_kind = pytest.mark.parametrize("kind", KINDS, ids=by_name)
every_pool = pytest.mark.parametrize("kind", QUICK, ids=by_name)
every_process = pytest.mark.parametrize("kind", kinds.PROCESSES, ids=by_name)


def indices_of(batches):
    """Return all indices of batches of index arrays, in order."""
    return [i for batch in batches for i in batch.tolist()]


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        pytest.param(kind, number, id=f"{kind.name}-{number}")
        for kind in (THREAD, *kinds.PROCESSES)
        for number in ([1, 2, 3, 8] if kind in QUICK else [3])
    ],
)
def test_same_as_test_mode(kind, num_workers):
    """For any number of workers, the parallel stream equals test mode, bit for bit and in order."""
    want = expected(Augmented, 203, epochs=3, batch_size=8)
    got = stream(kind, Augmented, 203, epochs=3, batch_size=8, num_workers=num_workers)
    assert_same(got, want)


def test_a_slow_batch_holds_no_other_up():
    """With ordered=False, the batches made in the meantime come first."""
    others = threading.Event()

    class Slow:
        def __getitem__(self, indices):
            assert indices[0] or others.wait(60)
            return indices

    options = {"batch_size": 1, "num_workers": 2, "shuffle": False}
    with THREAD.start(Slow, 6, ordered=False, **options) as manager:
        batches = iter(manager)
        got = [int(next(batches)[0]) for _ in range(5)]
        others.set()
        assert (got, indices_of(batches)) == ([1, 2, 3, 4, 5], [0])


@every_pool
def test_built_in_place(kind):
    """Arrays that an indexer builds in `cseq.empty` arrive like any others."""
    for batch in stream(kind, indexers.InPlace, 30, batch_size=4):
        whole = batch["whole"]
        assert whole.shape[1] == 5000
        assert (whole == whole[:, :1]).all()
        assert_same(batch["part"], whole[:1, 10:20].copy())
        assert batch["none"].shape == (0,)
        assert_same(batch["twice"], whole)
        assert_same(batch["view"], whole[:, ::-2])
        assert_same(batch["scalar"], np.array(7, "i1"))


@every_pool
def test_indices_are_the_indexers_own(kind):
    """An indexer may change its indices: they are its own int64 array, in no other batch."""
    got = stream(kind, indexers.Spoiler, np.arange(64), batch_size=8, epochs=3, buffer=2)
    want = [cseq.permutation(64, 42, e).tolist() for e in range(3)]
    assert indices_of(got) == want[0] + want[1] + want[2]


@every_pool
def test_batches_may_be_changed(kind):
    """The loop owns a batch: what it writes there shows up nowhere else."""
    with kind.start(Large, 24, batch_size=2, shuffle=False, buffer=2) as manager:
        for _ in range(2):
            for k, batch in enumerate(manager):
                assert batch[:, ::100].tolist() == [[2 * k] * 82, [2 * k + 1] * 82]
                batch[:] = -1


@every_pool
def test_all_batches_held(kind):
    """`list(manager)`, over epochs and far beyond `buffer`, has correct data, without deadlock."""
    order = [i for e in range(3) for i in cseq.permutation(60, 42, e).tolist()]
    with kind.start(Large, 60, batch_size=2, buffer=2) as manager:
        held = [batch for _ in range(3) for batch in manager]
    del manager
    gc.collect()
    whole = np.concatenate(held)
    assert whole.shape == (180, 8192)
    assert (whole == np.array(order)[:, None]).all()


@every_pool
def test_tensors_hold_the_batch(kind):
    """A tensor, or a view of one, keeps its data as an array does."""
    pytest.importorskip("torch")
    with kind.start(
        Large, 40, batch_size=2, buffer=2, shuffle=False, out_type="cpu", dtype=None
    ) as manager:
        held = [batch[1, 4000:] for batch in manager]
        list(manager)
    del manager
    gc.collect()
    assert [(int(t.min()), int(t.max())) for t in held] == [(2 * k + 1,) * 2 for k in range(20)]


def test_labels_that_are_kept_hold_no_batch():
    """Kept arrays count towards `memory_limit` by their own size, not by their batches'."""
    with QUICKEST.start(Labelled, 160, batch_size=2, shuffle=False, memory_limit="4MiB") as manager:
        kept = [labels for _, labels, _ in manager]
        assert manager.stats().copies == 0
    assert [labels.tolist() for labels in kept] == [[k, k + 1] for k in range(0, 160, 2)]


@every_pool
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_strides_are_kept(kind, dtype):
    """All pools keep the strides of permuted arrays, even after a cast."""
    pytest.importorskip("torch")
    with kind.start(Labelled, 4, batch_size=2, out_type="cpu", dtype=dtype) as manager:
        for images, _, mask in manager:
            assert images.stride() == (64 * 64 * 8, 1, 64 * 8, 8)
            assert mask.stride() == (8 * 512, 512, 1)
            assert mask[1, 7].tolist() == np.arange(512, dtype=np.uint8).tolist()


@every_kind
def test_made_once_in_every_worker(kind, tmp_path):
    """Each worker makes one indexer, at the start, keeps it for all epochs, and closes it once."""
    with kind.start(lambda: Closing(tmp_path), 400, batch_size=2, num_workers=3) as manager:
        got = [batch for _ in range(5) for batch in manager]
        assert not list(tmp_path.glob("closed-*"))
    made, closed = (
        {path.name.removeprefix(prefix) for path in tmp_path.glob(f"{prefix}*")}
        for prefix in ("made-", "closed-")
    )
    assert 1 <= len(made) <= (3 if kind.parallel else 1)
    assert closed == made >= {worker for worker, _ in got}
    assert all(maker == worker for worker, maker in got)
    assert ({name.split("-")[0] for name in made} == {str(os.getpid())}) == (not kind.processes)
    assert (here() in made) == (not kind.parallel)


@every_kind
def test_an_object_as_worker(kind):
    """An object with __getitem__ is used directly; threads share it, processes have copies."""
    lasting = indexers.Lasting(100)
    got = stream(kind, lasting, 100, batch_size=10, shuffle=False)
    assert np.concatenate(got).tolist() == list(range(0, 300, 3))
    assert lasting.asked == (0 if kind.processes else 10)
    # The user must close it.
    assert not lasting.closed


@every_kind
def test_an_array_as_worker(kind):
    """An array serves as a data set; changes to batches do not reach it."""
    data = np.arange(60.0).reshape(30, 2)
    got = stream(kind, data, 30, batch_size=7)
    order = cseq.permutation(30, 42)
    assert_same(np.concatenate(got), data[order])
    for batch in got:
        batch[:] = -1
    assert_same(data, np.arange(60.0).reshape(30, 2))


@every_kind
def test_a_pool_inside_an_indexer(kind):
    """An indexer may use a manager of any pool; the outer batch keeps its own generator."""

    class Outer:
        def __init__(self):
            self.inner = cseq.MTSequence(Rows, 8, out_type="null", num_workers=1, seed=1)

        def __getitem__(self, indices):
            before = cseq.worker_info()
            first = cseq.rng().random()
            with self.inner.start_test() as inner:
                total = sum(int(labels.sum()) for _, labels in inner)
            assert cseq.worker_info() == before
            return indices, total, first, cseq.rng().random()

    assert_same(stream(kind, Outer, 20, batch_size=4), expected(Outer, 20, batch_size=4))


@every_kind
def test_dropped_without_finish(kind):
    """The workers of an unreferenced manager end, even in the middle of an epoch."""
    manager = kind.start(Large, 100, batch_size=2)
    batch = next(iter(manager))
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    assert (batch == np.repeat(cseq.permutation(100, 42)[:2, None], 8192, 1)).all()


@every_pool
def test_the_iterator_keeps_the_manager(kind):
    """A loop over an unnamed manager runs to its end."""
    assert len(list(kind.start(Indices1, 30, batch_size=4))) == 8


def test_threads_make_their_indexers_in_turn():
    """They take turns, as some libraries cannot open data in two threads at once."""
    making = threading.Lock()
    all_here = threading.Barrier(4)
    made = []

    class Exclusive:
        def __init__(self):
            if not making.acquire(blocking=False):
                raise RuntimeError("made by two threads at once")
            # A concurrent start would come now.
            threading.Event().wait(0.05)
            made.append(worker_number())
            making.release()

        def __getitem__(self, indices):
            all_here.wait(60)
            return indices

    with THREAD.start(Exclusive, 4, num_workers=4, batch_size=1) as manager:
        assert len(list(manager)) == 4
    assert sorted(made) == [0, 1, 2, 3]


def worker_number():
    """Return the number of the worker that runs this."""
    info = cseq.worker_info()
    assert info is not None
    return info.number


def test_threads_make_no_indexer_after_one_has_failed():
    """The first exception is raised, and no further indexer is made."""
    tried = []

    class Failing(Indices1):
        def __init__(self):
            tried.append(worker_number())
            raise LookupError(f"no data set {worker_number()}")

    with (
        THREAD.start(Failing, 100, num_workers=3) as manager,
        pytest.raises(LookupError, match="no data set") as caught,
    ):
        list(manager)
    assert [f"no data set {number}" for number in tried] == [str(caught.value).splitlines()[0]]


def test_finish_while_an_indexer_is_made(caplog, monkeypatch):
    """Threads that wait for their turn end; the thread that makes an indexer is left behind."""
    monkeypatch.setattr("cseq.engine.crews.threads.CLOSE_SECONDS", 1.5)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Indices1):
        def __init__(self):
            begun.set()
            go_on.wait(60)

    manager = THREAD.start(Slow, 100, num_workers=3)
    assert begun.wait(60)
    manager.finish()
    (warning,) = [record.getMessage() for record in caplog.records]
    go_on.set()
    assert re.search(r"threads \['cseq-w\d'\] did not end", warning)


@pytest.mark.parametrize("taken", [0, 1, 10])
@pytest.mark.parametrize("kind", [INLINE, THREAD], ids=by_name)
def test_no_indexer_outlives_finish(kind, taken):
    """The manager's indexers die with `finish`, even those that made no batch."""
    made = []

    class Watched(Indices1):
        def __init__(self):
            made.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        manager = kind.start(Watched, 40, batch_size=4, num_workers=3)
        assert len(list(itertools.islice(manager, taken))) == taken
        manager.finish()
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()


@every_kind
@pytest.mark.parametrize(
    ("worker", "error", "said"),
    [
        (indexers.Broken, LookupError, "no such data set"),
        (NotAnIndexer, TypeError, r"NotAnIndexer.*__getitem__"),
    ],
)
def test_a_worker_that_cannot_be_built(kind, worker, error, said):
    """The loop gets the worker's exception, each time with its type; its object is an indexer."""
    with kind.start(worker, 100, num_workers=3) as manager:
        for _ in range(2):
            with pytest.raises(error, match=said):
                list(manager)


@every_process
def test_workers_that_die_at_birth(kind):
    """Workers that end while they start are replaced a few times; then WorkerDied is raised."""
    with (
        kind.start(indexers.Quitting, 100) as manager,
        pytest.raises(cseq.WorkerDied, match=r"code 7.*before they were ready") as caught,
    ):
        list(manager)
    assert (caught.value.exitcode, caught.value.batch) == (7, None)


@pytest.mark.needs("Linux")
@every_pool
def test_a_billion_samples_begin_at_once(kind):
    """The first batches of 10^9 samples touch few pages of memory, not a table of 4 GB."""
    with kind.start(Indices1, 10**9, buffer=10) as manager:
        for _ in range(2):
            before = resident_kib()
            batches = iter(manager)
            got = [next(batches) for _ in range(20)]
            assert resident_kib() - before < 32_000
            assert len(set(indices_of(got))) == 640
            assert max(indices_of(got)) > 10**8


def resident_kib():
    """Return this process's resident memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


SHAPES = st.fixed_dictionaries(
    {
        "dset_size": st.integers(1, 90)
        | st.lists(st.integers(-5, 10**12), min_size=1, max_size=40),
        "batch_size": st.integers(1, 100),
        "num_workers": st.integers(1, 5),
        "buffer": st.integers(1, 12),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
    }
)
# After how many batches each epoch is left; None is its end.
BREAKS = st.lists(st.none() | st.integers(1, 13), max_size=4)


@given(SHAPES, BREAKS)
@settings(max_examples=60)
@pytest.mark.parametrize("kind", [INLINE, THREAD], ids=by_name)
def test_any_shape(kind, options, breaks):
    """For any sizes, workers, buffers and breaks, each epoch is the start of its order."""
    check_any_shape(kind, options, breaks)


@given(SHAPES, BREAKS)
@settings(max_examples=12)
def test_any_shape_in_processes(options, breaks):
    """The same holds for processes."""
    check_any_shape(QUICKEST, options, breaks)


def check_any_shape(kind, options, breaks):
    """Fail unless each epoch is the start of its order, and a full one the whole of its order."""
    samples = options["dset_size"]
    samples = np.arange(samples) if isinstance(samples, int) else np.array(samples)
    n, size = len(samples), options["batch_size"]
    end = n - n % size if options["drop_last"] else n
    with kind.start(Indices1, **options) as manager:
        assert len(manager) == -(-end // size)
        for epoch, taken in enumerate([*breaks, None]):
            batches = list(itertools.islice(manager, taken))
            assert len(batches) == min(len(manager), taken or n)
            order = cseq.permutation(n, options["seed"], epoch) if options["shuffle"] else range(n)
            got = indices_of(batches)
            assert got == samples[order[:end]].tolist()[: len(got)]
            assert all(len(b) == size for b in batches[: end // size])


@given(st.data())
@settings(max_examples=15)
def test_any_sizes_of_batches(data):
    """One pool of processes makes batches of any sizes in sequence, whether held or not."""
    sizes = data.draw(st.lists(st.integers(0, 300_000), min_size=1, max_size=12))
    hold = data.draw(st.integers(0, 4))

    class Sized:
        def __getitem__(self, indices):
            return [np.full(sizes[i], i, np.uint8) for i in indices]

    held = []
    with QUICKEST.start(Sized, len(sizes), batch_size=1, shuffle=False, buffer=3) as manager:
        for _ in range(2):
            for k, batch in enumerate(manager):
                assert_same(batch, [np.full(sizes[k], k, np.uint8)])
                held = [*held, (k, batch)][-hold:] if hold else []
                for i, old in held:
                    assert_same(old, [np.full(sizes[i], i, np.uint8)])


SCRIPT = """
import dataclasses, sys, typing
import numpy as np
import cseq

print("body", flush=True)

class Pair(typing.NamedTuple):
    x: object
    y: object

@dataclasses.dataclass
class Sample:
    data: object
    parts: list

SCALE = 3
def scaled(indices):
    return indices * SCALE

class Worker:
    def __getitem__(self, indices):
        return {"pair": Pair(scaled(indices), "text"), "sample": Sample(indices + 1, [Pair(1, 2)])}

def show(make):
    options = {"batch_size": 4, "shuffle": False, "out_type": "null", "start_method": sys.argv[1]}
    with cseq.MPSequence(make, 10, 2, **options).start() as m:
        for batch in [*m, *m]:
            pair, sample = batch["pair"], batch["sample"]
            assert type(pair) is Pair and type(sample) is Sample, batch
            assert type(sample.parts[0]) is Pair
            print(pair.x.tolist(), pair.y, sample.data.tolist())

def local():
    offset = 100
    @dataclasses.dataclass
    class Inner:
        x: object
    class Local(Worker):
        def __getitem__(self, indices):
            batch = super().__getitem__(indices)
            batch["inner"] = Inner(offset)
            return batch
    return Local

show(Worker)
show(lambda: Worker())
show(local())
show(Worker())
"""
LINES = (
    "[0, 3, 6, 9] text [1, 2, 3, 4]\n[12, 15, 18, 21] text [5, 6, 7, 8]\n[24, 27] text [9, 10]\n"
)


@every_process
def test_scripts_without_ceremony(run_script, kind):
    """A script needs no `__main__` guard; its classes and functions work, its body runs once."""
    done = run_script(SCRIPT, kind.name)
    assert (done.stdout, done.stderr) == ("body\n" + LINES * 8, "")
