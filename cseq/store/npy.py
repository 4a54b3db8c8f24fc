"""Shards that are .npy files, whose rows are the samples."""

from __future__ import annotations

import ast
import asyncio
import io
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.indexing import context
from cseq.store.format import Format
from cseq.store.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from cseq.order.base import Ints
    from cseq.store.format import Fetching
    from cseq.store.place import Object

__all__ = ["Npy"]

# Requests for headers.
AT_ONCE = 32
# Bytes that are asked for; more, if a header is longer.
HEADS = 4096, 1 << 20
# Bytes of a row that is worth a copy of its own.
LARGE = 4096


class Rows(Format):
    """The format of `Npy`."""

    suffix = ".npy"

    async def survey(self, fetcher: Fetching) -> dict[str, Any]:
        """Read the headers."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def look(shard: Object) -> tuple[int, tuple[int, ...], Any]:
            for most in HEADS:
                async with gate:
                    chunks = [c async for c in fetcher.read(shard, 0, min(most, shard.nbytes))]
                data = b"".join(map(bytes, chunks))
                try:
                    return header(data)
                except ValueError as error:
                    if len(data) < most or most == HEADS[-1]:
                        named = fetcher.describe(shard)
                        raise ValueError(f"shard {named} is no .npy file: {error}") from error
            raise AssertionError

        found = await asyncio.gather(*map(look, fetcher.objects))
        _, shape, dtype = found[0]
        for shard, (offset, each, kind) in zip(fetcher.objects, found, strict=True):
            named = fetcher.describe(shard)
            if (each[1:], kind) != (shape[1:], dtype):
                raise ValueError(
                    f"shard {named} has rows of {each[1:]}, {kind}, and the first one of "
                    f"{shape[1:]}, {dtype}; make a reader for each kind"
                )
            nbytes = offset + math.prod(each) * kind.itemsize
            if shard.nbytes < nbytes:
                raise ValueError(f"shard {named} has {shard.nbytes} of its {nbytes} bytes")
        return {
            "rows": [each[0] for _, each, _ in found],
            "nbytes": [shard.nbytes for shard in fetcher.objects],
            "offsets": [offset for offset, _, _ in found],
            "shape": shape[1:],
            "dtype": repr(np.lib.format.dtype_to_descr(dtype)),
        }

    def load(self, folder: str) -> None:
        """Read the index of a folder."""
        super().load(folder)
        self.dtype = np.lib.format.descr_to_dtype(ast.literal_eval(self.facts["dtype"]))
        self.shape = tuple(self.facts["shape"])

    def gather(self, files: Mapping[int, int], shards: Ints, rows: Ints) -> NDArray[Any]:
        """Return the rows as an array, in the batch's slot if there is one."""
        out = context.empty((len(rows), *self.shape), self.dtype)
        each = math.prod(self.shape)
        for number, fd in files.items():
            places = np.flatnonzero(shards == number)
            view = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            flat = np.frombuffer(
                view, self.dtype, int(self.rows[number]) * each, self.facts["offsets"][number]
            )
            array = flat.reshape(-1, *self.shape)
            if each * self.dtype.itemsize < LARGE:
                out[places] = array[rows[places]]
            else:
                for place, row in zip(places.tolist(), rows[places].tolist(), strict=True):
                    out[place] = array[row]
        return out

    def pick(self, batch: Any, number: int) -> Any:
        """Return one row."""
        return batch[number]


def header(data: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Read the header of an .npy file: where the array begins, its shape and its type."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its version is {version}")
    is_first = version == (1, 0)
    read: Any = (
        np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
    )
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it has Python objects")
    if not shape or (is_fortran and len(shape) > 1):
        raise ValueError("its rows do not lie one after another: save an array in C order")
    return file.tell(), shape, dtype


class Npy(Shards):
    """Rows of .npy files: an array in each shard, all of one type and shape of rows.

    ``[index]`` returns a row, ``[indices]`` an array of rows. `Shards` has the parameters.

    Examples
    --------
    >>> arrays = store.Npy("s3://bucket/train/", cache="/local/train")  # doctest: +SKIP
    >>> manager = cseq.MPSequence(arrays, order=arrays.order())  # doctest: +SKIP
    """

    def __init__(self, urls: str | Sequence[str], **options: Any) -> None:
        super().__init__(urls, Rows(), **options)
