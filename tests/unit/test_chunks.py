"""Chunks: read once for all processes, also if readers die, and never mixed up."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import cseq
from cseq import testing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

linux = pytest.mark.needs("Linux")
SAMPLES, ROWS = 103, 10
CHUNKS = -(-SAMPLES // ROWS)


class Pair(NamedTuple):
    """What a chunk has."""

    numbers: Any
    images: Any


class Chunks:
    """Samples that say which they are."""

    def __getitem__(self, number: int) -> Pair:
        numbers = np.arange(number * ROWS, min(SAMPLES, (number + 1) * ROWS))
        return Pair(numbers, np.repeat(numbers[:, None].astype("uint8"), 50, axis=1))


class Slow(Chunks):
    """Takes a moment, so that many want the same chunk."""

    def __getitem__(self, number: int) -> Pair:
        time.sleep(0.005)
        return super().__getitem__(number)


def cache(chunks: Any = Chunks, keep: int = CHUNKS) -> cseq.ChunkCache:
    """Make a cache of the samples."""
    return cseq.ChunkCache(chunks, SAMPLES, ROWS, keep)


def is_right(batch: Pair, indices: Any) -> bool:
    """Whether a batch has the samples of its indices, all of them whole."""
    wanted = np.asarray(indices)
    return (
        type(batch) is Pair
        and np.array_equal(batch.numbers, wanted)
        and bool((batch.images == wanted[:, None].astype("uint8")).all())
    )


def test_it_is_an_indexer() -> None:
    """Any samples, in any order, of any chunks, also of the short one; none of them."""
    one = cache(keep=2)
    assert len(one) == SAMPLES
    for indices in ([0], [102, 0, 55, 0, 99, 100], range(SAMPLES), []):
        assert is_right(one[np.array(indices, np.int64)], np.array(indices, np.int64))
    assert repr(one) == "<ChunkCache: 103 samples, 10 a chunk, keep=2>"


def test_structures() -> None:
    """Arrays alone, and in dicts, lists and tuples; of any numbers, and texts of one length."""
    rows = np.arange(20, dtype=">i4").reshape(10, 2)
    texts = np.array([f"t{k}" for k in range(10)])

    class Nested:
        def __getitem__(self, number: int) -> Any:
            part = slice(4 * number, 4 * number + 4)
            return {"a": [rows[part], (texts[part],)], "b": rows[part, 0] > 5}

    one = cseq.ChunkCache(Nested(), 10, 4, 3)
    got = one[np.array([9, 1])]
    assert got["a"][0].tolist() == rows[[9, 1]].tolist()
    assert got["a"][0].dtype == rows.dtype
    assert (got["a"][1][0].tolist(), got["b"].tolist()) == (["t9", "t1"], [True, False])


@pytest.mark.parametrize("keep", [1, 3, CHUNKS])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (cseq.MPSequence, {}),
        pytest.param(cseq.MPSequence, {"start_method": "fork"}, marks=pytest.mark.needs("fork")),
        (cseq.MTSequence, {}),
        (cseq.MPSequence, {"num_workers": 0}),
    ],
    ids=["processes", "forks", "threads", "none"],
)
def test_sequences(kind: Any, options: dict[str, Any], keep: int) -> None:
    """Two epochs are what they are without a cache, however few chunks are kept."""
    usual = {"num_workers": 3, "batch_size": 16, "seed": 3, "out_type": "null"}
    manager = kind(cache(keep=keep), **{**usual, **options})
    with manager.start() as batches:
        for epoch in range(2):
            for number, batch in enumerate(batches):
                assert is_right(batch, manager.indices(epoch, number))


@linux
def test_each_chunk_is_read_once_by_all_processes() -> None:
    """And once more only if it made room for another one."""
    one = cache(Slow)
    manager = cseq.MPSequence(one, num_workers=4, batch_size=20, out_type="null", seed=1)
    with manager.start() as batches:
        for _ in range(3):
            assert sum(len(batch.numbers) for batch in batches) == SAMPLES
    assert one.reads == CHUNKS
    assert is_right(one[np.arange(SAMPLES)], np.arange(SAMPLES))
    assert one.reads == CHUNKS


def test_threads_read_each_chunk_once() -> None:
    """As processes do."""
    one = cache(Slow)
    manager = cseq.MTSequence(one, num_workers=4, batch_size=20, out_type="null", seed=1)
    with manager.start() as batches:
        assert sum(len(batch.numbers) for batch in batches) == SAMPLES
    assert one.reads == CHUNKS


class Dying(Slow):
    """Dies in the middle of the first chunks that it reads in a worker process."""

    def __init__(self, folder: Path, trainer: int) -> None:
        self.folder, self.trainer = folder, trainer

    def __getitem__(self, number: int) -> Pair:
        mark = self.folder / str(number)
        if number % 5 == 1 and os.getpid() != self.trainer and not mark.exists():
            mark.touch()
            os._exit(1)
        return super().__getitem__(number)


def test_a_worker_that_dies_while_it_reads(tmp_path: Path) -> None:
    """Its chunk is read again, by the one that takes its place or by one that waits."""
    one = cache(Dying(tmp_path, os.getpid()))
    manager = cseq.MPSequence(one, num_workers=3, batch_size=20, out_type="null", seed=1)
    with manager.start() as batches:
        for number, batch in enumerate(batches):
            assert is_right(batch, manager.indices(0, number))
        assert manager.stats().restarts == len(list(tmp_path.iterdir())) > 0


def test_workers_that_are_killed() -> None:
    """At any moment, again and again."""
    manager = cseq.MPSequence(
        cache(Slow, keep=3), num_workers=2, batch_size=8, out_type="null", seed=1, repeat=3
    )
    with manager.start() as batches:
        for number, batch in enumerate(batches):
            epoch, place = divmod(number, len(manager))
            assert is_right(batch, manager.indices(epoch, place))
            if number % 5 == 0:
                testing.kill(manager, number % 2)


class Raising(Chunks):
    """Raises once."""

    raised = False

    def __getitem__(self, number: int) -> Pair:
        if number == 4 and not self.raised:
            self.raised = True
            raise LookupError("chunk 4 is not there yet")
        return super().__getitem__(number)


def test_a_chunk_that_cannot_be_read() -> None:
    """What is raised is the user's; the next time it is tried again."""
    one = cache(Raising())
    with pytest.raises(LookupError, match="chunk 4 is not there yet"):
        one[np.array([45])]
    assert is_right(one[np.array([45])], [45])


def readers(one: cseq.ChunkCache, seconds: float) -> Iterator[bool]:
    """Read at random for a while."""
    rng = np.random.default_rng(os.getpid() + threading.get_ident() % 1000)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        indices = rng.integers(SAMPLES, size=12)
        yield is_right(one[indices], indices)


def test_slots_that_are_taken_while_they_are_read() -> None:
    """Threads that read from two slots in turn never get rows of another chunk."""
    one = cache(keep=2)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(all(readers(one, 1.0)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


@pytest.mark.needs("fork")
def test_forks_share_it() -> None:
    """Each fork has locks of its own; none gets rows of another chunk."""
    one = cache(keep=2)
    children = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                status = 0 if all(readers(one, 1.0)) else 2
            finally:
                os._exit(status)
        children.append(pid)
    assert all(readers(one, 1.0))
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


@linux
def test_nothing_is_left() -> None:
    """Neither descriptors nor memory."""
    before = testing.descriptors()
    one = cache()
    copy = pickle.loads(pickle.dumps(one))
    assert is_right(copy[np.arange(20)], np.arange(20))
    assert (one.reads, copy.reads) == (2, 2)
    del copy, one
    gc.collect()
    assert testing.descriptors() == before


@linux
def test_a_copy_whose_original_is_gone() -> None:
    """On another machine, for one: it has a memory of its own, and hands that on."""
    data = pickle.dumps(cache())
    gc.collect()
    one = pickle.loads(data)
    assert (is_right(one[np.arange(30)], np.arange(30)), one.reads) == (True, 3)
    copy = pickle.loads(pickle.dumps(one))
    assert (is_right(copy[np.arange(30)], np.arange(30)), copy.reads) == (True, 3)


@linux
def test_a_descriptor_that_is_another_files_by_now(tmp_path: Path) -> None:
    """The original is gone, its number a file's of the program: this stays as it is."""
    one = cache()
    state = one.__getstate__()
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file:
        copy = cseq.ChunkCache.__new__(cseq.ChunkCache)
        copy.__setstate__({**state, "_home": (os.getpid(), file.fileno())})
        assert is_right(copy[np.arange(30)], np.arange(30))
    assert path.read_bytes() == bytes(1 << 20)


class Odd(Chunks):
    """Has another type in its second chunk."""

    def __getitem__(self, number: int) -> Any:
        pair = super().__getitem__(number)
        return pair if number != 1 else pair._replace(images=pair.images.astype("float32"))


class Turned:
    """Has the arrays of its second chunk in another order."""

    def __getitem__(self, number: int) -> Any:
        rows = np.arange(2)
        return {"b": -rows, "a": rows} if number else {"a": rows, "b": -rows}


class Texts:
    """Has objects."""

    def __getitem__(self, number: int) -> Any:
        return np.array(["a", None], object)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: cseq.ChunkCache(3, 10, 5, 1), TypeError, "chunks=3 can neither be called"),
        (lambda: cseq.ChunkCache(Chunks, 0, 5, 1), ValueError, "samples=0"),
        (lambda: cseq.ChunkCache(Chunks, 10, 0, 1), ValueError, "rows=0"),
        (lambda: cseq.ChunkCache(Chunks, 10, 5, 0), ValueError, "keep=0"),
        (lambda: cseq.ChunkCache(Texts, 2, 2, 1), TypeError, "chunk 0 has .* no array of samples"),
        (lambda: cseq.ChunkCache(lambda: [()], 2, 2, 1), ValueError, "has no arrays"),
        (lambda: cache(Odd)[np.array([10])], ValueError, "chunk 1 has arrays"),
        (lambda: cseq.ChunkCache(Turned, 4, 2, 2)[np.array([2])], ValueError, "chunk 1 is built"),
        (lambda: cache()[np.array([103])], IndexError, r"indices from 103 to 103 are not in"),
        (lambda: cseq.ChunkCache(Chunks, SAMPLES, 7, 1), ValueError, "chunk 0 has arrays"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], text: str) -> None:
    """With the argument, or the chunk, and what to do."""
    with pytest.raises(error, match=text):
        make()
