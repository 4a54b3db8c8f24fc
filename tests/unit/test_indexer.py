"""Stage 1: valid workers, valid indexers, and a ticket's way through them."""

import functools
import re

import numpy as np
import pytest
from indexers import Lasting, NotAnIndexer, Rows
from kinds import FEW, by_name
from ringing import Trainer, make_ring, stamps

import cseq
from cseq._work import Runner
from cseq.encoding._codec import Objects
from cseq.indexing import context, indexer
from cseq.stage import INDEXER


@pytest.mark.parametrize(
    "worker", [3, None, object(), [1], (1,), {1: 2}, "a", b"a", bytearray(2), range(3),
               memoryview(b"a")], ids=lambda w: type(w).__name__
)  # fmt: skip
def test_no_workers(worker):
    """An object that can be neither called nor indexed by an array raises a TypeError."""
    with pytest.raises(TypeError, match=r"^worker.*pass"):
        indexer.check_worker(worker)


@pytest.mark.parametrize("worker", [NotAnIndexer, lambda: None, lambda: Rows])
def test_build_no_indexer(worker):
    """A worker that makes an object without __getitem__, even a class of indexers, is refused."""
    with pytest.raises(TypeError, match="__getitem__"):
        indexer.build(worker)


def table(library, name):
    """Make an object of a type that resembles a library's table."""
    kind = type(name, (), {"__getitem__": lambda self, key: key, "__len__": lambda self: 3})
    kind.__module__ = f"{library}.core.frame"
    return kind()


@pytest.mark.parametrize(
    ("library", "rows"), [("pandas", r"\.iloc\[indices\]"), ("polars", r"its \[indices\]")]
)
@pytest.mark.parametrize("name", ["DataFrame", "Series"])
def test_tables_are_no_workers(library, rows, name):
    """Tables of pandas and polars are refused with the remedy, even if a factory makes them."""
    worker = table(library, name)
    with pytest.raises(TypeError, match=rf"^worker is a {library} {name}.*to_numpy.*{rows}"):
        indexer.check_worker(worker)
    with pytest.raises(TypeError, match=rf"made a {library} {name}.*to_numpy"):
        indexer.build(lambda: worker)
    indexer.check_worker(table("mine", name))


class OneByOne:
    """A data set for one index at a time, which fails with an array."""

    def __init__(self, call, good=0):
        self.call = call
        # The number of calls that do not fail.
        self.good = good

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.good -= 1
        return index if self.good >= 0 else self.call(index)


def raises(error):
    """Return a function that raises its own error."""

    def call(index):
        raise error("shard 3 has changed")

    return call


def hint_of(kind, worker):
    """Return the hint below the exception that a worker raises."""
    with kind.start(worker, 20, num_workers=1, batch_size=2) as m, pytest.raises(Exception) as at:  # noqa: PT011
        list(m)
    return "\n".join([str(at.value), *getattr(at.value, "__notes__", [])])


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_a_data_set_as_worker(kind):
    """A data set's first exception says that the data set should be wrapped; no other one does."""
    for call in ([*range(100)].__getitem__, {0: 1}.get, lambda index: 1 if index else 2):
        assert "cseq.from_dataset(dataset)" in hint_of(kind, OneByOne(call))
    for error in (OSError, ValueError, KeyError, IndexError):
        assert "cseq.from_dataset" not in hint_of(kind, OneByOne(raises(error)))
    assert "cseq.from_dataset" not in hint_of(kind, OneByOne(lambda index: np.frombuffer(b"123")))
    assert "cseq.from_dataset" not in hint_of(kind, OneByOne(raises(TypeError), good=1))
    assert "cseq.from_dataset" not in hint_of(kind, np.arange(1))


def test_the_stamps_of_tickets_in_a_row():
    """If a ticket is claimed right after another, both share one reading of the clock."""
    ring = make_ring(cells=3, runners=1)
    trainer = Trainer(ring, 3, recorded=True)
    runner = Runner(ring, INDEXER, 1, last=True)
    indexing = indexer.Indexing(Objects(3), np.arange(10), context.BatchContext(0, 1, 5), None)
    for _ in range(3):
        assert next(runner)
        indexing.work(runner)
    assert [trainer.batch() for _ in range(3)] == [0, 1, 2]
    first, second, third = stamps()
    assert 0 < first[0] <= first[1] <= second[0] <= second[1] == third[0] <= third[1]


class Returns:
    def __init__(self, batch):
        self.batch = batch

    def __getitem__(self, indices):
        return self.batch


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_a_forgotten_return(kind):
    """None is no batch: it is an error of that batch, or the batch is skipped."""
    told = "__getitem__` of Returns returned None; is a `return` missing?"
    worker = functools.partial(Returns, None)
    with kind.start(worker, 8, batch_size=2, shuffle=False, out_type="null") as m:
        batches = iter(m)
        for number in range(4):
            with pytest.raises(TypeError, match=re.escape(told)) as caught:
                next(batches)
            assert f"epoch 0, batch {number}, indices" in str(vars(caught.value))
    with kind.start(worker, 8, batch_size=2, out_type="null", on_error="skip") as m:
        assert list(m) == []
        assert [told in one.error for one in m.skipped] == [True] * 4


class Squares:
    """A typical torch data set for one index; it accepts an array, but makes no batch."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.array([index, index**2]), index % 10


def torchs(kind, base="Dataset"):
    """Make an object of a class that is also a torch data set."""
    data = pytest.importorskip("torch.utils.data")
    return type(kind.__name__, (kind, getattr(data, base)), {"__iter__": None})()


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_a_torch_data_set_as_worker(kind):
    """Both it and a class become what `from_dataset` makes of them: no batch is transposed."""
    made = torchs(Squares)
    for worker, size in ((made, None), (type(made), 100)):
        with kind.start(worker, size, batch_size=50, shuffle=False, out_type="cpu") as m:
            rows, labels = next(iter(m))
        assert rows.tolist() == [[k, k**2] for k in range(50)]
        assert (labels.tolist(), str(labels.dtype)) == ([k % 10 for k in range(50)], "torch.int64")


class Whole(Squares):
    def __getitem__(self, indices):
        return indices.tolist()


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_a_torch_data_set_for_arrays(kind):
    """The error says that it gets none, and what does."""
    assert "does not derive from Dataset" in hint_of(kind, torchs(Whole))
    assert "derive from Dataset" not in hint_of(kind, cseq.from_dataset(torchs(Whole)))


@pytest.mark.parametrize(
    "worker", [lambda indices: indices, functools.partial(Lasting), OneByOne.__getitem__]
)
def test_a_function_is_no_worker(worker):
    """A class that requires arguments is none either."""
    with pytest.raises(TypeError, match=r"without arguments \(.*\); pass a class or object"):
        cseq.MPSequence(worker, 8)


def test_an_iterable_data_set_is_no_worker():
    """Like its class, it has no sample for an index; the error names what accepts it."""
    stream = torchs(Squares, "IterableDataset")
    for worker in (stream, type(stream)):
        with pytest.raises(TypeError, match=r"^worker is a Squares, an Iter.*cseq.DataLoader"):
            cseq.MPSequence(worker, 8)
    with pytest.raises(TypeError, match=r"made a Squares, an IterableDataset"):
        indexer.build(lambda: stream)
