"""The functions for indexers: `rng`, `empty` and `worker_info`, in every pool."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from indexers import Info
from kinds import FEW, INLINE, THREAD, assert_same, by_name, stream

import cseq
from cseq.indexing import context

every_kind = pytest.mark.parametrize("kind", FEW, ids=by_name)


class Rng:
    """Draws from the batch's generator in two calls, and returns whether they gave the same one."""

    def __getitem__(self, indices):
        first = cseq.rng()
        return first is cseq.rng(), first.integers(1 << 62), cseq.rng().integers(1 << 62)


@pytest.mark.parametrize("kind", [INLINE, THREAD], ids=by_name)
def test_rng_of_a_batch(kind):
    """In a batch, `rng` is one generator; each batch, epoch, seed and rank has another one."""
    draws = []
    for options in ({"epochs": 2}, {"seed": 43}, {"shard": (0, 2)}, {"shard": (1, 2)}):
        for same, first, second in stream(kind, Rng, 8, batch_size=1, **options):
            assert same
            draws += [first, second]
    # Rank 0 begins where the whole order begins: that batch has the same place in the same epoch.
    assert len(draws) == 2 * (16 + 8 + 4 + 4)
    assert len(set(draws)) == len(draws) - 2 * 8


def test_rng_is_pinned():
    """The draws of `rng` for a batch never change: a seed stands for them, too."""
    drawn = context.generator(1, 2, 3).integers(1 << 32, size=3).tolist()
    again = context.generator(1, 2, 3)
    assert drawn == again.integers(1 << 32, size=3).tolist() == [107490069, 3035305554, 634159054]
    assert type(again.bit_generator) is np.random.Philox


@every_kind
def test_rng_outside_of_a_batch(kind):
    """`rng` raises a RuntimeError with an alternative, even while the indexer is made."""
    with pytest.raises(RuntimeError, match="default_rng"):
        cseq.rng()
    with pytest.raises(RuntimeError, match="__getitem__"), kind.start(cseq.rng, 10) as m:
        list(m)


def test_empty_outside():
    """Outside of a worker, `empty` is numpy's, with the same arguments and errors."""
    assert cseq.empty(3).dtype == np.float64
    assert cseq.empty((2, 3), "i2").shape == (2, 3)
    assert cseq.empty([2, 0], dtype=bool).shape == (2, 0)
    assert cseq.empty(np.int64(4), object).tolist() == [None] * 4
    assert cseq.empty((), "u1").shape == ()
    with pytest.raises(ValueError, match="negative"):
        cseq.empty((2, -1))
    for shape in (2.5, (2.7, 3), "3", None):
        with pytest.raises(TypeError):
            cseq.empty(shape)  # type: ignore[arg-type]


@every_kind
def test_empty_with_objects(kind):
    """For Python objects, `empty` is numpy's in this process, and an error in shared memory."""

    class Objects:
        def __getitem__(self, indices):
            return cseq.empty(2, object)

    if kind.processes:
        with kind.start(Objects, 2) as m, pytest.raises(ValueError, match="object"):
            list(m)
    else:
        assert stream(kind, Objects, 2)[0].tolist() == [None, None]


@every_kind
def test_empty_in_a_thread_of_the_indexers_own(kind):
    """A thread that an indexer starts has no context: it gets plain arrays, and no generator."""

    class Threads:
        def __getitem__(self, indices):
            def ask():
                array = cseq.empty(2, "i8")
                array[:] = 7
                return [array, cseq.worker_info()]

            with ThreadPoolExecutor() as pool:
                return pool.submit(ask).result()

    assert_same(stream(kind, Threads, 1), [[np.array([7, 7]), None]])


@every_kind
def test_worker_info(kind):
    """`worker_info` says which of how many workers makes which batch of which epoch."""
    workers = 3 if kind.parallel else 1
    got = stream(kind, Info, 60, batch_size=2, epochs=2, num_workers=3, shuffle=False)
    assert [(info.epoch, info.batch) for *_, info in got] == [divmod(k, 30) for k in range(60)]
    for indices, made, info in got:
        assert indices[0] == 2 * info.batch
        assert (made.number, made.num_workers) == (info.number, info.num_workers)
        assert (made.epoch, made.batch) == (None, None)
        assert info.num_workers == workers
        assert info.number in range(workers)
    assert cseq.worker_info() is None


@every_kind
def test_at_close(kind, tmp_path):
    """A closing indexer has no batch: its worker is known, and `empty` is numpy's."""

    class Closing:
        def __getitem__(self, indices):
            return cseq.empty(100_000, "u1")

        def close(self):
            info = cseq.worker_info()
            # In shared memory, this would spoil a batch.
            cseq.empty(100_000, "u1")[:] = 255
            (tmp_path / "closed").write_text(f"{info.epoch} {info.batch} {info.number}")

    batch = stream(kind, Closing, 1, num_workers=1)[0].copy()
    assert (tmp_path / "closed").read_text() == "None None 0"
    assert batch.shape == (100_000,)


def test_contexts_are_one_for_each_thread():
    """Only its own thread sees a context, and leaving one restores the previous one."""
    one, two = context.BatchContext(0, 2, 7), context.BatchContext(1, 2, 7)
    assert context.enter(one) is None
    seen = []
    thread = threading.Thread(target=lambda: seen.append(cseq.worker_info()))
    thread.start()
    thread.join()
    left = context.enter(two)
    assert left is one
    assert cseq.worker_info() == cseq.WorkerInfo(1, 2, None, None)
    context.enter(left)
    assert cseq.worker_info() == cseq.WorkerInfo(0, 2, None, None)
    context.enter(None)
    assert seen == [None]
    assert cseq.worker_info() is None
