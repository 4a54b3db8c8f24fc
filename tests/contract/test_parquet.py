"""`store.Parquet`: rows of tables in Parquet files of a store."""

from __future__ import annotations

import io

import numpy as np
import pytest
from kinds import FEW, by_name
from s3_server import S3Server
from sharded import kill_fetching, loop, parquet_shards, s3, stream, written

from cseq import store

pytest.importorskip("obstore")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.needs("Linux")

FILES = [25, 40, 7]
# The sizes of the row groups.
SIZES = [10, 10, 5, 10, 10, 10, 10, 7]
ROWS = sum(FILES)
WINDOW, BATCH = 3, 6


@pytest.fixture(scope="module")
def shards():
    """Return the files."""
    return parquet_shards(FILES)


@pytest.fixture
def server(shards):
    """Return a store with the files."""
    with S3Server(shards) as running:
        yield running


class Rows:
    """An indexer of rows that checks whether the columns of each row match."""

    def __init__(self, table):
        self.table = table

    def __getitem__(self, indices):
        rows = self.table[indices]
        assert (rows["half"] == rows["number"] / 2).all()
        assert (rows["pair"] == np.stack([rows["number"], -rows["number"]], 1)).all()
        return rows["number"]


def epochs(kind, table, epochs=1):
    """Return the row numbers that a loop gets."""
    return loop(kind, Rows(table), table, WINDOW, BATCH, epochs)


def test_rows_are_those_that_pyarrow_reads(shards, tmp_path):
    """Every column, by any index, equals what pyarrow reads from whole files."""
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = [parquet.read_table(io.BytesIO(data)) for data in shards.values()]
    expected = pa.concat_tables(tables).to_pydict()
    table = store.Parquet(written(shards, tmp_path) + "/train", limit="1 MB")
    assert table.sizes.tolist() == SIZES
    assert {name: list_of(values) for name, values in table[:].items()} == expected
    for index in ([3, ROWS - 1, 3, 24], np.arange(ROWS)[::-1]):
        found = table[index]
        assert {name: list_of(values) for name, values in found.items()} == {
            name: [values[k] for k in index] for name, values in expected.items()
        }
    assert (table[:]["half"].dtype, table[:]["pair"].shape) == (np.float32, (ROWS, 2))
    assert table[30]["text"] == "row 30"
    assert table[[]] == {}


def list_of(values):
    """Return a column's values as lists and numbers."""
    return values.tolist() if isinstance(values, np.ndarray) else values


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_each_row_group_is_fetched_once(kind, server, tmp_path):
    """One epoch requests each row group once, the next one none, and no byte comes twice."""
    table = store.Parquet("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    server.forget()
    assert epochs(kind, table, 2) == stream(SIZES, WINDOW, BATCH, 2)
    assert len({(one.key, one.span) for one in server.log()}) == server.count() == len(SIZES)
    assert table.stats().fetched == len(SIZES)


def test_chosen_columns_alone_are_fetched(tmp_path):
    """Other columns are not in batches; large ones are not even requested."""
    width = 300_000
    import pyarrow.parquet as parquet

    file = io.BytesIO()
    filler = np.random.default_rng(0).integers(0, 256, (4, width), np.uint8)
    columns = {"a": np.arange(4), "b": [row.tobytes() for row in filler], "c": np.arange(4) * 2}
    parquet.write_table(pa.table(columns), file, row_group_size=2)
    with S3Server({"0.parquet": file.getvalue()}) as server:
        table = store.Parquet(
            "", columns=["c", "a"], store=s3(server), cache=tmp_path, limit="1 MB"
        )
        server.forget()
        assert {name: values.tolist() for name, values in table[:].items()} == {
            "a": [0, 1, 2, 3],
            "c": [0, 2, 4, 6],
        }
        assert sum(one.sent for one in server.log()) < width
        with pytest.raises(ValueError, match=r"columns=\['d'\] includes .* have \['a', 'b', 'c'\]"):
            store.Parquet("", columns=["d"], store=s3(server), limit="1 MB")


@pytest.mark.parametrize("kind", FEW, ids=by_name)
def test_a_kill_and_requests_that_fail_change_nothing(kind, server, tmp_path):
    """The fetching process is killed while every fourth request fails; the stream is unchanged."""
    table = store.Parquet("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    assert table[0]["number"] == 0
    kill_fetching(tmp_path / "cache")
    for fault in ("503", "cut", "half", "refuse"):
        server.fail(fault, chance=0.06)
    assert epochs(kind, table, 2) == stream(SIZES, WINDOW, BATCH, 2)


def test_a_file_that_has_changed_is_named(server, shards, tmp_path):
    """If a file differs from the index, the loop gets an error."""
    table = store.Parquet("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    server.put("train/001.parquet", shards["train/001.parquet"][::-1])
    with pytest.raises(ValueError, match=r"001\.parquet.* has changed since its index was made"):
        epochs(FEW[-1], table)


def test_a_damaged_file_is_named(server, shards, tmp_path):
    """Bytes that cannot be decoded raise an error that names the file and the row group."""
    data = bytearray(shards["train/001.parquet"])
    data[4:40] = b"?" * 36
    server.put("train/001.parquet", data)
    table = store.Parquet("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
    with pytest.raises(ValueError, match=r"001\.parquet.* cannot be decoded \(row group 0\)"):
        epochs(FEW[-1], table)


@pytest.mark.parametrize("data", [b"no table" * 9, b""])
def test_what_is_no_parquet_file_is_named(data, shards, tmp_path):
    """Such a file raises an error when the index is made."""
    folder = written({**shards, "train/009.parquet": data}, tmp_path) + "/train"
    with pytest.raises(ValueError, match=r"9\.parquet is not a Parquet file"):
        store.Parquet(folder, limit="1 MB")


def test_files_with_other_columns_are_named(shards, tmp_path):
    """All files must have the same columns, of the same types; a long footer is read whole."""
    import pyarrow.parquet as parquet

    folder = written(shards, tmp_path) + "/train"
    parquet.write_table(pa.table({"number": ["one"]}), f"{folder}/009.parquet")
    with pytest.raises(ValueError, match=r"009\.parquet and the first shard have different column"):
        store.Parquet(folder, limit="1 MB")
    wide = tmp_path / "wide.parquet"
    parquet.write_table(pa.table({f"column {k}": [k] for k in range(1500)}), wide)
    assert store.Parquet(wide, limit="9 MB")[0]["column 1499"] == 1499


def test_a_row_group_that_proves_too_large_is_an_error_each_time(tmp_path):
    """Its size is known once it is decoded; who asks again gets the same error."""
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"zero": np.zeros(100_000)}), tmp_path / "0.parquet")
    table = store.Parquet(tmp_path, cache=tmp_path / "cache", limit=100_000)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"limit=100000 is too small: shard 0 takes \d+ bytes"):
            table[5]
