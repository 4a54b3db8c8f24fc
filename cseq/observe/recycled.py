"""What free data would give: some batches again and again, in a loader's place."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sized
from typing import TYPE_CHECKING

from cseq.check import count as checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeVar

    B = TypeVar("B")

__all__ = ["recycled"]


def recycled(loader: Iterable[B], keep: int = 10, after: int = 20) -> Iterator[B]:
    """Iterate over some batches of a loader again and again, as if data were free.

    The time that an epoch takes with ``cseq.recycled(loader)``, against that with `loader`, is the
    most that any change of the loader could gain. For measuring, never for training.

    Parameters
    ----------
    loader : iterable
        Any loader.
    keep : int
        Batches that come again, the last ones of those taken: several, so that a cache of the
        processor does not hold them.
    after : int
        Batches that are taken from the loader before.

    Yields
    ------
    object
        As many batches as the loader has; without end if it has no length.

    Examples
    --------
    >>> list(cseq.recycled(range(9), keep=2, after=4))
    [0, 1, 2, 3, 2, 3, 2, 3, 2]
    """
    keep, after = checked("keep", keep), checked("after", after)
    length = len(loader) if isinstance(loader, Sized) else None
    kept: deque[B] = deque(maxlen=keep)
    for batch in itertools.islice(loader, after):
        kept.append(batch)
        yield batch
    if not kept:
        return
    more = itertools.repeat(None) if length is None else range(after, length)
    for batch, _ in zip(itertools.cycle(kept), more, strict=False):
        yield batch
