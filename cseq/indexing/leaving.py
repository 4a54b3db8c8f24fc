"""``on_error='skip'``: samples that raise, and whole batches, are left out.

The worker fetches the samples of a batch one by one (`Leaving`). It sends the remaining batch, with
what is missing, as a `Partial`. The loop's end lists what is missing (`Skipped`), and logs it.
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
    """What ``on_error='skip'`` has left out: a sample, or a whole batch.

    Attributes
    ----------
    epoch : int or None
        None in the list of a `cseq.DataLoader`, which is about the latest epoch.
    batch : int
        Its number in the epoch, from 0.
    sample : object
        The sample's index, or its key in a sampler of torch's; None if the whole batch is left out.
    error : str
        Type and text of the exception.
    indices : list
        What the loop does not get: the sample, or the batch's samples, as far as they are known.
    """

    epoch: int | None
    batch: int
    sample: Any
    error: str
    indices: list[Any]


def note_batch(
    location: str, epoch: int | None, batch: int, error: BaseException, indices: Sequence[object]
) -> Skipped:
    """Log that a batch is left out, and return its entry.

    The log gets text: a record that kept the exception would keep its traceback, with all that this
    refers to.
    """
    text = failure.line_of(error)
    log.error("skipped %s: %s (%s)", location, text, WHOLE)
    return Skipped(epoch, batch, None, text, list(indices))


def note_samples(epoch: int | None, batch: int, left: Sequence[tuple[Any, str]]) -> list[Skipped]:
    """Log which samples of a batch are left out, and return their entries."""
    location = f"batch {batch}" if epoch is None else f"epoch {epoch}, batch {batch}"
    for sample, text in left:
        log.error("skipped sample %s of %s: %s", sample, location, text)
    return [Skipped(epoch, batch, sample, text, [sample]) for sample, text in left]


def indices_of(key: object) -> list[Any]:
    """Return the indices in a key."""
    return key if isinstance(key, list) else [] if key is None else [key]


def none_text(index: object, dataset: object) -> str:
    """Say that a sample is missing."""
    return f"sample {index} of {type(dataset).__name__} is None; is a `return` missing?"


class Leaving:
    """Fetches the samples of one batch after another, without samples that raise.

    What such a sample has drawn from the generators stays drawn: the samples after it in its batch
    draw what follows. So the batch depends on its indices and its seeds alone, as any other.

    Parameters
    ----------
    dataset : object
        With ``__getitem__(index)``, or ``__getitems__(indices)``, or both.
    skips : bool
        Whether to leave out a sample that raises, rather than raise.
    refuses_none : bool
        Whether a sample that is None is an error, because the collate function can do nothing with
        it.

    Attributes
    ----------
    left : list of tuple
        Position, index, and type and text of the exception, of each sample left out of the latest
        batch.
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
            The first sample's, if all of them raise, or if no sample may be left out.
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
        """Fetch samples one by one, each dropped before the next; raise `first` if there are none.

        The traceback of `first` refers to this frame.
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
        """Tell whether samples may be left out: not in a process that the data set forked."""
        return self._skips and fork_depth() == self._depth

    def whole(self, batch: object) -> object:
        """Return the batch that was made of the samples, with what it lacks."""
        if not self.left:
            return batch
        return Partial(batch, tuple((index, text) for _, index, text in self.left))
