"""Shards in .npy files, one sample per row."""

from __future__ import annotations

import ast
import asyncio
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.indexing import context
from cseq.store.shards import Shards

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from cseq.order.base import Ints
    from cseq.store.objects import Object, Remote

__all__ = ["Npy"]

# Number of bytes to request for a header: in the first request, and if the header is longer.
HEADS = 4096, 1 << 20
# Rows of at least this size in bytes are copied one by one.
LARGE = 4096


class Npy(Shards):
    """A reader for .npy files. All shards must have the same data type and row shape.

    ``[index]`` returns a row. ``[indices]`` returns an array of rows. See `Shards` for parameters.

    Examples
    --------
    >>> arrays = store.Npy("s3://bucket/train/", cache="/local/train")  # doctest: +SKIP
    >>> manager = cseq.MPSequence(arrays, order=arrays.order())  # doctest: +SKIP
    """

    suffix = ".npy"

    async def survey(self, remote: Remote, objects: list[Object], _put: object) -> dict[str, Any]:
        """Read the headers of all shards."""

        async def look(shard: Object) -> tuple[int, tuple[int, ...], Any]:
            for most in HEADS:
                data = await remote.look(shard, 0, min(most, shard.nbytes))
                try:
                    return header(data)
                except ValueError as error:
                    if len(data) < most or most == HEADS[-1]:
                        named = remote.describe(shard)
                        text = f"shard {named} is not a valid .npy file: {error}"
                        raise ValueError(text) from error
            raise AssertionError

        found = await asyncio.gather(*map(look, objects))
        _, shape, dtype = found[0]
        for shard, (offset, its_shape, its_dtype) in zip(objects, found, strict=True):
            named = remote.describe(shard)
            if (its_shape[1:], its_dtype) != (shape[1:], dtype):
                raise ValueError(
                    f"shard {named} has rows of shape {its_shape[1:]} and dtype {its_dtype}, but "
                    f"the first shard has rows of shape {shape[1:]} and dtype {dtype}; make a "
                    "separate reader for each kind"
                )
            nbytes = offset + math.prod(its_shape) * dtype.itemsize
            if shard.nbytes < nbytes:
                raise ValueError(
                    f"shard {named} is truncated: it has {shard.nbytes} of {nbytes} bytes"
                )
        return {
            "rows": [its_shape[0] for _, its_shape, _ in found],
            "nbytes": [shard.nbytes for shard in objects],
            "offsets": [offset for offset, _, _ in found],
            "shape": shape[1:],
            "dtype": repr(np.lib.format.dtype_to_descr(dtype)),
        }

    def load(self) -> None:
        """Read the index in the folder."""
        super().load()
        self.dtype = np.lib.format.descr_to_dtype(ast.literal_eval(self.facts["dtype"]))
        self.shape = tuple(self.facts["shape"])

    def mapped(self, number: int, view: mmap.mmap) -> NDArray[Any]:
        """Return a shard as an array."""
        shape = int(self.sizes[number]), *self.shape
        offset = self.facts["offsets"][number]
        return np.frombuffer(view, self.dtype, math.prod(shape), offset).reshape(shape)

    def gather(self, mapped: Mapping[int, Any], shards: Ints, rows: Ints) -> NDArray[Any]:
        """Return the rows as an array, in the batch's slot if there is one."""
        out = context.empty((len(rows), *self.shape), self.dtype)
        is_large = math.prod(self.shape) * self.dtype.itemsize >= LARGE
        for number, array in mapped.items():
            places = np.flatnonzero(shards == number)
            if is_large:
                for place, row in zip(places.tolist(), rows[places].tolist(), strict=True):
                    out[place] = array[row]
            else:
                out[places] = array[rows[places]]
        return out


def header(data: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Parse an .npy header. Return the offset, shape and data type of the array."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    readers: Any = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"format version {version} is not supported")
    shape, is_fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("the array contains Python objects")
    if not shape:
        raise ValueError("the array is a single number; save an array of rows")
    if is_fortran and len(shape) > 1:
        raise ValueError("its rows are not contiguous; save the array in C order")
    return file.tell(), shape, dtype
