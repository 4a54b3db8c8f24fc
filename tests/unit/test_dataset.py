"""`from_dataset`: a map-style data set as a worker."""

import itertools
import sys
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
from indexers import Pair, Rows
from kinds import FEW, INLINE, KINDS, QUICK, assert_same, by_name, stream

import cseq
from cseq.indexing.dataset import default_collate


class Squares:
    """A typical data set: one plain int in, one sample out."""

    def __init__(self, n=10):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert type(index) is int
        return np.full(3, index, np.float32), index * index, f"sample {index}"


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_every_kind(kind):
    """The worker knows its length; its batches are the same in every kind of pool."""
    worker = cseq.from_dataset(Squares())
    with kind.start(worker, None, shuffle=False, batch_size=4) as m:
        assert (m.dset_size, len(m)) == (10, 3)
        batches = list(m)
    numbers = np.concatenate([batch[1] for batch in batches])
    assert numbers.dtype == np.int64
    assert numbers.tolist() == [i * i for i in range(10)]
    data, _, names = batches[2]
    assert (data.dtype, data.tolist()) == (np.float32, [[8, 8, 8], [9, 9, 9]])
    assert names == ["sample 8", "sample 9"]
    assert_same(
        stream(kind, worker, None, batch_size=4), stream(INLINE, worker, None, batch_size=4)
    )


def test_without_dset_size():
    """`dset_size` may be left out if there is a length, or be a part of the data."""
    worker = cseq.from_dataset(data := Squares(33))
    assert worker.dataset is data
    m = cseq.MPSequence(worker, batch_size=32, out_type="null")
    assert (m.dset_size, len(m)) == (33, 2)
    assert cseq.MTSequence(np.zeros((5, 2)), out_type="null").dset_size == 5
    m = cseq.MTSequence(cseq.from_dataset(Squares()), [9, 1], shuffle=False, out_type="null")
    with m.start() as batches:
        assert [batch[1].tolist() for batch in batches] == [[81, 1]]
    for without in (Squares, partial(Squares, 3), object):
        with pytest.raises(TypeError, match=r"dset_size is missing.*from_dataset"):
            cseq.MPSequence(without, batch_size=2)


def test_getitems():
    """`__getitems__` is used if it exists, with a list of plain integers."""
    dataset = Holed()
    dataset.__getitems__ = lambda indices: [(type(k).__name__, k) for k in indices]  # type: ignore[attr-defined]
    types, numbers = cseq.from_dataset(dataset)[np.arange(8, 11)]
    assert (types, numbers.tolist()) == (["int"] * 3, [8, 9, 10])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_the_index_that_failed(kind):
    """An exception names the sample, and no remedy that is already applied."""
    batches = kind.start(cseq.from_dataset(Holed()), None, batch_size=12, shuffle=False)
    with batches as m, pytest.raises(OSError, match="no sample 1") as at:
        list(m)
    notes = "\n".join(at.value.__notes__)
    assert "sample 1 of Holed" in notes
    assert "from_dataset" not in notes


class Holed(Squares):
    """Some samples raise, one is None; each draws, and has a large array."""

    def __init__(self, *, large=False, together=False):
        super().__init__(12)
        self.large = large
        if together:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __getitem__(self, index):
        drawn = np.random.random()  # noqa: NPY002 - the one that cseq seeds
        if index in (1, 8, 9, 10, 11):
            raise OSError(f"no sample {index}")
        rows = np.full((300, 100) if self.large else 2, index, np.float64)
        return None if index == 6 else (index, drawn, rows)


@pytest.mark.parametrize("options", [{}, {"large": True}, {"together": True}], ids=str)
def test_a_sample_that_raises_is_left_out(options):
    """Its batch is smaller, in every kind of pool; a batch without samples is skipped."""
    streams = []
    usual = {"batch_size": 4, "shuffle": False, "seed": 3, "on_error": "skip", "out_type": "cpu"}
    for kind in FEW:
        with kind.start(cseq.from_dataset(Holed(**options)), None, **usual) as m:
            streams.append([[np.asarray(part) for part in batch] for batch in m])
            one, none, whole = m.skipped
        assert one == (0, 0, 1, "OSError: no sample 1", [1])
        assert none[:3] == (0, 1, 6)
        assert none.error == "TypeError: sample 6 of Holed is None; is a `return` missing?"
        assert whole == (0, 2, None, "OSError: no sample 8", [8, 9, 10, 11])
        assert [batch[0].tolist() for batch in streams[-1]] == [[0, 2, 3], [4, 5, 7]]
        for numbers, _, rows in streams[-1]:
            assert (rows.reshape(3, -1) == numbers[:, None]).all()
    seeded = [kept for kind, kept in zip(FEW, streams, strict=True) if kind.name != "thread"]
    assert_same(seeded[0], seeded[-1])


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_ranks_have_equally_many_batches(kind):
    """Each rank has as many as `len` says, no matter which samples it loses."""
    worker, options = cseq.from_dataset(Holed(), len), {"batch_size": 2, "on_error": "skip"}
    for rank in range(2):
        with kind.start(worker, [*range(6), 7, 0], shard=(rank, 2), seed=1, **options) as m:
            assert len(list(m)) == len(m) == 2


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_the_parts_of_a_batch_that_lacks_samples(kind):
    """They belong to the existing samples."""

    def rows_of(samples):
        assert cseq.parts().sum() == len(samples)
        return cseq.parts()

    worker = cseq.from_dataset(Holed(), rows_of)
    order = cseq.Packed([2] * 12, budget=6)
    with kind.start(worker, range(12), batch_size=2, order=order, seed=1, on_error="skip") as m:
        sizes = np.concatenate([*m])
    assert sizes.max() == 3
    assert sizes.sum() == 12 - 5 or len(m.skipped) < 5


def test_no_data_set():
    """An object without samples by index, or without a length, is refused at once."""
    refused = (Squares, "pass an object, such as"), (iter([1]), "__getitem__"), (Rows(), "__len__")
    for dataset, text in refused:
        with pytest.raises(TypeError, match=text):
            cseq.from_dataset(dataset)
    with pytest.raises(TypeError, match="collate=3"):
        cseq.from_dataset(Squares(), collate=3)  # type: ignore[arg-type]
    # The error names a collate function that returns nothing, as it names an indexer.
    worker = cseq.from_dataset(Squares(), lambda samples: None)
    with pytest.raises(TypeError, match=r"returned None; is a `return` missing\?"):
        worker[np.arange(2)]


def test_collating_by_default():
    """Every kind of value is collated, nested."""
    samples = [
        {"pair": Pair(np.full((2, 2), k), k), "list": [k, 0.5], "text": "é", "bytes": b"x",
         "flag": k > 0, "scalar": np.float32(k), "zero": np.array(k, np.int8)}
        for k in range(3)
    ]  # fmt: skip
    batch = default_collate(samples)
    assert type(batch["pair"]) is Pair
    assert batch["pair"].image.shape == (3, 2, 2)
    assert batch["pair"].label.tolist() == [0, 1, 2]
    assert [part.dtype for part in batch["list"]] == [np.int64, np.float64]
    assert (batch["text"], batch["bytes"]) == (["é"] * 3, [b"x"] * 3)
    assert batch["flag"].tolist() == [False, True, True]
    assert (batch["scalar"].dtype, batch["zero"].dtype) == (np.float32, np.int8)
    assert batch["zero"].shape == (3,)
    assert type(default_collate([OrderedDict(a=1)])) is OrderedDict


class Watched(np.ndarray):
    """An array that accepts weak references."""


class Held(Squares):
    """Samples with a large array; counts how many of them are alive at a time."""

    def __init__(self, wrap):
        super().__init__(8)
        self.wrap = wrap
        self.made: list[weakref.ref[Any]] = []
        self.most = 0

    def __getitem__(self, index):
        self.most = max(self.most, sum(each() is not None for each in self.made))
        array = np.full((100, 200), index, np.float64).view(Watched)
        self.made.append(weakref.ref(array))
        return self.wrap(array, index)


WRAPS = {
    "bare": lambda array, _: array,
    "tuple": lambda array, number: (array, number),
    "list": lambda array, number: [number, array],
    "dict": lambda array, number: {"data": {"x": (array, number)}, "label": number},
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_large_arrays_are_not_held_beside_the_batch(wrap):
    """Each goes into the batch before the next one is fetched; the batch is the same."""
    dataset = Held(wrap)
    batch = cseq.from_dataset(dataset)[np.arange(8)]
    assert dataset.most == 0
    want = default_collate([dataset[number] for number in range(8)])
    assert dataset.most == 8 - 1
    assert type(batch) is type(want)
    assert_same(batch, want)


BIG = np.zeros((100, 200))


def by_index(samples):
    """Collate samples that are fetched one by one."""
    return cseq.from_dataset(samples)[np.arange(len(samples))]


@pytest.mark.parametrize(
    "samples",
    [
        [BIG, BIG + 1, np.ones((100, 200), np.float32), BIG],
        [BIG, BIG.astype(np.complex64)],
        [(BIG, 1), [BIG + 1, 2], (BIG, 3)],
        [{"a": BIG, "b": 1}, {"b": 2, "a": BIG + 1}],
        [[BIG, [BIG + 2, "x"]], [BIG + 1, [BIG, "y"]]],
        [Pair(BIG, 1), Pair(BIG + 1, 2)],
        [(BIG, np.zeros(20_000, object)), (BIG, np.ones(20_000, object))],
    ],
)
def test_large_arrays_that_differ(samples):
    """A sample unlike the first one is collated as without large arrays."""
    assert_same(by_index(samples), default_collate(samples))


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        ([np.zeros(3), np.zeros(4)], ValueError, r"shape.*\(3,\), \(4,\).*collate"),
        ([(1, 2), (1,)], ValueError, "length, from 1 to 2"),
        ([{"a": 1}, {"b": 1}], ValueError, "keys"),
        ([object()], TypeError, "object.*collate"),
        ([None], TypeError, "NoneType"),
        ([BIG, BIG[1:]], ValueError, "differ in.*shape"),
        ([(BIG, 1), (BIG,)], ValueError, "differ in.*length"),
        ([(1, BIG), (1,)], ValueError, "differ in.*length"),
        ([{"a": BIG}, {"b": BIG}], ValueError, "differ in.*keys"),
        ([{"a": BIG}, {"a": BIG, "b": 1}], ValueError, "differ in.*keys"),
    ],
)
def test_samples_that_cannot_be_stacked(samples, error, text):
    """The error has the difference and the remedy, even for large arrays."""
    collate = by_index if "differ" in text else default_collate
    with pytest.raises(error, match=text):
        collate(samples)


def same(a, b):
    """Return whether batches are equal, with arrays in place of tensors."""
    torch = sys.modules["torch"]
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, torch.Tensor):
        return torch.as_tensor(a).dtype == b.dtype and torch.equal(torch.as_tensor(a), b)
    return a == b


def test_torch_data_sets():
    """Torch's data sets give the values and types of torch's `default_collate`."""
    torch, data = pytest.importorskip("torch"), pytest.importorskip("torch.utils.data")

    class Images(data.Dataset):  # type: ignore[misc]
        def __len__(self):
            return 20

        def __getitem__(self, index):
            kind = torch.bfloat16 if index < 12 else torch.half
            view = torch.full((300, 200), float(index)).t()
            grad = torch.full((200, 300), float(index), requires_grad=index == 9)
            return {
                "image": torch.full((3, 40, 40), index, dtype=torch.uint8),
                "half": torch.full((100, 100), index, dtype=torch.bfloat16),
                "large": torch.full((200, 300), index, dtype=kind), "rows": (grad, [view, index]),
                "small": torch.tensor(index), "array": np.full(2, index), "weight": index / 2,
                "label": index, "name": str(index),
            }  # fmt: skip

    tensors = data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    for dataset in (Images(), data.Subset(Images(), [3, 1, 4, 1, 5]), tensors):
        samples = [dataset[k] for k in range(len(dataset))]
        want = [data.default_collate(samples[at : at + 4]) for at in range(0, len(samples), 4)]
        for kind, out_type in itertools.product(QUICK, ("null", "cpu")):
            options = {"batch_size": 4, "shuffle": False, "out_type": out_type, "dtype": None}
            assert same(stream(kind, cseq.from_dataset(dataset), None, **options), want)
    sparse = [torch.eye(3).to_sparse()] * 3
    with pytest.raises(TypeError, match=r"^samples contain a torch.sparse_coo tensor, .*collate="):
        by_index(sparse)
    stream_of = type("Stream", (data.IterableDataset,), {"__iter__": None})()
    told = "^dataset is a Stream, an IterableDataset, which cannot be indexed; .*cseq.DataLoader"
    with pytest.raises(TypeError, match=told):
        cseq.from_dataset(stream_of)
