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


def test_names_of_columns_may_contain_dots(tmp_path):
    """A name with a dot is one column, not a part of another one."""
    nested = pa.array([{"x": 1, "y": 2}])
    columns = {"a.b": pa.array([3]), "a": nested, "ab": pa.array([4])}
    parquet.write_table(pa.table(columns), tmp_path / "0.parquet")
    for name, value in {"a.b": 3, "a": {"x": 1, "y": 2}}.items():
        table = store.Parquet(str(tmp_path), limit="1 MB", columns=[name])
        assert table[0] == {name: value}


@pytest.mark.parametrize("columns", [[], "ab", ""])
def test_columns_is_a_list_of_names(columns, tmp_path):
    """A string, or no name, is refused before anything is read."""
    with pytest.raises(ValueError, match=r"columns=.* is not a list of names"):
        store.Parquet(str(tmp_path), columns=columns)


PAIRS = [[1, 2], None, [None, 4], [5, 6]]


@pytest.mark.parametrize("index", [[0, 1], [3, 0], [1, 2], [1]])
def test_nulls_keep_the_type_and_the_shape(index, tmp_path):
    """Whatever rows a batch has, nulls are NaN, NaT or None, and lists keep their length."""
    columns = {
        "pair": pa.array(PAIRS, pa.list_(pa.float32(), 2)),
        "float": pa.array([1, None, 3, 4], pa.float64()),
        "day": pa.array([1, None, 3, 4], pa.date32()),
        "text": pa.array(["a", None, "c", "d"]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "0.parquet")
    batch = store.Parquet(str(tmp_path), limit="1 MB")[index]
    day = np.array([1, "NaT", 3, 4], "datetime64[D]")
    expected = np.array([[1, 2], [np.nan] * 2, [np.nan, 4], [5, 6]], np.float32)
    np.testing.assert_array_equal(batch["pair"], expected[index])
    np.testing.assert_array_equal(batch["float"], np.array([1, np.nan, 3, 4])[index])
    np.testing.assert_array_equal(batch["day"], day[index])
    assert [batch[name].dtype for name in ("pair", "float", "day")] == [
        np.float32,
        float,
        day.dtype,
    ]
    assert batch["text"] == [["a", None, "c", "d"][k] for k in index]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], pa.int64()),
        ([True, None], pa.bool_()),
        (PAIRS, pa.list_(pa.int16(), 2)),
        ([[1, 2], None], pa.list_(pa.date32(), 2)),
    ],
    ids=str,
)
def test_nulls_without_a_value_are_refused(values, kind, tmp_path):
    """An array of whole numbers has no value for them; other columns can be read."""
    column = pa.array(values, kind)
    parquet.write_table(pa.table({"x": column, "y": column.is_valid()}), tmp_path / "0.parquet")
    with pytest.raises(ValueError, match=r"0\.parquet has nulls in column 'x', .* columns="):
        store.Parquet(str(tmp_path), limit="1 MB")[0]
    others = store.Parquet(str(tmp_path), limit="1 MB", columns=["y"])
    assert others[:]["y"].tolist() == [value is not None for value in values]


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
