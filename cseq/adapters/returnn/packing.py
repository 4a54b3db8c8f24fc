"""A small sequence as one `bytearray`, instead of an array for each key.

::

    head │ layout: keys, types, dimensions │ shapes │ tag │ data, data, …   each from 16 bytes on

The layout is a pickle, made and read once for all sequences that have it.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq._memory import SMALL

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["pack", "unpack"]

NUMBERS = "biufc"  # kinds of data of which nothing but the bytes has to travel
HEAD = struct.Struct("<IId")  # bytes of the layout and of the tag, completed part of the epoch
PADDING = [bytes(-n % 16) for n in range(16)]  # to a multiple of 16 bytes

Layout = tuple[struct.Struct, list[tuple[str, np.dtype[Any], int]]]

_packed_layouts: dict[tuple[Any, ...], tuple[bytes, struct.Struct]] = {}
_read_layouts: dict[bytes, Layout] = {}


def pack(tag: str, fraction: float | None, data: dict[str, Any]) -> Any:
    """Return a small sequence as a `bytearray`; a large or an unusual one as it is."""
    known: list[Any] = []
    shape: tuple[int, ...] = ()
    nbytes = 0
    for key, array in data.items():
        if type(array) is not np.ndarray or array.dtype.kind not in NUMBERS:
            return tag, fraction, data
        nbytes += array.nbytes
        known += key, array.dtype, array.ndim
        shape += array.shape
    if nbytes > SMALL:
        return tag, fraction, data
    layout, shapes = _packed_layouts.get(tuple(known)) or _pack_layout(tuple(known))
    name = tag.encode("utf-8", "surrogatepass")
    head = HEAD.pack(len(layout), len(name), np.nan if fraction is None else fraction)
    parts = [head, layout, shapes.pack(*shape), name]
    parts.append(PADDING[(HEAD.size + len(layout) + shapes.size + len(name)) % 16])
    for array in data.values():
        parts += array.tobytes(), PADDING[array.nbytes % 16]
    return bytearray().join(parts)


def _pack_layout(known: tuple[Any, ...]) -> tuple[bytes, struct.Struct]:
    """Describe keys, types and dimensions."""
    entries = [known[at : at + 3] for at in range(0, len(known), 3)]
    pickled = pickle.dumps(entries)
    layout = _packed_layouts[known] = pickled, _shapes(entries)
    return layout


def _shapes(entries: Sequence[tuple[str, np.dtype[Any], int]]) -> struct.Struct:
    """Return the format in which the shapes of all data are written."""
    return struct.Struct(f"<{sum(ndim for _, _, ndim in entries)}q")


def unpack(item: Any) -> tuple[str, float | None, dict[str, Any]]:
    """Return what was given to `pack`; the arrays are writable."""
    if type(item) is tuple:
        return item
    of_layout, of_name, fraction = HEAD.unpack_from(item)
    at = HEAD.size + of_layout
    layout = bytes(item[HEAD.size : at])
    shapes, entries = _read_layouts.get(layout) or _read_layout(layout)
    shape = shapes.unpack_from(item, at)
    at += shapes.size
    tag = item[at : at + of_name].decode("utf-8", "surrogatepass")
    at += of_name
    data, used = {}, 0
    for key, dtype, ndim in entries:
        at += -at % 16
        array = data[key] = np.ndarray(shape[used : used + ndim], dtype, item, at)
        at += array.nbytes
        used += ndim
    return tag, None if fraction != fraction else fraction, data


def _read_layout(layout: bytes) -> Layout:
    """Read what `_pack_layout` has written."""
    entries = pickle.loads(layout)
    read = _read_layouts[layout] = _shapes(entries), entries
    return read
