"""`store.Parquet`: rows of tables in Parquet files of a store."""

from __future__ import annotations

import io

import numpy as np
import pytest
from kinds import FIRST_PROCESS
from s3_server import S3Server
from sharded import loop, parquet_shards, s3, written

from cseq import store

pytest.importorskip("obstore")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.needs("Linux")

FILES = [25, 40, 7]
# The sizes of the row groups.
SIZES = [10, 10, 5, 10, 10, 10, 10, 7]
ROWS = sum(FILES)
SHARDS = parquet_shards(FILES)


def test_rows_are_those_that_pyarrow_reads(tmp_path):
    """Every column, by any index, equals what pyarrow reads from whole files."""
    tables = [parquet.read_table(io.BytesIO(data)) for data in SHARDS.values()]
    expected = pa.concat_tables(tables).to_pydict()
    table = store.Parquet(written(SHARDS, tmp_path) + "/train", limit="1 MB")
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


def test_chosen_columns_alone_are_fetched(tmp_path):
    """Other columns are not in batches; large ones are not even requested."""
    width = 300_000
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


def test_a_damaged_file_is_named(tmp_path):
    """Bytes that cannot be decoded raise an error that names the file and the row group."""
    data = bytearray(SHARDS["train/001.parquet"])
    data[4:40] = b"?" * 36
    with S3Server({**SHARDS, "train/001.parquet": data}) as server:
        table = store.Parquet("train/", store=s3(server), cache=tmp_path / "cache", limit="1 MB")
        with pytest.raises(ValueError, match=r"001\.parquet.* cannot be decoded \(row group 0\)"):
            loop(FIRST_PROCESS, table, 3, 6)


@pytest.mark.parametrize("data", [b"no table" * 9, b""])
def test_what_is_no_parquet_file_is_named(data, tmp_path):
    """Such a file raises an error when the index is made."""
    folder = written({**SHARDS, "train/009.parquet": data}, tmp_path) + "/train"
    with pytest.raises(ValueError, match=r"9\.parquet is not a Parquet file"):
        store.Parquet(folder, limit="1 MB")


def test_files_with_other_columns_are_named(tmp_path):
    """All files must have the same columns, of the same types; a long footer is read whole."""
    folder = written(SHARDS, tmp_path) + "/train"
    parquet.write_table(pa.table({"number": ["one"]}), f"{folder}/009.parquet")
    with pytest.raises(ValueError, match=r"009\.parquet and the first shard have different column"):
        store.Parquet(folder, limit="1 MB")
    wide = tmp_path / "wide.parquet"
    parquet.write_table(pa.table({f"column {k}": [k] for k in range(1500)}), wide)
    assert store.Parquet(wide, limit="9 MB")[0]["column 1499"] == 1499


def test_a_row_group_that_proves_too_large_is_an_error_each_time(tmp_path):
    """Its size is known once it is decoded; who asks again gets the same error."""
    parquet.write_table(pa.table({"zero": np.zeros(100_000)}), tmp_path / "0.parquet")
    table = store.Parquet(tmp_path, cache=tmp_path / "cache", limit=100_000)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"limit=100000 is too small: shard 0 takes \d+ bytes"):
            table[5]
