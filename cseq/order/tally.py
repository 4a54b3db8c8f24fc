"""Counts the tokens consumed from each source up to a position."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler


class Tally(NamedTuple):
    """The number of tokens that all ranks have consumed from each source.

    Only `counted` updates the counts.

    Attributes
    ----------
    counts : Counter
        The token counts so far.
    due : tuple of (Sampler, epoch, start, stop)
        Ranges of units from earlier places that have yet to be counted.
    mark : (epoch, position) or None
        The position in the current place up to which tokens have been counted, or None.
    """

    counts: Counter[str] = Counter()  # noqa: RUF012 - never changed
    due: tuple[tuple[Sampler, int, int, int], ...] = ()
    mark: tuple[int, int] | None = None

    def leave(self, sampler: Sampler, begun: tuple[int, int], now: tuple[int, int]) -> Tally:
        """Return a tally for the next place."""
        if sampler.data is None or now == begun:
            return self
        due, last = [*self.due], now[0]
        epoch, start = self.mark or begun
        for earlier in range(epoch, last):
            stop = sampler.end(begun[1] if earlier == begun[0] else 0)
            due.append((sampler, earlier, start, stop))
            start = 0
        return Tally(self.counts, (*due, (sampler, last, start, now[1])))

    def counted(self, sampler: Sampler, begun: tuple[int, int], now: tuple[int, int]) -> Tally:
        left = self.leave(sampler, begun, now)
        counts = Counter(self.counts)
        for counted, epoch, start, stop in left.due:
            counts.update(counted.tokens(epoch, start, stop))
        return Tally(counts, mark=self.mark if left is self else now)
