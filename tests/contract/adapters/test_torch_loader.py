"""`cseq.DataLoader` against torch's own: the same batches, bit for bit, and the same contract."""

import contextlib
import copy
import gc
import inspect
import multiprocessing
import os
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from killing import KILLED, kill  # noqa: E402
from torch.utils import data  # noqa: E402
from torch_data import Augmented, Plain, Sharded, as_is, same, seed_all  # noqa: E402
from torch_loaders import FORK, QUICK, check, forked, loader, quick_processes, run  # noqa: E402

import cseq.testing  # noqa: E402
from cseq.adapters.torch import defaults  # noqa: E402

pytestmark = quick_processes

METHODS = multiprocessing.get_all_start_methods()


# ── the same batches ───────────────────────────────────────────────────────────────────────


LEVEL = [0]


class Levelled(Plain):
    """The samples show what the sampler changed in this process."""

    def __getitem__(self, key):
        return key, LEVEL[0]


class Levelling(data.RandomSampler):
    """Changes the level with each key."""

    def __iter__(self):
        for key in super().__iter__():
            LEVEL[0] += 1
            yield key


def levelled(kind):
    """Return batches whose sampler changes what the data set sees."""
    LEVEL[0] = 0
    return run(kind, Levelled(8), 2, FORK | {"sampler": Levelling(range(8)), "batch_size": 2})


class Noisy(Plain):
    def __init__(self, generator):
        super().__init__(8)
        self.generator, self.lock = generator, threading.Lock()

    def __getitem__(self, key):
        return key, torch.rand((), generator=self.generator)


def noisy(kind):
    """Return batches of a data set that has the loader's generator, and cannot be pickled."""
    generator = torch.Generator().manual_seed(5)
    options = FORK | {"shuffle": True, "generator": generator, "batch_size": 2}
    return run(kind, Noisy(generator), 2, options)


@forked
@pytest.mark.parametrize("made", [levelled, noisy])
def test_workers_are_forked_before_any_key_is_drawn(made):
    assert same(made(cseq.DataLoader), made(data.DataLoader))


@pytest.mark.parametrize("options", [{}, FORK, FORK | {"persistent_workers": True}], ids=str)
def test_a_batch_size_that_is_set_at_the_batch_sampler(options):
    def sizes(kind):
        seed_all()
        made = kind(Sharded(7, 7), batch_size=2, **options)
        made.batch_sampler.batch_size = 3
        before = list(made)
        made.batch_sampler.batch_size = 4
        return before, list(made)

    ours = sizes(cseq.DataLoader)
    assert same(ours, sizes(data.DataLoader))
    assert [len(epoch[0][0]) for epoch in ours] == [3, 4]


KEYS = [3, "text", (1, 2), {"a": 1}, True, np.int64(4), 2**70, None, 1.5, [5, 6], [True, 7]]
KEYS += [[], [1, 2.0], [np.int64(3)], [0, -1, 2**63 - 1, -(2**63)], [2**63], b"x" * 10_000]
# No cell has room for these keys.
KEYS += [[*range(512)], [*range(513)], [*range(40_960)]]


class Typed(data.Dataset[Any]):
    def __getitem__(self, key):
        inner = [type(each).__name__ for each in key] if isinstance(key, list) else None
        return type(key).__name__, repr(key), inner


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_keys_reach_the_data_set_as_they_are(rng):
    expected = [Typed()[key] for key in KEYS]
    made = loader(Typed(), sampler=KEYS, batch_size=None, collate_fn=as_is, rng=rng)
    assert list(made) == expected
    made = loader(Typed(), batch_sampler=[KEYS, tuple(KEYS)], collate_fn=as_is, rng=rng)
    assert list(made) == [expected, expected]


@pytest.mark.parametrize("method", [m for m in METHODS if m != QUICK])
def test_other_start_methods(method):
    options = FORK | {"batch_size": 2, "shuffle": True}
    expected = run(cseq.DataLoader, Augmented(9), 1, options)
    options["multiprocessing_context"] = method
    assert same(run(cseq.DataLoader, Augmented(9), 1, options), expected)


# ── batches in no order ────────────────────────────────────────────────────────────────────


class Gated(Plain):
    def __init__(self, path):
        super().__init__(10)
        self.path = path

    def __getitem__(self, index):
        while index == 2 and not self.path.exists():
            time.sleep(0.01)
        return index


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_out_of_order(tmp_path, method):
    """One worker waits: one of its batches comes before that, and all of the other worker's."""
    gate = tmp_path / "gate"
    iterator = iter(loader(Gated(gate), batch_size=None, in_order=False, worker_method=method))
    first = [next(iterator) for _ in range(8)]
    gate.touch()
    assert sorted([*first, *iterator]) == list(range(10))
    assert 2 not in first
    others = [index for index in first if index != 0]
    assert others == sorted(others)


@pytest.mark.parametrize("sizes", [(3, 30), (0, 4, 9)], ids=str)
def test_out_of_order_of_an_iterable_data_set(sizes):
    made = loader(Sharded(*sizes), num_workers=len(sizes), batch_size=None, in_order=False)
    iterator = iter(made)
    # The iterator is not torch's own.
    assert {worker.pid for worker in iterator._workers}
    samples = [(number, sample) for number, sample, *_ in iterator]
    assert sorted(samples) == [(n, k) for n, size in enumerate(sizes) for k in range(size)]
    # The samples of each worker are in order.
    for number in range(len(sizes)):
        assert [k for n, k in samples if n == number] == list(range(sizes[number]))
    state = made.state_dict()
    assert state["counts"] == list(sizes)


# ── lifetimes ──────────────────────────────────────────────────────────────────────────────


def test_persistent_workers_stay():
    made = loader(Plain(6), batch_size=None, persistent_workers=True)
    assert made._iterator is None
    iterator = iter(made)
    pids = [w.pid for w in iterator._workers]
    assert list(iterator) == list(range(6))
    assert list(iterator) == []
    assert next(iter(made)) == 0
    assert iter(made) is iterator
    assert list(iterator) == list(range(6))
    assert [w.pid for w in iterator._workers] == pids
    assert made._iterator is iterator
    iterator._shutdown_workers()
    assert not any(w.is_alive() for w in iterator._workers)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_generators_of_persistent_workers_after_a_break(taken):
    """The work that was made ahead has drawn from the generators, whether or not it is taken."""

    def left(kind, dataset, **more):
        seed_all()
        options = {"persistent_workers": True, "prefetch_factor": 3, **FORK, **more}
        made = kind(dataset, batch_size=2, **options)
        epochs = []
        for _ in range(3):
            iterator = iter(made)
            epochs.append([next(iterator) for _ in range(taken)])
        epochs.append(list(made))
        made._iterator = None
        return epochs

    for dataset in (Augmented(), Sharded(20, 30)):
        assert same(left(cseq.DataLoader, dataset), left(data.DataLoader, dataset))
    # A single worker is in order nevertheless.
    alone = {"num_workers": 1, "in_order": False}
    assert same(*(left(kind, Augmented(), **alone) for kind in (cseq.DataLoader, data.DataLoader)))


@pytest.mark.parametrize("dataset", [Plain(100), Sharded(9, 9)], ids=["map", "iterable"])
@pytest.mark.parametrize(
    "options", [{}, {"in_order": False}, {"persistent_workers": True}, {"rng": "batch"}], ids=str
)
def test_the_workers_of_a_dropped_iterator_end(dataset, options):
    """They end at once, without garbage collection; a worker that has not begun is killed."""
    gc.disable()
    try:
        iterator = iter(loader(dataset, batch_size=None, **options))
        next(iterator)
        workers = iterator._workers
        del iterator
        for worker in workers:
            worker.join(10)
            assert worker.exitcode in (0, KILLED)
    finally:
        gc.enable()


def test_pickles_and_copies():
    made = loader(Plain(4), batch_size=2, multiprocessing_context=None)
    iterator = iter(made)
    next(iterator)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert type(other) is cseq.DataLoader
        assert [b.tolist() for b in other] == [[0, 1], [2, 3]]
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)
    held = loader(Plain(4), persistent_workers=True)
    iter(held)
    with pytest.raises(NotImplementedError):
        pickle.dumps(held)
    held._iterator = None


# ── attributes and classes ─────────────────────────────────────────────────────────────────


def test_attributes_are_torchs():
    ours, theirs = loader(Plain()), data.DataLoader(Plain(), **FORK)
    public = {name for name in vars(theirs) if not name.startswith("_")}
    added = {name for name in vars(ours) if not name.startswith("_")} - public
    assert added == {"rng", "on_error", "worker_method", "snapshot_every_n_steps", "max_restarts"}
    assert isinstance(ours, data.DataLoader)
    assert len(ours) == len(theirs)
    assert cseq.DataLoader[int]
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match=name):
            setattr(ours, name, getattr(ours, name))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rng": "other"}, "rng='other' is unknown; pass one of None, 'worker', 'batch'"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown; pass one of None, 'raise', 'skip'"),
        ({"worker_method": "fibre"}, "worker_method='fibre' is .* 'multiprocessing', 'thread'"),
        (FORK | {"worker_method": "thread"}, "multiprocessing_context= cannot be combined with"),
        ({"snapshot_every_n_steps": -1}, "snapshot_every_n_steps=-1 is below 0"),
        ({"max_restarts": -1}, "max_restarts=-1 is below 0"),
        ({"num_workers": "auto"}, "num_workers='auto' requires an MPSequence"),
        # torch refuses these.
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"shuffle": True, "sampler": [1]}, "mutually exclusive"),
    ],
    ids=str,
)
def test_wrong_arguments(wrong, told):
    with pytest.raises(ValueError, match=told):
        cseq.DataLoader(Plain(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"batchsize": 8}, "'batchsize': did you mean 'batch_size'"),
        ({"colate_fn": len}, "did you mean 'collate_fn'"),
        ({"xyz": 1}, "the arguments are dataset, batch_size, .*, max_restarts"),
        ({"buffer": 8}, "use prefetch_factor="),
        ({"seed": 3}, "'seed': .*generator="),
        ({"device": 3}, "'device': .*pin_memory="),
        ({"order": cseq.Shuffled()}, "'order': pass it as sampler="),
    ],
)
def test_unknown_keywords(wrong, told):
    """The error says what to write instead; arguments of managers have an equivalent."""
    for kind in (cseq.DataLoader, cseq.StatefulDataLoader):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an .*argument.*{told}"):
            kind(Plain(), **wrong)


def test_a_class_in_place_of_a_data_set():
    """A class is refused at once, in either argument; a class that itself has samples is not."""
    told = r"dataset is the class Plain; pass an object, such as Plain\(\)"
    with pytest.raises(TypeError, match=told):
        cseq.DataLoader(Plain, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=told):
        cseq.DataLoader(dataset=Plain)  # type: ignore[arg-type]

    class Meta(type):
        def __len__(cls):
            return 2

        def __getitem__(cls, index):
            return index

    made = cseq.DataLoader(Meta("Samples", (), {}), batch_size=2)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in made] == [[0, 1]]


def test_wrong_at_iter():
    with pytest.raises(AssertionError):
        iter(loader(Plain(), prefetch_factor=0))
    with pytest.raises(AssertionError):
        iter(cseq.DataLoader(Plain(), timeout=1))


def test_what_may_be_set_counts_from_the_next_iter():
    made = cseq.DataLoader(Plain(4), batch_size=2)
    assert [b.tolist() for b in made] == [[0, 1], [2, 3]]
    made.num_workers, made.prefetch_factor = 2, 2
    made.multiprocessing_context = QUICK
    made.collate_fn = as_is
    assert list(made) == [[0, 1], [2, 3]]


def test_recreated_from_its_attributes():
    """Lightning recreates loaders like this."""

    class Own(cseq.DataLoader[Any]):
        def __init__(self, extra, *args, **kwargs):
            self.extra = extra
            super().__init__(*args, **kwargs)

    made = Own(7, Plain(4), batch_size=2, rng="batch", **FORK)
    names = inspect.signature(cseq.DataLoader.__init__).parameters
    given = {name: getattr(made, name) for name in names if hasattr(made, name)}
    for name in ("batch_size", "shuffle", "drop_last", "batch_sampler"):
        given.pop(name, None)
    given["sampler"] = data.SequentialSampler(made.dataset)
    again = Own(made.extra, batch_size=2, **given)
    assert again.rng == "batch"
    assert [b.tolist() for b in again] == [[0, 1], [2, 3]]


def test_made_of_the_attributes_of_torchs():
    """Some loaders are copies of another one's attributes."""
    made = cseq.DataLoader.__new__(cseq.DataLoader)
    vars(made).update(vars(data.DataLoader(Plain(3), **FORK)))
    assert [batch.tolist() for batch in made] == [[0], [1], [2]]
    assert made.state_dict()["_iterator_finished"]


def test_numbers_and_truth_of_other_types():
    check(Plain(5), num_workers=1, in_order=0, timeout=torch.tensor(60.0), pin_memory=0)
    check(Plain(5), in_order=np.bool_(True), timeout=True, persistent_workers=1)


def test_more_workers_than_processors():
    many = 2 + max(os.cpu_count() or 1, 8)
    with pytest.warns(UserWarning, match="worker processes in total"):
        cseq.DataLoader(Plain(), num_workers=many)


def test_the_default_of_the_process(monkeypatch):
    expected = run(cseq.DataLoader, Augmented(6), 1, {"rng": "batch"})
    monkeypatch.setattr(defaults, "rng", "batch")
    assert same(run(cseq.DataLoader, Augmented(6), 1, {}), expected)


def test_large_samples_are_stacked_where_they_stay():
    """The trainer reads the very memory that the worker's default_collate wrote."""

    class Large(Plain):
        def __getitem__(self, index):
            return torch.full((50, 100), index)

    iterator = iter(loader(Large(8), batch_size=4, num_workers=1))
    batch = next(iterator)
    assert batch.shape == (4, 50, 100)
    stats = iterator.stats()
    assert stats.copies == 0
    del batch
    with contextlib.suppress(StopIteration):
        next(iterator)


def damaged():
    """Yield two keys, then raise."""
    yield from range(2)
    raise ValueError("damaged")


@pytest.mark.parametrize("method", METHODS)
def test_a_sampler_that_raises_at_once(method):
    """Every start method raises its error, and none switches to torch's iterator for it."""
    made = loader(Plain(9), batch_size=None, sampler=damaged(), multiprocessing_context=method)
    with pytest.raises(ValueError, match="damaged"):
        list(made)


def test_workers_that_are_terminated_are_gone():
    """A caller may end and join the processes of `_workers`; other workers make their batches."""
    iterator = iter(loader(Plain(40), batch_size=None))
    assert next(iterator) == 0
    processes = list(iterator._workers)
    pids = [process.pid for process in processes]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
        assert not process.is_alive()
        assert process.exitcode == KILLED
    assert list(iterator) == list(range(1, 40))
    assert [process.pid for process in processes] == pids


class Waiting(Plain):
    def __init__(self):
        super().__init__(4)
        self.entered, self.released = threading.Event(), threading.Event()

    def __getitem__(self, index):
        if not self.entered.is_set():
            self.entered.set()
            assert self.released.wait(60)
        return index


def test_two_threads_in_one_iterator():
    """No batch reaches both threads; with workers, torch's loader hangs."""
    dataset = Waiting()
    iterator = iter(cseq.DataLoader(dataset))
    first = []
    thread = threading.Thread(target=lambda: first.append(next(iterator)))
    thread.start()
    assert dataset.entered.wait(60)
    with pytest.raises(RuntimeError, match="another thread"):
        next(iterator)
    dataset.released.set()
    thread.join()
    assert [batch.item() for batch in (*first, *iterator)] == [0, 1, 2, 3]


# ── a loader's reports on its workers ──────────────────────────────────────────────────────


def test_its_workers_are_known_to_cseqs_testing_and_counted():
    made = loader(Plain(12), batch_size=2)
    with pytest.raises(RuntimeError, match="not running"):
        cseq.testing.pids(made)
    with pytest.raises(RuntimeError, match="no cseq workers"):
        made.stats()
    iterator = iter(made)
    got = [next(iterator).tolist()]
    pids = [process.pid for process in iterator._workers]
    assert cseq.testing.pids(made) == cseq.testing.pids(iterator) == pids
    assert cseq.testing.kill(made, 1) == pids[1]
    got += [batch.tolist() for batch in iterator]
    assert got == [[k, k + 1] for k in range(0, 12, 2)]
    assert made.stats().batches == iterator.stats().batches == 6
    del iterator
    stats = made.stats()
    assert (stats.batches, stats.samples, stats.step_seconds.count) == (6, 12, 6)
    assert stats.index_seconds.count >= 6
    assert str(made.advice()).startswith(stats.bottleneck)
    # No batch came since then.
    assert made.advice(since=stats).cause == "unknown"
    with pytest.raises(RuntimeError, match="not running"):
        cseq.testing.pids(made)
    for _ in made:
        break
    assert made.stats().batches == 1
    without = cseq.DataLoader(Plain(2))
    assert len(list(without)) == 2
    with pytest.raises(RuntimeError, match="no cseq workers"):
        without.stats()
    assert without.advice().change == {"num_workers": 2}


class Listed(Plain):
    """Is asked for whole batches, and for how many they are."""

    def __getitems__(self, indices):
        return [self[int(index)] for index in np.atleast_1d(np.asarray(indices))]


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"batch_size": 5}, 12),
        ({"batch_size": 5, "rng": "batch", "drop_last": True}, 10),
        ({"batch_size": None}, 12),
        ({"batch_sampler": [(1, 2, 3), (4, 5)], "rng": "batch"}, 5),
        # No ticket holds this many indices.
        ({"batch_sampler": [list(range(12)) * 400]}, 4800),
        # These batches have no length.
        ({"batch_sampler": torch.arange(3), "collate_fn": as_is}, 3),
    ],
)
def test_samples_are_counted(options, samples):
    """For map-style data, the samples are the indices of each batch."""
    made = loader(Listed(12), **options)
    list(made)
    assert made.stats().samples == samples


@pytest.mark.parametrize("rng", ["worker", "batch"])
def test_the_log_says_if_numbers_are_drawn_again(rng, caplog):
    made = loader(Augmented(12), num_workers=1, batch_size=1, prefetch_factor=1, rng=rng)
    iterator = iter(made)
    got = [next(iterator)]
    kill(iterator._workers[0].pid)
    got += iterator
    assert len(got) == 12
    again = len({str(batch["drawn"]) for batch in got}) < 12
    # Another thread writes the log.
    while not any("is being replaced" in each.message for each in caplog.records):
        time.sleep(0.01)
    [record] = [each for each in caplog.records if "is being replaced" in each.message]
    assert again == ("repeat earlier numbers" in record.message)
    assert again == (rng == "worker")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import cseq
print(hasattr(cseq, "DataLoader"), "DataLoader" in dir(cseq), hasattr(cseq, "rng"))
for line in sys.argv[1:]:
    try:
        exec(line)
    except (AttributeError, ImportError) as error:
        print(type(error).__name__, error)
"""


def test_without_torch_errors_say_what_to_install(run_anew):
    modules = "from cseq import StatefulDataLoader", "from cseq.adapters.torch import install"
    printed = run_anew(WITHOUT_TORCH, "cseq.DataLoader", *modules).stdout.splitlines()
    assert printed[0] == "False False True"
    raised = [line.partition(" ")[0] for line in printed[1:]]
    assert raised == ["AttributeError", "ImportError", "ImportError"]
    assert all("pip install 'cseq-loader[torch]'" in line for line in printed[1:])
    assert hasattr(cseq, "DataLoader")
    assert {"DataLoader", "progress", "__version__", *cseq.__all__} <= {*dir(cseq)}
    assert not {"kinds", "lanes", "engine", "sys", "typing", "annotations"} & {*dir(cseq)}
