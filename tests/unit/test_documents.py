"""`DocumentEnds`: from positions to documents and back, for lengths of any kind."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cseq
from cseq.order._readers import DocumentEnds

KINDS = [np.int32, np.int64, np.uint16, np.uint64, np.dtype(">i4")]


def check(lengths, unit=1):
    """Compare with sums over all documents."""
    units = lengths.astype(np.int64) // unit
    starts = np.append(0, units.cumsum())
    ends = DocumentEnds(lengths, unit)
    assert ends.total == starts[-1]
    assert (ends.starts(np.arange(len(lengths))) == starts[:-1]).all()
    documents, begins = ends.find(np.arange(ends.total))
    assert (documents == np.repeat(np.arange(len(lengths)), units)).all()
    assert (begins == starts[documents]).all()
    again = DocumentEnds(lengths, unit, ends.ends)
    assert (again.find(np.arange(ends.total))[0] == documents).all()


@pytest.mark.parametrize("kind", ["packed", "concatenated"])
def test_each_token_comes_once(kind):
    """In 200 corpora with empty documents, and with some that fill rows, only a tail is lost."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        row = int(rng.choice([1, 2, 7, 16, 17, 100]))
        few = [0, 0, 1, 1, 2, row - 1, row, row + 1, 2 * row, 5 * row + 3, *range(1, row, 5)]
        lengths = np.append(rng.choice(few, int(rng.integers(0, 90))), [0, row, 0])
        order, tail = cseq.Concatenated(lengths, row), int(lengths.sum()) % row
        if kind == "packed":
            options = {"quantum": 1 + seed % min(3, row), "too_long": "split"}
            order, tail = cseq.Packed(lengths, row, **options), 0
        ends, stops = DocumentEnds(lengths), np.append(0, lengths.cumsum())
        came = np.zeros(ends.total, np.int64)
        for pieces in order.batches(seed=3, epoch=seed):
            assert len(pieces) <= order.room
            left = row
            for first, document in zip(pieces, ends.find(np.array(pieces))[0], strict=True):
                stop = min(stops[document + 1], first + left)
                came[first:stop] += 1
                left -= stop - first
            assert kind == "packed" or left == 0
        assert came.max() == 1
        assert (came == 0).sum() == tail


@given(
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 9]), min_size=1, max_size=300),
    st.sampled_from(KINDS),
    st.integers(1, 4),
)
def test_each_token_is_in_its_document(lengths, kind, unit):
    """Empty documents are never found, at any position; any integer type works."""
    check(np.array(lengths, kind), unit)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 20_000])
def test_any_number_of_documents(count, tmp_path):
    """Blocks may be whole or not, and lengths may be mapped, or every second one of an array."""
    lengths = (np.arange(count) * 7 % 5).astype(np.int32)
    lengths[0] = 3
    np.save(tmp_path / "lengths.npy", np.repeat(lengths, 2))
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    for values in (lengths, mapped, mapped[::2]):
        check(values)


def test_long_documents_do_not_overflow():
    """Documents of nearly 2**48 tokens are found, in any number."""
    ends = DocumentEnds([1, 2**48 - 3, 1])
    positions = np.repeat([0, 2**48 - 3, 2**48 - 2], 100_000)
    documents, starts = ends.find(positions)
    assert (documents == np.repeat([0, 1, 2], 100_000)).all()
    assert (starts == np.repeat([0, 1, 2**48 - 2], 100_000)).all()
    assert (ends.starts(documents) == starts).all()
