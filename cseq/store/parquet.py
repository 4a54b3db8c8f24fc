"""Shards in Parquet files, one per row group."""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cseq.store.entries import NORESERVE
from cseq.store.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cseq.order.base import Ints
    from cseq.store.objects import Object, Remote

__all__ = ["Parquet"]

# Number of bytes to request from the end of a file. Longer footers need a second request.
TAIL = 1 << 16
# Gaps of at most this many bytes between columns are fetched, to save requests.
GAP = 1 << 16


class Parquet(Shards):
    """A reader for Parquet files. Each row group is a shard, decoded once per machine.

    ``[index]`` returns a row as a dict. ``[indices]`` returns a dict of columns: arrays for
    numbers, dates and fixed-size lists, and lists otherwise. Nulls are NaN, NaT or None; columns
    of integers or booleans must not have any. `limit` applies to the decoded data.

    Parameters
    ----------
    urls : str, path, or list of these
    columns : list of str, optional
        The columns to fetch. Defaults to all columns.
    **options
        As in `Shards`.

    Examples
    --------
    >>> rows = store.Parquet("s3://bucket/train/", columns=["x"])  # doctest: +SKIP
    >>> rows[[0, 7]]["x"].shape  # doctest: +SKIP
    (2,)
    """

    suffix = ".parquet"
    settings = ("columns",)

    def __init__(
        self, urls: str | Sequence[str], *, columns: Sequence[str] | None = None, **options: Any
    ) -> None:
        if columns is not None and (isinstance(columns, str) or not columns):
            raise ValueError(f"columns={columns!r} is not a list of names; pass one, or None")
        self.columns = None if columns is None else [*columns]
        super().__init__(urls, **options)

    async def survey(self, remote: Remote, objects: list[Object], _put: object) -> dict[str, Any]:
        """Read the footers of all files."""

        async def look(shard: Object) -> pq.FileMetaData:
            need = TAIL
            while True:
                data = await remote.look(shard, max(0, shard.nbytes - need), shard.nbytes)
                need = int.from_bytes(data[-8:-4], "little") + 8
                if data[-4:] != b"PAR1" or need > shard.nbytes:
                    raise ValueError(f"shard {remote.describe(shard)} is not a Parquet file")
                if need <= len(data):
                    return pq.read_metadata(pa.BufferReader(data))

        footers = await asyncio.gather(*map(look, objects))
        os.makedirs(f"{self.folder}/footers", exist_ok=True)
        groups, rows, nbytes = [], [], []
        first = self._schema_of(footers[0])
        names = footers[0].schema.to_arrow_schema().names
        if {*(self.columns or ())} - {*names}:
            raise ValueError(
                f"columns={self.columns} includes unknown columns; the shards have {names}"
            )
        for which, (shard, footer) in enumerate(zip(objects, footers, strict=True)):
            if not self._schema_of(footer).equals(first):
                raise ValueError(
                    f"shard {remote.describe(shard)} and the first shard have different column "
                    "types; make a separate reader for each kind"
                )
            footer.write_metadata_file(f"{self.folder}/footers/{which}")
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                chunks = [group.column(k) for k in range(group.num_columns)]
                ours = [one for one in chunks if self._is_wanted(one.path_in_schema)]
                groups.append([which, number, _spans_of(ours)])
                rows.append(group.num_rows)
                nbytes.append(sum(one.total_uncompressed_size for one in ours))
        return {"rows": rows, "nbytes": nbytes, "groups": groups}

    def _is_wanted(self, path: str) -> bool:
        # Names of columns may contain dots as well.
        return self.columns is None or any(f"{path}.".startswith(f"{x}.") for x in self.columns)

    def _schema_of(self, footer: pq.FileMetaData) -> pa.Schema:
        fields = footer.schema.to_arrow_schema().remove_metadata()
        return pa.schema([one for one in fields if not self.columns or one.name in self.columns])

    def spans(self, objects: list[Object], number: int) -> list[tuple[Object, int, int]]:
        """Return the byte ranges of the columns in a row group."""
        which, _, spans = self.facts["groups"][number]
        return [(objects[which], start, stop) for start, stop in spans]

    def finish(self, number: int, path: str) -> None:
        """Decode a row group into an Arrow file."""
        which, group, spans = self.facts["groups"][number]
        footer = pq.read_metadata(f"{self.folder}/footers/{which}")
        # Put the columns at their file offsets. Gaps in the mapping use no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        with open(path, "rb") as file:
            whole = mmap.mmap(-1, spans[-1][1], flags=flags)
            for start, stop in spans:
                whole[start:stop] = file.read(stop - start)
        try:
            parts = pq.ParquetFile(pa.BufferReader(pa.py_buffer(whole)), metadata=footer)
            table = parts.read_row_group(group, columns=self.columns).combine_chunks()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot be decoded (row group {group}): {error}") from error
        for name in table.column_names:
            _check_nulls(name, table[name].combine_chunks())
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    def mapped(self, _number: int, view: mmap.mmap) -> pa.Table:
        """Return a shard as a table."""
        return pa.ipc.open_file(pa.py_buffer(view)).read_all()

    def gather(self, mapped: Mapping[int, pa.Table], shards: Ints, rows: Ints) -> dict[str, Any]:
        """Return the rows as a dict of columns."""
        if not mapped:
            return {}
        parts = [mapped[number].take(rows[shards == number]) for number in sorted(mapped)]
        places = np.argsort(np.argsort(shards, kind="stable"))
        table = pa.concat_tables(parts).combine_chunks().take(places)
        return {name: _values(table[name].combine_chunks()) for name in table.column_names}

    def pick(self, batch: dict[str, Any], number: int) -> dict[str, Any]:
        """Return one row of a batch as a dict."""
        return {name: values[number] for name, values in batch.items()}


def _spans_of(chunks: list[pq.ColumnChunkMetaData]) -> list[list[int]]:
    """Return the byte ranges of column chunks."""
    spans: list[list[int]] = []
    offsets = [one.dictionary_page_offset or one.data_page_offset for one in chunks]
    sizes = [one.total_compressed_size for one in chunks]
    for start, size in sorted(zip(offsets, sizes, strict=True)):
        if spans and start - spans[-1][1] <= GAP:
            spans[-1][1] = start + size
        else:
            spans.append([start, start + size])
    return spans


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind) and pa.types.is_primitive(kind.value_type)


def _check_nulls(name: str, column: pa.Array) -> None:
    """Raise ValueError if the column has nulls that its array could not represent."""
    is_list = _is_list(column.type)
    values = column.flatten() if is_list else column
    types, kind = pa.types, values.type
    if not types.is_primitive(kind) or types.is_floating(kind):
        return
    if (column.null_count or values.null_count) and (is_list or not types.is_temporal(kind)):
        raise ValueError(
            f"has nulls in column {name!r}, and arrays of {kind} have no value for them; fill them "
            "before writing the file, or pass columns= without this column"
        )


def _values(column: pa.Array) -> Any:
    """Return a column as an array if its values have a fixed size, or as a list."""
    kind = column.type
    if _is_list(kind):
        # `flatten` leaves out lists that are null.
        values = column.flatten().to_numpy(zero_copy_only=False)
        if not column.null_count:
            return values.reshape(len(column), -1)
        rows = np.full((len(column), kind.list_size), np.nan, values.dtype)
        rows[column.is_valid().to_numpy(zero_copy_only=False)] = values.reshape(-1, kind.list_size)
        return rows
    if pa.types.is_primitive(kind):
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()
