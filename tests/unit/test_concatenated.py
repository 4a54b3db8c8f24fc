"""`Concatenated`: each token once except the tail's, full rows, rows of a document far apart."""

import math

import golden
import numpy as np
import pytest
from reference_draws import concatenated

import cseq
from cseq.order._readers import DocumentEnds


@pytest.mark.parametrize("record", golden.records("orders_concatenated"))
def test_reference(record):
    """An order equals the reference in plain Python."""
    lengths = golden.lengths(record["count"], 0, record["spread"])
    if sum(lengths) < 200_000:
        where = record["seed"], record["epoch"]
        rows = cseq.Concatenated(lengths, record["row"]).batches(seed=where[0], epoch=where[1])
        assert rows == concatenated(lengths, record["row"], *where)


def test_many_documents_are_put_in_order_in_parts():
    """These documents are too many for one sum; they need no table, and any row is read at once."""
    lengths = np.arange(2**20 + 1000) % 5
    order = cseq.Concatenated(lengths, 100)
    reader = order.reader(1)
    samples, sizes = reader.samples(3, 0, order.units)
    assert len(np.unique(samples)) == len(samples) == sizes.sum()
    ends = DocumentEnds(lengths)
    documents, starts = ends.find(samples)
    whole = samples == starts
    missing = (lengths > 0).sum() - len(np.unique(documents[whole]))
    # The missing documents are in the tail.
    assert 0 <= missing <= order.samples % 100
    assert (sizes > 25).all()
    alone = order.reader(1).samples(3, order.units - 7, 7)[0]
    assert (alone == samples[-len(alone) :]).all()


def test_the_most_pieces_of_a_row():
    """`room` is enough for the shortest documents together, and is not far above that."""
    rows = ([1] * 20, 6), ([3] * 20, 11), ([100], 11), ([1, 1, 30, 0, 30], 20), ([1], 1)
    assert [cseq.Concatenated(*each).room for each in rows] == [6, 5, 2, 4, 2]


def test_a_document_comes_anywhere():
    """The first token of each comes equally often in every row, and is left out if it must be."""
    lengths = np.array([40, 7, 3, 16, 5, 5, 9, 33, 12])
    order, ends = cseq.Concatenated(lengths, 16), DocumentEnds(lengths)
    reader, starts = order.reader(3), ends.starts(np.arange(len(lengths)))
    counts = np.zeros((len(lengths), order.units))
    for epoch in range(3000):
        pieces, sizes = reader.samples(epoch, 0, order.units)
        documents, begins = ends.find(pieces)
        first = pieces == begins
        rows = np.repeat(np.arange(order.units), sizes)
        counts[documents[first], rows[first]] += 1
    assert (starts[1:] > 0).all()
    share = counts.sum(1, keepdims=True) / 3000 / order.units
    assert (share * order.units > 0.85).all()
    assert (np.abs(counts / 3000 - share) < 5 * np.sqrt(share / 3000)).all()


def test_rows_of_a_long_document_are_far_apart():
    """They follow each other as rarely as any two rows."""
    order = cseq.Concatenated([5000, *[7] * 5000], 50)
    after = 0
    for epoch in range(50):
        first = np.array([row[0] for row in order.batches(seed=1, epoch=epoch)])
        after += int((np.diff(first) == 50).sum())
    # Of 100 rows, each has one that follows.
    expected = 50 * 100 / order.units
    assert abs(after - expected) < 5 * math.sqrt(expected)


def test_what_it_says():
    """It has rows, pieces and the tail, alone and in a mixture."""
    order = cseq.Concatenated([5, 20, 0, 3], 12)
    said = "an epoch leaves out 4 tokens, different ones each time"
    assert order.describe() == f"2 rows of 12 tokens, at most 3 pieces a row; {said}"
    assert said in cseq.Mixture({"a": order}, {"a": 1}, block=2).describe()
    assert "leaves" not in cseq.Concatenated([24], 12).describe()
