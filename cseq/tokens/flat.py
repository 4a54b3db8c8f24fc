"""Documents in a flat array of tokens, split by offsets or by an end token."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.check import integer
from cseq.order._readers import CHUNK, fingerprint
from cseq.order.tables import cache_of, mapped, tables
from cseq.tokens.documents import Corpus, damaged, data_type, first

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from cseq.order.tables import New


class Flat(Corpus):
    """Documents in a flat array of tokens, in a memory-mapped ``.npy`` or raw file.

    Parameters
    ----------
    path : str or path
        An ``.npy`` file with a one-dimensional array, or a raw file, which requires `dtype`.
    dtype : data type, optional
        The integer type of the tokens in a raw file.
    offsets : str, path or array of int, optional
        The start of each document, followed by the total number of tokens, as an array or an
        ``.npy`` file.
    end : int, optional
        The token that ends each document. The file is searched once, and the document lengths are
        stored in a file.
    cache : str or path, optional
        The folder for the file of document lengths. With `end`, it defaults to the folder of
        `path`. With an `offsets` file, each process computes the lengths unless this is set.
    name : str, optional
        The name of the source. Defaults to the name of the file without its extension.

    Raises
    ------
    TypeError, ValueError
        If the file is damaged or contradicts an argument.

    Examples
    --------
    >>> np.save("notes.npy", np.array([7, 8, 0, 9, 0], "uint16"))
    >>> tokens.Flat("notes.npy", end=0)
    <Flat notes: 5 tokens in 2 documents>
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: DTypeLike | None = None,
        *,
        offsets: str | os.PathLike[str] | ArrayLike | None = None,
        end: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        path = os.path.abspath(os.fspath(path))
        kind = None if dtype is None else data_type(dtype)
        folder = cache_of(cache)
        if (offsets is None) == (end is None):
            raise ValueError(f"{path} needs either offsets or end; pass exactly one of them")
        if isinstance(offsets, (str, os.PathLike)):
            offsets = os.path.abspath(offsets)
        self.given = {"path": path, "dtype": kind, "offsets": offsets, "end": end, "cache": folder}
        self.given["name"] = name = name or os.path.basename(path).partition(".")[0]
        tokens = npy(path) if path.endswith(".npy") else raw(path, kind)
        if kind not in (None, tokens.dtype):
            raise damaged(path, 0, f"the tokens are {tokens.dtype}, not {kind}", "omit dtype")
        if tokens.dtype.kind not in "iu":
            raise damaged(path, 0, f"the values are {tokens.dtype}", "pass a file of integers")
        if end is not None:
            limits = np.iinfo(tokens.dtype)
            last = integer("end", end, int(limits.min), int(limits.max))
            facts = [tokens.itemsize, last]
            folder = folder or os.path.dirname(path)
            lengths = kept(path, folder, facts, lambda: bounds_of(path, tokens, last))
        else:
            file = offsets if isinstance(offsets, str) else None
            bounds = np.asarray(offsets) if file is None else npy(file)
            if not self.is_copy:
                check(file or path, bounds, len(tokens))
            if file is None or folder is None:
                lengths = lengths_between(bounds)
            else:
                lengths = kept(file, folder, [], lambda: bounds)
        self.lay(name, lengths, [tokens])


def raw(path: str, kind: np.dtype[Any] | None) -> NDArray[Any]:
    """Map a raw file without a header."""
    if kind is None:
        raise TypeError(f"{path} is a raw file; pass its token type, such as dtype='uint16'")
    size, item = os.path.getsize(path), kind.itemsize
    if size % item:
        remedy = "copy the file again, or pass the dtype that it was written with"
        raise damaged(path, size - size % item, f"the file ends inside a {item}-byte token", remedy)
    return mapped(path, kind)


def npy(path: str) -> NDArray[Any]:
    """Map a one-dimensional .npy file."""
    try:
        array = np.asarray(np.load(path, mmap_mode="r"))
    except (EOFError, ValueError, OSError) as error:
        # Windows reports this error if a mapping exceeds the file.
        if isinstance(error, OSError) and getattr(error, "winerror", None) != 8:
            raise
        raise damaged(path, 0, str(error), "write it again with numpy.save") from None
    if array.ndim != 1:
        raise damaged(path, 0, f"the array has shape {array.shape}", "pass a one-dimensional array")
    return array


def check(path: str, offsets: NDArray[Any], tokens: int) -> None:
    """Check the document offsets."""
    remedy = "pass the start of each document, followed by the number of tokens"
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise damaged(path, None, f"offsets={offsets!r} is malformed", remedy)
    said, k = "", first(len(offsets) - 1, lambda a, b: offsets[a + 1 : b + 1] < offsets[a:b])
    if k is not None:
        said = f"offsets[{k + 1}]={offsets[k + 1]} is below offsets[{k}]={offsets[k]}"
    elif offsets[0] != 0:
        said = f"offsets[0]={offsets[0]} is not 0"
    elif offsets[-1] != tokens:
        said = f"offsets[-1]={offsets[-1]}, but there are {tokens} tokens"
        remedy = "pass the offsets for this file, or copy the file again"
    if said:
        raise damaged(path, None, said, remedy)


def kept(
    path: str, folder: str, facts: list[int], bounds: Callable[[], NDArray[Any]]
) -> NDArray[Any]:
    """Return the document lengths from a file, which is created if necessary."""
    there = os.stat(path)
    key = int(fingerprint(np.array([there.st_size, there.st_mtime_ns, *facts])))

    def make(new: New) -> None:
        lengths = lengths_between(bounds())
        new("lengths", len(lengths), lengths.dtype)[:] = lengths

    try:
        return tables(folder, f"{os.path.basename(path)}.{key:016x}.lengths", make)["lengths"]
    except OSError as error:
        remedy = "pass a writable folder for the document lengths as cache="
        raise OSError(error.errno, f"{error.strerror}: {remedy}", error.filename) from None


def bounds_of(path: str, tokens: NDArray[Any], end: int) -> NDArray[Any]:
    """Find the document boundaries. The last document may lack an end token."""
    chunks = range(0, len(tokens), CHUNK)
    ends = [np.flatnonzero(tokens[at : at + CHUNK] == end) + (at + 1) for at in chunks]
    bounds = np.concatenate([[0], *ends, [len(tokens)]])
    if len(bounds) == 2 and len(tokens):
        said = f"none of the {len(tokens)} {tokens.dtype} tokens is end={end}"
        raise damaged(path, None, said, "pass the token that ends documents, and the correct dtype")
    return bounds[:-1] if bounds[-1] == bounds[-2] else bounds


def lengths_between(bounds: NDArray[Any]) -> NDArray[Any]:
    """Return the document lengths, as uint32 if possible."""
    lengths = np.diff(bounds)
    return lengths.astype(np.uint32 if lengths.max(initial=0) < 2**32 else np.int64)
