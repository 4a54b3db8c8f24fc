"""``on_error='skip'``: leaves out samples that raise, or whole batches.

The worker fetches a batch's samples one by one (`Leaving`). It sends the remaining samples and a
list of the missing samples as a `Partial`. The trainer side logs each missing sample or batch and
records it as `Skipped`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq._memory import fork_depth
from cseq.encoding import failure
from cseq.encoding.survey import Partial

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Leaving", "Skipped", "indices_of", "none_text", "note_batch", "note_samples"]

log = logging.getLogger("cseq")

WHOLE = (
    "the whole batch is left out, so this rank has one less than len() says: ranks that have more "
    "wait for it forever, as in DDP"
)


class Skipped(NamedTuple):
    """A sample or a whole batch that ``on_error='skip'`` has left out.

    Attributes
    ----------
    epoch : int or None
        None in a `cseq.DataLoader`'s list, which covers only the latest epoch.
    batch : int
        The batch number in the epoch, starting at 0.
    sample : object
        The sample's index or its key in a torch sampler, or None if the whole batch is left out.
    error : str
        The type and text of the exception.
    indices : list
        The indices that the loop does not receive, either `sample` or, if known, the whole batch.
    """

    epoch: int | None
    batch: int
    sample: Any
    error: str
    indices: list[Any]


def note_batch(
    location: str, epoch: int | None, batch: int, error: BaseException, indices: Sequence[object]
) -> Skipped:
    """Log that a batch is left out, and return its `Skipped` entry.

    Only the exception's text is logged. A log record with the exception itself would keep its
    traceback alive, along with all objects that the traceback refers to.
    """
    text = failure.line_of(error)
    log.error("skipped %s: %s (%s)", location, text, WHOLE)
    return Skipped(epoch, batch, None, text, list(indices))


def note_samples(epoch: int | None, batch: int, left: Sequence[tuple[Any, str]]) -> list[Skipped]:
    """Log the samples left out of a batch, and return their `Skipped` entries."""
    location = f"batch {batch}" if epoch is None else f"epoch {epoch}, batch {batch}"
    for sample, text in left:
        log.error("skipped sample %s of %s: %s", sample, location, text)
    return [Skipped(epoch, batch, sample, text, [sample]) for sample, text in left]


def indices_of(key: object) -> list[Any]:
    """Return the indices in a key as a list."""
    return key if isinstance(key, list) else [] if key is None else [key]


def none_text(index: object, dataset: object) -> str:
    """Return the message for a sample that is None."""
    return f"sample {index} of {type(dataset).__name__} is None; is a `return` missing?"


class Leaving:
    """Fetches the samples for one batch after another, leaving out samples that raise.

    Random draws made by a sample that raises are not undone, and later samples in the batch draw
    subsequent numbers. As always, the batch depends only on its indices and its seeds.

    Parameters
    ----------
    dataset : object
        An object with ``__getitem__(index)``, ``__getitems__(indices)``, or both.
    skips : bool
        Whether to leave out a sample that raises instead of raising.
    refuses_none : bool
        Whether a None sample is an error because the collate function cannot handle None.

    Attributes
    ----------
    left : list of tuple
        The position, the index and the exception's type and text for each sample left out of the
        latest batch.
    """

    def __init__(self, dataset: Any, *, skips: bool, refuses_none: bool) -> None:
        self.dataset = dataset
        self._skips, self._refuses_none = skips, refuses_none
        self._depth = fork_depth()
        self.left: list[tuple[int, Any, str]] = []

    def fetch(self, indices: Sequence[object]) -> Iterator[object]:
        """Return the samples, fetched one by one unless the data set has ``__getitems__``.

        Raises
        ------
        Exception
            The first exception that a sample raised, if all samples raise or none may be left out.
        """
        self.left.clear()
        first = None
        if together := getattr(self.dataset, "__getitems__", None):
            try:
                samples = [*together(indices)]
                if self._refuses_none:
                    for index, sample in zip(indices, samples, strict=True):
                        self._check(sample, index)
                return iter(samples)
            except Exception as error:
                if not self._may_leave() or not hasattr(self.dataset, "__getitem__"):
                    raise
                first = error.with_traceback(None)
        return self._one_by_one(indices, first)

    def _check(self, sample: object, index: object) -> None:
        if sample is None and self._refuses_none:
            raise TypeError(none_text(index, self.dataset))

    def _one_by_one(self, indices: Sequence[object], first: Exception | None) -> Iterator[object]:
        """Yield samples one by one without keeping them. Raise `first` if all were left out.

        The local variable `first` must be deleted, because its traceback refers to this frame.
        """
        dataset = self.dataset
        for position, index in enumerate(indices):
            try:
                sample = dataset[index]
                self._check(sample, index)
            except Exception as error:
                if not self._may_leave():
                    failure.annotate(error, f"cseq: sample {index} of {type(dataset).__name__}")
                    raise
                self.left.append((position, index, failure.line_of(error)))
                first = first or error.with_traceback(None)
                continue
            yield sample
            del sample
        if first is not None and len(self.left) == len(indices):
            try:
                raise first
            finally:
                del first

    def _may_leave(self) -> bool:
        """Return True if samples may be left out. A process that the data set forked must raise."""
        return self._skips and fork_depth() == self._depth

    def whole(self, batch: object) -> object:
        """Return the batch, or a `Partial` with a list of missing samples if there are any."""
        if not self.left:
            return batch
        return Partial(batch, tuple((index, text) for _, index, text in self.left))
