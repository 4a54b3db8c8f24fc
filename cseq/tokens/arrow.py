"""Documents in a list column of a table, Parquet files or a data set."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.tokens.documents import Corpus, damaged

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Arrow(Corpus):
    """Documents in a list column, with one document per row.

    Tokens in a table or in the files of a Hugging Face data set are not copied. Parquet files are
    decoded in each worker process.

    Parameters
    ----------
    data : pyarrow.Table, datasets.Dataset, str, path, or list of these paths
        A table, a data set, or Parquet files. A table is copied to each worker process.
    column : str
        A column of lists of integers.
    mask : str, optional
        A column with a value for each token. The loss ignores tokens with a value of 0.
    name : str, optional
        The name of the source. Defaults to the first file's name without extension, or to `column`.

    Raises
    ------
    ImportError
        If pyarrow is not installed.
    TypeError, ValueError
        If a column is missing, has nulls or does not contain lists of integers, or if the lists in
        `mask` differ in length from the token lists or contain only zeros.

    Examples
    --------
    >>> chat = tokens.Arrow(dataset, "input_ids", mask="assistant_masks")  # doctest: +SKIP
    """

    def __init__(
        self,
        data: Any,
        column: str = "input_ids",
        *,
        mask: str | None = None,
        name: str | None = None,
    ) -> None:
        import pyarrow as pa

        paths = [data] if isinstance(data, (str, os.PathLike)) else data
        if isinstance(paths, (list, tuple)):
            data = [os.path.abspath(os.fspath(path)) for path in paths]
            if not data:
                raise ValueError("data=[] is empty; pass at least one Parquet file")
            name = name or os.path.basename(data[0]).partition(".")[0]
        name = name or column
        self.given = {"data": data, "column": column, "mask": mask, "name": name}
        if isinstance(data, list):
            table = read_all(data, [column] if mask is None else [column, mask])
        elif getattr(data, "_indices", None) is not None:
            remedy = "pass the result of its flatten_indices() method"
            raise damaged(name, None, "the data set is a selection or has been shuffled", remedy)
        else:
            table = getattr(getattr(data, "data", None), "table", data)
        if not isinstance(table, pa.Table):
            raise TypeError(
                f"data={data!r} is not a table; pass a pyarrow.Table, a datasets.Dataset or "
                "Parquet files"
            )
        lengths, parts = lists(table, column, name)
        masks = None
        if mask is not None:
            others, masks = lists(table, mask, name)
            if not (self.is_copy or np.array_equal(lengths, others)):
                k = int((lengths != others).argmax())
                said = f"row {k} has {lengths[k]} values in {column!r}, but {others[k]} in {mask!r}"
                raise damaged(name, None, said, "pass a mask with one value per token")
            if not (self.is_copy or any(part.any() for part in masks)):
                said = f"{mask!r} is 0 everywhere, so the loss would ignore all tokens"
                raise damaged(name, None, said, "pass another column, or omit mask")
            if [*map(len, parts)] != [*map(len, masks)]:
                masks = np.split(np.concatenate(masks), np.cumsum([*map(len, parts)])[:-1])
        self.lay(name, lengths, parts, masks)


def read_all(paths: list[str], columns: list[str]) -> Any:
    """Read columns from several Parquet files, which must agree on the column types."""
    import pyarrow as pa

    tables = [read(path, columns) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if table.schema != tables[0].schema:
            said = f"the file has {columns_of(table)}, but {paths[0]} has {columns_of(tables[0])}"
            raise damaged(path, None, said, "write both files with the same columns and types")
    return pa.concat_tables(tables)


def read(path: str, columns: list[str]) -> Any:
    """Read columns from a Parquet file. Columns that the file lacks are omitted."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(path).names
        return pq.read_table(path, columns=[name for name in columns if name in there])
    except (pa.ArrowInvalid, OSError) as error:
        # Errors from the operating system already name the file.
        if getattr(error, "errno", None) is not None:
            raise
        remedy = "pass a Parquet file, or write this one again"
        raise damaged(path, None, " ".join(str(error).split()), remedy) from None


def columns_of(table: Any) -> str:
    """Describe the columns of a table."""
    named = [f"{field.name!r} of type {field.type}" for field in table.schema]
    return " and ".join(named) or "no such column"


def lists(table: Any, column: str, name: str) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Return the lengths of the lists in a column, and one array of values per chunk."""
    import pyarrow as pa

    if column not in table.column_names:
        remedy = f"pass one of {table.column_names}"
        raise damaged(name, None, f"there is no column {column!r}", remedy)
    kind = table.schema.field(column).type
    of = getattr(kind, "value_type", kind)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (pa.types.is_integer(of) or pa.types.is_boolean(of)):
        raise damaged(name, None, f"{column!r} has type {kind}", "pass a column of integer lists")
    lengths, parts, row = [np.empty(0, np.int64)], [], 0
    for chunk in table.column(column).chunks:
        if not len(chunk):
            continue
        ends = chunk.offsets.to_numpy()
        values = chunk.values[int(ends[0]) : int(ends[-1])]
        if chunk.null_count or values.null_count:
            given = enumerate(chunk.to_pylist(), row)
            null = next(k for k, value in given if value is None or None in value)
            raise damaged(name, None, f"{column!r} has a null in row {null}", "leave the row out")
        lengths.append(np.diff(ends))
        parts.append(values.to_numpy(zero_copy_only=False))
        row += len(chunk)
    return np.concatenate(lengths), [part for part in parts if len(part)]
