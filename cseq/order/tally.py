"""How many tokens of each source a run has had, as a function of its positions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cseq.order.sampler import Sampler


class Tally(NamedTuple):
    """The tokens of each source in the units that all ranks have had.

    Nothing is counted before it is asked for.

    Attributes
    ----------
    counts : Counter
        The tokens that are counted.
    due : tuple of (Sampler, epoch, start, stop)
        Units of earlier places that are not counted yet.
    mark : (epoch, position) or None
        Where the count of the present place ends, or None at its beginning.
    """

    counts: Counter[str] = Counter()  # noqa: RUF012 - never changed
    due: tuple[tuple[Sampler, int, int, int], ...] = ()
    mark: tuple[int, int] | None = None

    def leave(self, sampler: Sampler, begun: tuple[int, int], now: tuple[int, int]) -> Tally:
        """Return the tally of the next place; this one is from `begun` to `now`."""
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
        """Count the tokens up to `now`."""
        left = self.leave(sampler, begun, now)
        counts = Counter(self.counts)
        for counted, epoch, start, stop in left.due:
            counts.update(counted.tokens(epoch, start, stop))
        return Tally(counts, mark=self.mark if left is self else now)
