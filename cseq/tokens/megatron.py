"""Documents in Megatron-LM's format: an `.idx` and a `.bin` file."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.order.tables import mapped
from cseq.tokens.documents import Corpus, damaged, first

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\0\0"
# Magic bytes, version, type code, number of sequences, number of document boundaries.
HEAD = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
REMEDY = "write the pair again with Megatron's preprocess_data.py, or copy both files again"


class Megatron(Corpus):
    """Documents in Megatron-LM's files ``PREFIX.idx`` and ``PREFIX.bin``.

    Parameters
    ----------
    prefix : str or path
        The path of both files without their extensions.
    name : str, optional
        The name of the source. Defaults to the last component of `prefix`.

    Raises
    ------
    ValueError
        If a file is damaged, or if the two files do not match.

    Examples
    --------
    >>> web = tokens.Megatron("web_text_document")  # doctest: +SKIP
    """

    def __init__(self, prefix: str | os.PathLike[str], *, name: str | None = None) -> None:
        stem = os.path.abspath(os.fspath(prefix)).removesuffix(".idx").removesuffix(".bin")
        self.given = {"prefix": stem, "name": name}
        path, data = f"{stem}.idx", f"{stem}.bin"
        with open(path, "rb") as file:
            head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise damaged(path, 0, f"the file does not start with {MAGIC!r} and a header", REMEDY)
        _, version, code, number, bounds = HEAD.unpack(head)
        if version != 1:
            raise damaged(path, 9, f"version {version} is not supported", REMEDY)
        if code not in TYPES:
            kind = FLOATS.get(code, "unknown")
            raise damaged(path, 17, f"type code {code} ({kind}) is not an integer type", REMEDY)
        size, whole = os.path.getsize(path), HEAD.size + 12 * number + 8 * bounds
        # The index may contain an additional mode byte per sequence.
        if size not in (whole, whole + number):
            said = f"the file ends, but {number} sequences and {bounds} bounds need {whole} bytes"
            raise damaged(path, size, said, REMEDY)
        lengths = mapped(path, "<i4", HEAD.size, number)
        starts = mapped(path, "<i8", HEAD.size + 4 * number, number)
        documents = mapped(path, "<i8", HEAD.size + 12 * number, bounds)
        dtype, there = np.dtype(TYPES[code]), os.path.getsize(data)
        if not self.is_copy:
            check(path, lengths, starts, documents, dtype.itemsize)
        total = int(starts[-1]) + int(lengths[-1]) * dtype.itemsize if number else 0
        if there != total:
            said = f"the file has {there} bytes, but {path} describes {total}"
            raise damaged(data, min(there, total), said, REMEDY)
        others = first(bounds - 1, lambda a, b: np.diff(documents[a : b + 1]) != 1)
        if others is not None:
            lengths = np.diff(np.append(starts, total)[documents]) // dtype.itemsize
        self.lay(name or os.path.basename(stem), lengths, [mapped(data, dtype)])


def check(
    path: str, lengths: NDArray[Any], starts: NDArray[Any], documents: NDArray[Any], size: int
) -> None:
    """Check that sequences are contiguous and document boundaries are in order."""

    def is_apart(a: int, b: int) -> NDArray[np.bool_]:
        due = starts[a + 1 : b + 1]
        apart: NDArray[np.bool_] = (
            due != (starts[a:b] + lengths[a:b].astype(np.int64) * size)[: len(due)]
        )
        return apart

    number = len(lengths)
    at = [HEAD.size, HEAD.size + 4 * number, HEAD.size + 12 * number]
    if number and starts[0]:
        raise damaged(path, at[1], f"sequence 0 starts at byte {starts[0]} of .bin", REMEDY)
    if not len(documents) or documents[0] != 0 or documents[-1] != number:
        raise damaged(path, at[2], f"the document bounds do not run from 0 to {number}", REMEDY)
    if (k := first(number, lambda a, b: lengths[a:b] < 0)) is not None:
        raise damaged(path, at[0] + 4 * k, f"sequence {k} has length {lengths[k]}", REMEDY)
    if (k := first(number, is_apart)) is not None:
        said = f"sequence {k + 1} does not start where the previous sequence ends"
        raise damaged(path, at[1] + 8 * (k + 1), said, REMEDY)
    k = first(len(documents) - 1, lambda a, b: np.diff(documents[a : b + 1]) < 0)
    if k is not None:
        said = f"document {k + 1} starts before the previous document"
        raise damaged(path, at[2] + 8 * (k + 1), said, REMEDY)
