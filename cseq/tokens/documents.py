"""Documents of tokens: what a source of rows is, and what the readers share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from cseq.order._readers import CHUNK, DocumentEnds, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cseq.order.base import Ints

    Found: TypeAlias = tuple[list[NDArray[Any]], list[NDArray[Any] | None], Ints, Ints]

__all__ = ["Corpus", "Documents", "Given", "corpus_of", "damaged", "data_type", "first"]

PROBES = 64  # tokens that stand for a corpus in its fingerprint


class Documents(Protocol):
    """A source of `Rows`: an object of your own may be one.

    Workers get copies of it by pickle; threads share it. A method ``mask(document, start, stop)``
    may say which of the tokens a loss counts: those where it is not 0.

    Attributes
    ----------
    name : str
        What errors call it.
    lengths : array of int
        The tokens in each document, from 0 on. It may be a memory map.
    fingerprint : int
        Another one where the tokens are others.
    """

    name: str
    lengths: NDArray[np.integer[Any]]
    fingerprint: int

    def __len__(self) -> int:
        """Return the number of documents."""

    def read(self, document: int, start: int, stop: int, /) -> NDArray[np.integer[Any]]:
        """Return the tokens [start, stop) of a document."""


class Corpus:
    """Documents that lie end to end in arrays; each document lies in one of these.

    A subclass has a method `attach`, which opens its files and ends with `lay`.
    """

    name: str
    lengths: NDArray[np.integer[Any]]
    tokens: int

    def __init__(self, **made_with: Any) -> None:
        self._made_with = made_with
        self.attach(is_new=True, **made_with)

    def attach(self, *, is_new: bool, **made_with: Any) -> None:
        """Open the files, and check all of them if the corpus `is_new`, and no worker's copy."""
        raise NotImplementedError

    def lay(
        self, name: str, lengths: Any, parts: Sequence[Any], masks: Sequence[Any] | None = None
    ) -> None:
        """Set the lengths of documents, the arrays of their tokens, and masks if there are any."""
        self.name, self.lengths = name, lengths
        self._parts, self._masks = [*parts], [*masks] if masks else [None] * len(parts)
        self._firsts = np.cumsum([0, *map(len, parts)])
        self.tokens = int(self._firsts[-1])
        if not self.tokens:
            raise ValueError(f"{name}: it has no tokens; leave this source out")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self.name}: {self.tokens:,} tokens in {len(self):,} documents>"

    def __reduce__(self) -> Any:
        """Pickle as what opens the files again."""
        return again, (type(self), self._made_with, self.fingerprint)

    @cached_property
    def ends(self) -> DocumentEnds:
        """Where documents end."""
        return DocumentEnds(self.lengths)

    @cached_property
    def fingerprint(self) -> int:
        """A number of the counts, and of some of the tokens."""
        at = np.linspace(0, self.tokens - 1, PROBES).astype(np.int64)
        parts, _, owners, starts = self.find(at, np.ones_like(at))
        probes = [int(parts[o][k]) for o, k in zip(owners.tolist(), starts.tolist(), strict=True)]
        return int(fingerprint(np.array([*probes, self.tokens, len(self)])))

    def read(self, document: int, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return the tokens [start, stop) of a document, as a view."""
        size = int(self.lengths[document])
        if not 0 <= start <= stop <= size:
            raise IndexError(f"{self.name}: document {document} has no [{start}, {stop}) of {size}")
        at = self.ends.starts(np.array([document])) + start
        parts, _, [owner], [first] = self.find(at, np.array([stop - start]))
        part: NDArray[np.integer[Any]] = parts[owner][first : first + stop - start]
        return part

    def find(self, at: Ints, counts: Ints) -> Found:  # noqa: ARG002
        """Find the tokens from each of some positions in all documents.

        Returns arrays of tokens, the mask of each array or None, and for each position the number
        of its array and its index there.
        """
        if len(self._parts) == 1:
            return self._parts, self._masks, np.zeros_like(at), at
        owners = self._firsts.searchsorted(at, "right") - 1
        return self._parts, self._masks, owners, at - self._firsts[owners]


def again(kind: type[Corpus], made_with: dict[str, Any], known: int) -> Corpus:
    """Open the files of a corpus in another process."""
    corpus = kind.__new__(kind)
    corpus._made_with = made_with
    corpus.attach(is_new=False, **made_with)
    if corpus.fingerprint != known:
        raise ValueError(
            f"{corpus.name}: its tokens have changed since the run opened it; leave the files as "
            "they are while it runs, and start it again"
        )
    return corpus


class Given(Corpus):
    """An object of the user's."""

    def attach(self, *, is_new: bool, documents: Documents) -> None:  # type: ignore[override]
        """Check what the object says of itself."""
        self.documents, self.fingerprint = documents, documents.fingerprint
        lengths, name = np.asarray(documents.lengths), documents.name
        if lengths.shape != (len(documents),) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"{name} has {len(documents)} documents and lengths={lengths!r}; give an integer "
                "for each document"
            )
        if is_new and (k := first(len(lengths), lambda a, b: lengths[a:b] < 0)) is not None:
            raise ValueError(f"{name} has lengths[{k}]={lengths[k]}; give at least 0")
        self.lay(name, lengths, [range(int(lengths.sum(dtype=np.int64)))])

    def find(self, at: Ints, counts: Ints) -> Found:
        """Call the object's methods for each piece."""
        documents, begins = self.ends.find(at)
        starts = at - begins
        pieces = np.stack([documents, starts, starts + counts], axis=1).tolist()
        parts = [self._call("read", *piece) for piece in pieces]
        masks: list[Any] = [None] * len(parts)
        if hasattr(self.documents, "mask"):
            masks = [self._call("mask", *piece) for piece in pieces]
        return parts, masks, np.arange(len(at)), np.zeros_like(at)

    def _call(self, method: str, document: int, start: int, stop: int) -> NDArray[Any]:
        found = np.asarray(getattr(self.documents, method)(document, start, stop))
        if found.shape != (stop - start,):
            raise ValueError(
                f"{self.name}: {method}({document}, {start}, {stop}) returned an array of shape "
                f"{found.shape}; return a value for each token, or correct lengths[{document}]"
            )
        return found


def corpus_of(source: Any) -> Corpus:
    """Return a source as a corpus."""
    if isinstance(source, Corpus):
        return source
    for name in ("name", "lengths", "fingerprint", "read", "__len__"):
        if not hasattr(source, name):
            raise TypeError(
                f"sources has {source!r}, which has no {name}; give tokens.Megatron, tokens.Flat, "
                "tokens.Arrow, or an object like tokens.Documents"
            )
    return Given(documents=source)


def first(number: int, is_wrong: Callable[[int, int], NDArray[np.bool_]]) -> int | None:
    """Return the number of the first wrong value; `is_wrong` tells which are wrong in a range."""
    for start in range(0, number, CHUNK):
        wrong = is_wrong(start, min(start + CHUNK, number))
        if wrong.any():
            return start + int(wrong.argmax())
    return None


def data_type(dtype: Any) -> np.dtype[Any]:
    """Check the argument `dtype`."""
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype={dtype!r} is no type of numpy; give one such as 'uint16'") from None


def damaged(path: str, offset: int | None, what: str, remedy: str) -> ValueError:
    """Make the error for a file, at a byte of it."""
    at = "" if offset is None else f" at byte {offset}"
    return ValueError(f"{path}{at}: {what}; {remedy}")
