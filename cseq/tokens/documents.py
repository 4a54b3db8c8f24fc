"""Documents of tokens: what a source of rows is, and what the readers share."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cseq.order._readers import CHUNK, fingerprint
from cseq.order.documents import DocumentEnds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cseq.order.base import Ints

__all__ = ["Corpus", "Documents", "Given", "corpus_of", "damaged", "first", "mapped"]

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
        self._parts, self._masks = list(parts), masks
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

    @property
    def has_mask(self) -> bool:
        """Whether some tokens are left out of a loss."""
        return self._masks is not None

    @cached_property
    def ends(self) -> DocumentEnds:
        """Where documents end."""
        return DocumentEnds(self.lengths)

    @cached_property
    def fingerprint(self) -> int:
        """A number of the counts, and of some of the tokens."""
        at = np.linspace(0, self.tokens - 1, PROBES).astype(np.int64)
        probes = np.concatenate(self.slices(at, np.ones(PROBES, np.int64))).astype(np.int64)
        return int(fingerprint(np.append(probes, [self.tokens, len(self)])))

    def read(self, document: int, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return the tokens [start, stop) of a document, as a view."""
        size = int(self.lengths[document])
        if not 0 <= start <= stop <= size:
            raise IndexError(f"{self.name}: document {document} has no [{start}, {stop}) of {size}")
        at = self.ends.starts(np.array([document])) + start
        return self.slices(at, np.array([stop - start]))[0]

    def slices(self, at: Ints, counts: Ints, *, masks: bool = False) -> list[NDArray[Any]]:
        """Return tokens, or their masks, from each of some positions in all documents."""
        parts = self._masks if masks else self._parts
        if parts is None:
            return [np.ones(count, np.bool_) for count in counts.tolist()]
        if len(parts) == 1:
            ranges = zip(at.tolist(), (at + counts).tolist(), strict=True)
            return [parts[0][start:stop] for start, stop in ranges]
        owners = self._firsts.searchsorted(at, "right") - 1
        starts = at - self._firsts[owners]
        where = zip(owners.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        return [parts[owner][start:stop] for owner, start, stop in where]


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
        whole = [range(int(lengths.sum(dtype=np.int64)))]
        self.lay(name, lengths, whole, whole if hasattr(documents, "mask") else None)

    def slices(self, at: Ints, counts: Ints, *, masks: bool = False) -> list[NDArray[Any]]:
        """Call the object's method for each piece."""
        if masks and not self.has_mask:
            return super().slices(at, counts, masks=True)
        method, found = "mask" if masks else "read", []
        documents, begins = self.ends.find(at)
        starts = at - begins
        where = zip(documents.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
        for document, start, stop in where:
            found.append(np.asarray(getattr(self.documents, method)(document, start, stop)))
            if found[-1].shape != (stop - start,):
                raise ValueError(
                    f"{self.name}: {method}({document}, {start}, {stop}) returned an array of "
                    f"shape {found[-1].shape}; return a value for each token, or correct "
                    f"lengths[{document}]"
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
    """Return the first of some values that is wrong; `is_wrong` looks at those of a range."""
    for start in range(0, number, CHUNK):
        wrong = is_wrong(start, min(start + CHUNK, number))
        if wrong.any():
            return start + int(wrong.argmax())
    return None


def damaged(path: str, offset: int | None, what: str, remedy: str) -> ValueError:
    """Make the error for a file, at a byte of it."""
    at = "" if offset is None else f" at byte {offset}"
    return ValueError(f"{path}{at}: {what}; {remedy}")


def mapped(path: str, dtype: Any, offset: int = 0, count: int | None = None) -> NDArray[Any]:
    """Map a part of a file, as a plain array: slices of it cost less than a `numpy.memmap`'s."""
    kind = np.dtype(dtype)
    number = (os.path.getsize(path) - offset) // kind.itemsize if count is None else count
    if not number:
        return np.empty(0, kind)
    return np.asarray(np.memmap(path, kind, "r", offset, (number,)))
