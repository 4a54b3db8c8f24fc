"""`cseq.tokens.Arrow`: columns of lists, if pyarrow is installed."""

from __future__ import annotations

import itertools
import json
import pickle
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from token_data import documents_of, expected, in_another_process, random_documents

import cseq
from cseq import tokens

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8], [9, 10]]
MASKS = [[0, 1, 1], [], [1], [0, 0, 1, 0], [1, 1]]


def table_of(kind=None, **columns):
    """Return a table of lists, in several chunks."""
    whole = pa.table({name: pa.array(lists, kind) for name, lists in columns.items()})
    return pa.concat_tables([whole.slice(0, 2), whole.slice(2, 2), whole.slice(4)])


@pytest.mark.parametrize("of", ["int32", "uint16", "int64"])
@pytest.mark.parametrize("kind", ["list_", "large_list"])
def test_tables(kind, of):
    """Lists of any integers are read in place, from each chunk."""
    table = table_of(getattr(pa, kind)(getattr(pa, of)()), input_ids=DOCUMENTS)
    source = tokens.Arrow(table)
    assert documents_of(source) == DOCUMENTS
    assert source.read(3, 0, 4).dtype == of
    there = {chunk.values.buffers()[1].address for chunk in table["input_ids"].chunks}
    address = source.read(0, 0, 3).__array_interface__["data"][0]
    assert address in there
    assert documents_of(pickle.loads(pickle.dumps(source))) == DOCUMENTS


def test_parquet_files(tmp_path):
    """Parquet data may be one file or several; a worker's copy reads them again."""
    pq.write_table(table_of(ids=DOCUMENTS), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table_of(ids=[[11]]), tmp_path / "b.parquet")
    assert documents_of(tokens.Arrow(tmp_path / "a.parquet", "ids")) == DOCUMENTS
    both = tokens.Arrow([tmp_path / "a.parquet", tmp_path / "b.parquet"], "ids")
    assert documents_of(pickle.loads(pickle.dumps(both))) == [*DOCUMENTS, [11]]
    assert both.name == "a"


DATA_SET = """
import json, pickle, sys
import datasets
from cseq import tokens
documents = json.loads(sys.argv[2])
datasets.Dataset.from_dict({"input_ids": documents}).save_to_disk(sys.argv[1])
data = datasets.load_from_disk(sys.argv[1])

def read(source):
    return [source.read(k, 0, int(source.lengths[k])).tolist() for k in range(len(source))]

try:
    said = tokens.Arrow(data.select([3, 0]))
except ValueError as error:
    said = str(error)
whole = tokens.Arrow(data)
part = tokens.Arrow(data.select([3, 0]).flatten_indices())
print(json.dumps([read(whole), read(pickle.loads(pickle.dumps(whole))), read(part), said]))
"""


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_data_sets(tmp_path):
    """A Hugging Face data set is read; a selection is refused, with the remedy."""
    given = tmp_path / "set", json.dumps(DOCUMENTS)
    whole, copy, part, said = in_another_process(DATA_SET, *given)
    assert whole == copy == DOCUMENTS
    assert part == [DOCUMENTS[3], DOCUMENTS[0]]
    assert "selection or has been shuffled; pass the result of its flatten_indices()" in said


@pytest.mark.parametrize("of", ["int8", "bool_", "int64"])
def test_a_mask_column(of):
    """A second column marks the tokens of a loss, as integers or booleans, in any chunks."""
    rng = np.random.default_rng(1)
    documents = [*random_documents(rng, 60, 8), [1, 2]]
    masks = [rng.integers(0, 2, len(each)).tolist() for each in documents]
    lists = [[bool(bit) for bit in each] for each in masks] if of == "bool_" else masks
    ids = [pa.array(part, pa.list_(pa.int32())) for part in (documents[:30], documents[30:])]
    kind = pa.list_(getattr(pa, of)())
    cuts = [0, 30, 61] if of == "int8" else [0, 7, 7, 61]
    chunks = [pa.array(lists[a:b], kind) for a, b in itertools.pairwise(cuts)]
    table = pa.table({"input_ids": pa.chunked_array(ids), "mask": pa.chunked_array(chunks)})
    source = tokens.Arrow(table, mask="mask", name="chat")
    rows = tokens.Rows(source, 8, keys=["input_ids", "labels", "valid_tokens"])
    pieces = [rows.locate(k, seed=5) for k in range(rows.order.units)]
    manager = cseq.MPSequence(rows, num_workers=1, batch_size=1, seed=5, out_type="null")
    with manager.start() as batches:
        for batch, row in zip(batches, pieces, strict=True):
            wanted = expected([row], {"chat": documents}, 8, {"chat": masks})
            assert batch["labels"].tolist() == wanted["labels"]
            assert batch["valid_tokens"] == wanted["valid_tokens"]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ({"ids": DOCUMENTS}, {}, r"there is no column 'input_ids'; pass one of \['ids'\]"),
    ({"input_ids": [1, 2]}, {}, "'input_ids' has type int64; pass a column of integer lists"),
    ({"input_ids": [[1.5]]}, {}, "'input_ids' has type list<.*double>"),
    ({"input_ids": [[1], [], None]}, {}, "'input_ids' has a null in row 2; leave the"),
    ({"input_ids": [[1], [], [2, None]]}, {}, "'input_ids' has a null in row 2; leave"),
    ({"input_ids": [[1], [2]], "m": [[1], []]}, {"mask": "m"}, "row 1 has 1 values in 'input_ids'"),
    ({"input_ids": [np.zeros(0, "i4")] * 2}, {}, "input_ids has no tokens"),
    ({"input_ids": [[1, 2]], "m": [[0, 0]]}, {"mask": "m"}, "'m' is 0 everywhere, so the loss"),
]


@pytest.mark.parametrize(("columns", "given", "said"), WRONG)
def test_columns_that_are_refused(columns, given, said):
    """A column that has no documents is refused, with the row and the remedy."""
    with pytest.raises(ValueError, match=said):
        tokens.Arrow(pa.table(columns), **given)


def test_what_is_no_table(tmp_path):
    """The error names a damaged file, one with other columns, or an object of another kind."""
    paths = [tmp_path / f"{name}.parquet" for name in "abcd"]
    types = pa.int64(), pa.int32()
    for path, of in zip(paths, types, strict=False):
        pq.write_table(pa.table({"input_ids": pa.array([[1, 2]], pa.list_(of))}), path)
    pq.write_table(pa.table({"text": ["a"]}), paths[2])
    whole = paths[0].read_bytes()
    # The head of a page, and half of the file, are lost.
    for damaged in (whole[:8] + bytes(32) + whole[40:], whole[:-50]):
        paths[3].write_bytes(damaged)
        said = r"d\.parquet.*; pass a Parquet file, or write this one"
        with pytest.raises(ValueError, match=said):
            tokens.Arrow(paths[3])
    for given, error, said in (
        (paths[:2], ValueError, r"b\.parquet: the file has 'input_ids' of type li.*int32"),
        (paths[:3:2], ValueError, r"c\.parquet: the file has no such column, but .*a\.parq"),
        (tmp_path / "e.parquet", FileNotFoundError, r"e\.parquet"),
        (7, TypeError, r"data=7 is not a table; pass a pyarrow\.Table"),
        ([], ValueError, r"data=\[\] is empty; pass at least one Parquet file"),
    ):
        with pytest.raises(error, match=said):
            tokens.Arrow(given)
