"""How many workers, how large a buffer: 'auto' takes what the advice names.

`Tuner` is a pure function of the windows that it is shown, one after another. `Controller` shows it
a pool's windows, and changes the pool::

    feed ──ten times a second──► Controller ──Window──► Tuner ──► advise
                                     │ resize              ▲ Decision
                                     ▼                     │
                                    pool ◄─────────────────┘
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from cseq._core import now_ns
from cseq.measure.advice import ENOUGH_BATCHES, LITTLE, advise
from cseq.options import Size

if TYPE_CHECKING:
    from cseq.measure.advice import Window
    from cseq.measure.stats import Stats

__all__ = ["Controller", "Decision", "Tuner", "log_change"]

log = logging.getLogger("cseq")

SHORT, LONG = 0.5, 8.0  # seconds of the epochs in a window, at least; longer if nothing changes
EACH = 4  # batches of each worker in a window, at least
QUICK = 3  # changes after which windows get longer, too
BETTER, WORSE = 1.05, 0.95  # times the rate: less than that, and a change was of no use; or harm
# Batches of the buffer for each new worker: half are ready when those that sleep are woken.
AHEAD = 3
OTHER = 1.5  # times the ratio of the two sides' times, from which old experience is none
MANY = 1 << 30


class Decision(NamedTuple):
    """Another size, and why."""

    size: Size
    why: str


class Tuner:
    """Decides from one window after another; has no clock of its own.

    Workers go straight to the number that the advice names; a larger buffer is taken as named, and
    never made smaller. A change of the workers is taken back if it did harm. Once more workers, or
    a larger buffer, were of no use, more are not tried, for as long as batches and steps take about
    the times that they took: so it ends.

    Parameters
    ----------
    auto : (bool, bool)
        Whether `num_workers` and `buffer` may change.

    Attributes
    ----------
    span : float
        Seconds that the next window is to have, at least.
    """

    def __init__(self, auto: tuple[bool, bool]) -> None:
        self._auto = auto
        self.span = SHORT
        self._changes = 0
        self._trial: tuple[Size, float] | None = None  # before the last change: the size, the rate
        self._forget(0.0)

    def _forget(self, ratio: float) -> None:
        """Have no experience with batches and steps whose times have this ratio."""
        self._ratio = ratio
        self._enough = Size(MANY, MANY)  # more workers, or a larger buffer, were of no use

    def is_enough(self, window: Window) -> bool:
        """Tell whether a window says something."""
        batches = max(ENOUGH_BATCHES, EACH * window.workers)
        return window.elapsed >= self.span and window.batches >= batches

    def look(self, window: Window, size: Size, most: Size) -> Decision | None:
        """Return what to change `size` to, at most to `most`; None: nothing.

        `window` begins after the last change, when all workers were there.
        """
        decision = self._judge(window, size) or self._next(window, size, most)
        if decision is None:
            self.span = min(2 * self.span, LONG)
            return None
        self._changes += 1
        self.span = min(SHORT * 2 ** max(0, self._changes - QUICK), LONG)
        return decision

    def _judge(self, v: Window, size: Size) -> Decision | None:
        """Learn from the last change, and take one of the workers back if it did harm."""
        ratio = v.index / v.step if v.step > 0 else 1e9
        trial, self._trial = self._trial, None
        if trial is None:
            if not self._ratio / OTHER <= ratio <= self._ratio * OTHER:
                self._forget(ratio)
            return None
        (workers, _), before = trial
        now, rate, waits = size.num_workers, v.batches / v.elapsed, v.w >= LITTLE
        is_worse, is_better = waits and rate < before * WORSE, rate >= before * BETTER
        if now == workers:
            if waits and not is_better:
                self._enough = self._enough._replace(buffer=size.buffer)
            return None
        if waits and not is_better:
            self._enough = self._enough._replace(num_workers=workers if is_worse else now)
        if not is_worse:
            self._ratio = ratio  # which the change itself may have made another
            return None
        return Decision(
            size._replace(num_workers=workers),
            f"{before:.3g} batches a second with {workers}, {rate:.3g} with {now}",
        )

    def _next(self, v: Window, size: Size, most: Size) -> Decision | None:
        """Return what the advice names, within bounds."""
        advice = advise(v)
        named, why = advice.change, advice.sentence
        workers, buffer = size
        if self._auto[0]:
            highest = max(workers, min(most.num_workers, self._enough.num_workers))
            workers = min(named.get("num_workers", workers), highest)
        if self._auto[1]:
            more = AHEAD * workers if workers > size.num_workers else 2 * workers
            buffer = named.get("buffer", max(buffer, more))
            limit = max(self._enough.buffer, AHEAD * workers)
            buffer = max(size.buffer, min(buffer, most.buffer, limit))
        if (workers, buffer) == size:
            return None
        self._trial = size, v.batches / v.elapsed
        return Decision(Size(workers, buffer), why)


def log_change(before: Size, after: Size, why: str) -> None:
    """Log what was changed, on one line."""
    changes = [
        f"{name} {one} → {other}"
        for name, one, other in zip(Size._fields, before, after, strict=True)
        if one != other
    ]
    log.info("%s: %s", ", ".join(changes), why)


class Controller:
    """Measures a pool and changes its size; called by the thread that takes its batches.

    An exception of a signal handler may end a call anywhere: the next one goes on.
    """

    def __init__(self, pool: Any, auto: tuple[bool, bool]) -> None:
        self._pool = pool
        self._tuner = Tuner(auto)
        self._from: Stats | None = None  # the figures when the window began
        self._at = 0  # when to look again, in ns of `now_ns`
        self._resizing: Size | None = None  # `resize` was called, and has not returned

    def __call__(self) -> None:
        """Look at the pool, if it is time to."""
        if now_ns() < self._at:
            return
        pool, tuner = self._pool, self._tuner
        if self._resizing is not None:
            self._resize(self._resizing)
        if not pool.is_staffed:  # those that are being made have done nothing yet
            self._from = None
            return
        stats = pool.stats()
        if self._from is None:
            self._begin(stats)
            return
        window = stats.since(self._from).window()
        if not tuner.is_enough(window):
            return
        size = pool.size
        decision = tuner.look(window, size, pool.most(stats))
        if decision is None:
            self._begin(stats)
            return
        self._from = None
        self._resize(decision.size)
        log_change(size, decision.size, decision.why)

    def _begin(self, stats: Stats) -> None:
        self._from = stats
        self._at = now_ns() + int(self._tuner.span * 1e9)

    def _resize(self, size: Size) -> None:
        self._resizing = size
        self._pool.resize(*size)
        self._resizing = None
