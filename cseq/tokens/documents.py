"""Document sources for `Rows`: the protocol, and a base class for readers."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cseq.order._readers import CHUNK, DocumentEnds, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# Number of tokens to hash for a fingerprint.
PROBES = 64


class Documents(Protocol):
    """Protocol for the document sources of `Rows`.

    Worker processes receive pickled copies of a source, and worker threads share it. An optional
    method ``mask(document, start, stop)`` returns 0 for tokens that the loss ignores.

    Attributes
    ----------
    name : str
        The name of the source in error messages.
    lengths : array of int
        The number of tokens in each document (at least 0). May be a memory map.
    fingerprint : int
        A number that changes if the tokens change.
    """

    name: str
    lengths: NDArray[np.integer[Any]]
    fingerprint: int

    def __len__(self) -> int:
        """Return the number of documents."""

    def read(self, document: int, start: int, stop: int, /) -> NDArray[np.integer[Any]]:
        """Return tokens [start, stop) of a document."""


class Corpus:
    """Documents stored one after another, each within one of the arrays `parts`.

    A subclass's `__init__` must set `given` (the arguments for `again`) and call `lay`.
    """

    # If True, the process that pickled this corpus has already checked the files.
    is_copy = False
    given: dict[str, Any]
    name: str
    lengths: NDArray[np.integer[Any]]
    tokens: int
    parts: list[NDArray[np.integer[Any]]]
    masks: list[NDArray[Any] | None]

    def lay(
        self, name: str, lengths: Any, parts: Sequence[Any], masks: Sequence[Any] | None = None
    ) -> None:
        """Set the document lengths, the token arrays, and any masks."""
        self.name, self.lengths = name, lengths
        self.parts, self.masks = [*parts], [*masks] if masks else [None] * len(parts)
        *firsts, self.tokens = np.cumsum([0, *map(len, parts)]).tolist()
        self.firsts = np.array(firsts, np.int64)
        if not self.tokens:
            raise ValueError(f"{name} has no tokens; leave this source out")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self.name}: {self.tokens:,} tokens in {len(self):,} documents>"

    def __reduce__(self) -> Any:
        """Pickle the arguments that `again` needs to open the files."""
        return again, (type(self), self.given, self.fingerprint)

    @cached_property
    def ends(self) -> DocumentEnds:
        """The positions of documents in the corpus."""
        return DocumentEnds(self.lengths)

    @cached_property
    def fingerprint(self) -> int:
        """A hash of sampled tokens, the token count and the document count."""
        at = np.linspace(0, self.tokens - 1, PROBES).astype(np.int64)
        owners = self.firsts.searchsorted(at, "right") - 1
        places = zip(owners.tolist(), (at - self.firsts[owners]).tolist(), strict=True)
        probes = [int(self.parts[owner][k]) for owner, k in places]
        return int(fingerprint(np.array([*probes, self.tokens, len(self)])))

    def read(self, document: int, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return a view of tokens [start, stop) of a document."""
        size = int(self.lengths[document])
        if not 0 <= start <= stop <= size:
            raise IndexError(
                f"{self.name}: [{start}, {stop}) is out of range for the {size} tokens of document "
                f"{document}"
            )
        begin = int(self.ends.starts(np.array([document]))[0])
        owner = int(self.firsts.searchsorted(begin, "right")) - 1
        first = begin - int(self.firsts[owner])
        part: NDArray[np.integer[Any]] = self.parts[owner][first + start : first + stop]
        return part


def again(kind: type[Corpus], given: dict[str, Any], known: int) -> Corpus:
    """Open a corpus in another process. Raise ValueError if its tokens have changed."""
    corpus = kind.__new__(kind)
    corpus.is_copy = True
    corpus.__init__(**given)  # type: ignore[misc]
    if corpus.fingerprint != known:
        raise ValueError(
            f"the tokens of {corpus.name} have changed since the run opened the files; restart the "
            "run, and do not change the files while it is using them"
        )
    return corpus


class Given(Corpus):
    """A corpus that reads pieces from a user's object."""

    def __init__(self, documents: Documents) -> None:
        self.given, self.documents = {"documents": documents}, documents
        self.fingerprint = documents.fingerprint
        lengths, name = np.asarray(documents.lengths), documents.name
        if lengths.shape != (len(documents),) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"{name} has {len(documents)} documents, but lengths={lengths!r}; pass one integer "
                "for each document"
            )
        if (k := first(len(lengths), lambda a, b: lengths[a:b] < 0)) is not None:
            raise ValueError(f"{name} has lengths[{k}]={lengths[k]}; pass non-negative lengths")
        self.lay(name, lengths, [range(int(lengths.sum(dtype=np.int64)))])

    def read(
        self, document: int, start: int, stop: int, method: str = "read"
    ) -> NDArray[np.integer[Any]]:
        """Read a piece with a method of the user's object."""
        found = np.asarray(getattr(self.documents, method)(document, start, stop))
        if found.shape != (stop - start,):
            raise ValueError(
                f"{self.name}: {method}({document}, {start}, {stop}) returned an array of shape "
                f"{found.shape}; return one value for each token, or correct lengths[{document}]"
            )
        return found

    def mask(self, document: int, start: int, stop: int) -> NDArray[Any] | None:
        """Return the loss mask of a piece, if the source has masks."""
        if not hasattr(self.documents, "mask"):
            return None
        return self.read(document, start, stop, "mask")


def corpus_of(source: Any) -> Corpus:
    """Convert a source to a `Corpus`."""
    if isinstance(source, Corpus):
        return source
    for name in ("name", "lengths", "fingerprint", "read", "__len__"):
        if not hasattr(source, name):
            raise TypeError(
                f"sources contains {source!r}, which has no {name}; pass tokens.Megatron, "
                "tokens.Flat, tokens.Arrow, or an object that implements tokens.Documents"
            )
    return Given(source)


def first(number: int, is_wrong: Callable[[int, int], NDArray[np.bool_]]) -> int | None:
    """Return the index of the first wrong value, or None. ``is_wrong(a, b)`` checks [a, b)."""
    for start in range(0, number, CHUNK):
        wrong = is_wrong(start, min(start + CHUNK, number))
        if wrong.any():
            return start + int(wrong.argmax())
    return None


def data_type(dtype: Any) -> np.dtype[Any]:
    """Convert a `dtype` argument to a NumPy type."""
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype={dtype!r} is not a NumPy type; pass one such as 'uint16'") from None
    return kind


def damaged(path: str, offset: int | None, what: str, remedy: str) -> ValueError:
    """Create an error for a damaged file."""
    at = "" if offset is None else f" at byte {offset}"
    return ValueError(f"{path}{at}: {what}; {remedy}")
