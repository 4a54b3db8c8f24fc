"""`from_dataset`: a map-style data set as a worker."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from kinds import FEW, INLINE, KINDS, assert_same, by_name, stream

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


class Together(Squares):
    def __getitems__(self, indices):
        assert {type(index) for index in indices} == {int}
        return [("together", index) for index in indices]

    def __getitem__(self, index):
        raise AssertionError("not one by one")


class Failing(Squares):
    def __getitem__(self, index):
        if index == 7:
            raise ValueError("bad sample")
        return index


class Pair(NamedTuple):
    image: Any
    label: Any


def total(samples):
    """Collate to a number."""
    return sum(label for _, label, _ in samples)


# -- in every kind of pool


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
    """`dset_size` may be left out by position and by name; part of the data set may be given."""
    worker = cseq.from_dataset(data := Squares(33))
    assert worker.dataset is data
    m = cseq.MPSequence(worker, batch_size=32, out_type="null")
    assert (m.dset_size, len(m)) == (33, 2)
    assert cseq.MTSequence(np.zeros((5, 2)), out_type="null").dset_size == 5
    m = cseq.MTSequence(cseq.from_dataset(Squares()), [9, 1], shuffle=False, out_type="null")
    with m.start() as batches:
        assert [batch[1].tolist() for batch in batches] == [[81, 1]]


@pytest.mark.parametrize("worker", [Squares, partial(Squares, 3), object], ids=repr)
def test_no_length(worker):
    """The error says what to pass."""
    with pytest.raises(TypeError, match=r"dset_size is missing.*from_dataset"):
        cseq.MPSequence(worker, batch_size=2)


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_getitems(kind):
    """`__getitems__` is used if it exists."""
    batches = stream(kind, cseq.from_dataset(Together()), None, shuffle=False, batch_size=5)
    assert [batch[0] for batch in batches] == [["together"] * 5] * 2
    assert [batch[1].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_the_index_that_failed(kind):
    """An exception names the sample, and no remedy that is already applied."""
    worker = cseq.from_dataset(Failing())
    with kind.start(worker, None, batch_size=10) as m, pytest.raises(ValueError, match="bad") as at:
        list(m)
    notes = "\n".join(at.value.__notes__)
    assert "sample 7 of Failing" in notes
    assert "from_dataset" not in notes


# -- skipped samples


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
    for kind in FEW:
        worker = cseq.from_dataset(Holed(**options))
        with kind.start(
            worker, None, batch_size=4, shuffle=False, seed=3, on_error="skip", out_type="cpu"
        ) as m:
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
    worker = cseq.from_dataset(Holed(), total)
    for rank in range(2):
        with kind.start(
            worker, [0, 1, 2, 3, 4, 5, 7, 0], batch_size=2, shard=(rank, 2), seed=1, on_error="skip"
        ) as m:
            assert len(list(m)) == len(m) == 2


def rows_of(samples):
    """Return the number of samples of each row."""
    assert cseq.parts().sum() == len(samples)
    return cseq.parts()


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_the_parts_of_a_batch_that_lacks_samples(kind):
    """They belong to the existing samples."""
    worker = cseq.from_dataset(Holed(), rows_of)
    order = cseq.Packed([2] * 12, budget=6)
    with kind.start(worker, range(12), batch_size=2, order=order, seed=1, on_error="skip") as m:
        sizes = np.concatenate([*m])
    assert sizes.max() == 3
    assert sizes.sum() == 12 - 5 or len(m.skipped) < 5


def test_a_collate_function_that_returns_nothing():
    """The error names it, as it names an indexer."""
    worker = cseq.from_dataset(Squares(), lambda samples: None)
    with pytest.raises(TypeError, match=r"returned None; is a `return` missing\?"):
        worker[np.arange(2)]


# -- what is refused


class NoLength:
    def __getitem__(self, index):
        return index


def test_no_data_set():
    """An object without samples by index, or without a length, is refused at once."""
    for dataset, text in (
        (Squares, "pass an object, such as"),
        (iter([1]), "__getitem__"),
        (NoLength(), "__len__"),
    ):
        with pytest.raises(TypeError, match=text):
            cseq.from_dataset(dataset)
    with pytest.raises(TypeError, match="collate=3"):
        cseq.from_dataset(Squares(), collate=3)  # type: ignore[arg-type]


def test_ragged_samples():
    """If samples cannot be stacked, the error has the difference and the remedy."""
    for samples, error, text in (
        ([np.zeros(3), np.zeros(4)], ValueError, r"shape.*\(3,\), \(4,\).*collate"),
        ([(1, 2), (1,)], ValueError, "length, from 1 to 2"),
        ([{"a": 1}, {"b": 1}], ValueError, "keys"),
        ([object()], TypeError, "object.*collate"),
        ([None], TypeError, "NoneType"),
    ):
        with pytest.raises(error, match=text):
            default_collate(samples)


# -- collating


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
    assert_same(_by_index(samples), default_collate(samples))


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([BIG, BIG[1:]], "shape"),
        ([(BIG, 1), (BIG,)], "length"),
        ([(1, BIG), (1,)], "length"),
        ([{"a": BIG}, {"b": BIG}], "keys"),
        ([{"a": BIG}, {"a": BIG, "b": 1}], "keys"),
    ],
)
def test_large_arrays_that_cannot_be_stacked(samples, text):
    """The error equals the other samples' error."""
    with pytest.raises(ValueError, match=f"differ in.*{text}|differ in their {text}"):
        _by_index(samples)


class _Listed:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def _by_index(samples):
    """Collate samples that are fetched one by one."""
    return cseq.from_dataset(_Listed(samples))[np.arange(len(samples))]


TORCH = """
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate
import cseq
from cseq.processes.launcher import start_methods

class Images(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        image = torch.full((3, 40, 40), index, dtype=torch.uint8)
        half = torch.full((100, 100), index, dtype=torch.bfloat16)
        large = torch.full((200, 300), index, dtype=torch.bfloat16 if index < 12 else torch.half)
        grad = torch.full((200, 300), float(index), requires_grad=index == 9)
        view = torch.full((300, 200), float(index)).t()
        return {"image": image, "half": half, "label": index, "small": torch.tensor(index),
                "large": large, "rows": (grad, [view, index]),
                "weight": index / 2, "array": np.full(2, index), "name": str(index)}

def same(a, b):
    if isinstance(b, dict):
        return all(same(a[key], b[key]) for key in b) and a.keys() == b.keys()
    if isinstance(b, (list, tuple)) and not isinstance(b, str):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, torch.Tensor):
        a = torch.as_tensor(a)
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b

tensors = TensorDataset(torch.arange(12.).reshape(6, 2), torch.arange(6))
for dataset in (Images(), Subset(Images(), [3, 1, 4, 1, 5]), tensors):
    numbers = list(range(len(dataset)))
    want = [default_collate([dataset[k] for k in numbers[at:at + 4]])
            for at in range(0, len(numbers), 4)]
    process, thread = cseq.MPSequence, cseq.MTSequence
    for kind, out in ((process, "null"), (thread, "null"), (process, "cpu")):
        options = {"num_workers": 2}
        if kind is process and "fork" in start_methods() and (dataset is tensors or out == "cpu"):
            options["start_method"] = "fork"  # another server would import torch again
        elif kind is process and "fork" not in start_methods():  # each worker imports torch
            options["num_workers"] = 1
            if (type(dataset), out) not in ((Images, "null"), (TensorDataset, "cpu")):
                continue
        m = kind(cseq.from_dataset(dataset), batch_size=4, shuffle=False,
                 out_type=out, dtype=None, **options)
        for start in (m.start, m.start_test):
            with start() as batches:
                assert same(list(batches), want), (dataset, kind, out)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

try:
    cseq.from_dataset(Stream())
except TypeError as error:
    print(error)

class Sparse(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.eye(3).to_sparse()

try:
    cseq.from_dataset(Sparse())[np.arange(3)]
except TypeError as error:
    print(error)
"""


def test_torch_data_sets(run_prepared):
    """Torch's data sets give the values and types of torch's `default_collate`."""
    pytest.importorskip("torch")
    done = run_prepared(TORCH)
    assert done.returncode == 0, done.stderr
    stream, sparse = done.stdout.splitlines()
    assert stream.startswith("dataset is a Stream, an IterableDataset, which cannot be indexed; ")
    assert "cseq.DataLoader" in stream
    assert sparse.startswith("samples contain a torch.sparse_coo tensor, which cannot be")
    assert "collate=" in sparse
