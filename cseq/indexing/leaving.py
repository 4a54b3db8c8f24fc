"""``on_error='skip'``: leaves out samples or whole batches that fail.

The worker sends a `Partial` if samples are missing. The trainer logs and records these samples.
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
    "the whole batch is left out, so this rank gets one batch fewer than len(); with DDP, ranks "
    "that get more batches wait for this rank forever"
)


class Skipped(NamedTuple):
    """A sample or a whole batch that was left out because of ``on_error='skip'``.

    Attributes
    ----------
    epoch : int or None
        The epoch, or None for a `cseq.DataLoader`.
    batch : int
        The number of the batch in the epoch, starting with 0.
    sample : object
        The index of the sample, or its key from a torch sampler. None for a whole batch.
    error : str
        The type and text of the exception.
    indices : list
        The indices of the samples that the loop does not receive.
    """

    epoch: int | None
    batch: int
    sample: Any
    error: str
    indices: list[Any]


def note_batch(
    location: str, epoch: int | None, batch: int, error: BaseException, indices: Sequence[object]
) -> Skipped:
    """Log that a batch was left out, and return a `Skipped`.

    Only text is logged, because a log record with the exception would keep its traceback alive.
    """
    text = failure.line_of(error)
    log.error("skipped %s: %s (%s)", location, text, WHOLE)
    return Skipped(epoch, batch, None, text, list(indices))


def note_samples(epoch: int | None, batch: int, left: Sequence[tuple[Any, str]]) -> list[Skipped]:
    """Log the samples that were left out, and return a `Skipped` for each."""
    location = f"batch {batch}" if epoch is None else f"epoch {epoch}, batch {batch}"
    for sample, text in left:
        log.error("skipped sample %s of %s: %s", sample, location, text)
    return [Skipped(epoch, batch, sample, text, [sample]) for sample, text in left]


def indices_of(key: object) -> list[Any]:
    """Return a key's indices as a list."""
    return key if isinstance(key, list) else [] if key is None else [key]


def none_text(index: object, dataset: object) -> str:
    """Return the message for a sample that is None."""
    return f"sample {index} of {type(dataset).__name__} is None; is a `return` missing?"


class Leaving:
    """Fetches the samples of batches and leaves out samples that fail.

    Random generators are not reset after a sample fails. A batch still depends only on its indices
    and seeds.

    Parameters
    ----------
    dataset : object
        An object with ``__getitem__(index)``, ``__getitems__(indices)``, or both.
    skips : bool
        Whether to leave out samples that fail, instead of raising their exceptions.
    refuses_none : bool
        Whether to treat None as a failed sample.

    Attributes
    ----------
    left : list of tuple
        The position, index and exception text of each sample left out of the most recent batch.
    """

    def __init__(self, dataset: Any, *, skips: bool, refuses_none: bool) -> None:
        self.dataset = dataset
        self._skips, self._refuses_none = skips, refuses_none
        self._depth = fork_depth()
        self.left: list[tuple[int, Any, str]] = []

    def fetch(self, indices: Sequence[object]) -> Iterator[object]:
        """Return the samples, using ``__getitems__`` if possible.

        Raises
        ------
        Exception
            The first exception, if samples may not be left out or if all of them fail.
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
        """Yield samples one by one. If all fail, raise `first` or the first sample's exception.

        `first` is deleted afterwards, because its traceback refers to this frame.
        """
        dataset = self.dataset
        for position, index in enumerate(indices):
            try:
                sample = dataset[index]
                self._check(sample, index)
            except Exception as error:
                if not self._may_leave():
                    location = f"sample {index} of {type(dataset).__name__}"
                    failure.annotate(error, f"cseq: while reading {location}")
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
        """Return True if samples may be left out, but False in a child forked by the data set."""
        return self._skips and fork_depth() == self._depth

    def whole(self, batch: object) -> object:
        """Return the batch, or a `Partial` if samples are missing."""
        if not self.left:
            return batch
        return Partial(batch, tuple((index, text) for _, index, text in self.left))
