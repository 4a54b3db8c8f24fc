"""Chooses the number of workers and the buffer size.

A `Controller` passes windows of statistics to a `Tuner` and resizes the pool::

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

# Minimum and maximum window length in seconds. Windows grow while there are no changes.
SHORT, LONG = 0.5, 8.0
PER_WORKER = 4
# Changes after the first `QUICK` lengthen windows. With more workers, buffer `AHEAD` batches each.
QUICK, AHEAD = 3, 3
# A change is useless if it multiplies the rate by less than BETTER, and harmful if below WORSE.
BETTER, WORSE = 1.05, 0.95
# The limits are reset if the ratio of batch time to step time changes by this factor.
CHANGED = 1.5
UNLIMITED = 1 << 30


class Decision(NamedTuple):
    """A new size, and the reason for the change."""

    size: Size
    why: str


class Tuner:
    """Chooses the number of workers and the buffer size from windows of statistics.

    Advice is followed immediately, but the buffer never shrinks. A harmful change is reverted. A
    useless one is not repeated until the ratio of batch time to step time changes. The size
    therefore settles eventually.

    Parameters
    ----------
    auto : (bool, bool)
        Whether the number of workers and the buffer size may change.

    Attributes
    ----------
    span : float
        The minimum length of the next window in seconds.
    """

    def __init__(self, auto: tuple[bool, bool]) -> None:
        self._auto = auto
        self.span = SHORT
        self._changes = 0
        self._trial: tuple[Size, float] | None = None
        self._forget(0.0)

    def _forget(self, ratio: float) -> None:
        """Reset the limits for a new ratio of batch time to step time."""
        self._ratio = ratio
        self._enough = Size(UNLIMITED, UNLIMITED)

    def is_enough(self, window: Window) -> bool:
        """Return True if a window is long enough for a decision."""
        batches = max(ENOUGH_BATCHES, PER_WORKER * window.workers)
        return window.elapsed >= self.span and window.batches >= batches

    def look(self, window: Window, size: Size, most: Size) -> Decision | None:
        """Return a new size of at most `most`, or None.

        The `window` must start after the latest change, once all workers are ready.
        """
        decision = self._judge(window, size) or self._next(window, size, most)
        if decision is None:
            self.span = min(2 * self.span, LONG)
            return None
        self._changes += 1
        self.span = min(SHORT * (1 << max(0, self._changes - QUICK)), LONG)
        return decision

    def _judge(self, v: Window, size: Size) -> Decision | None:
        """Evaluate the latest change and revert it if it was harmful."""
        ratio = v.index / v.step if v.step > 0 else 1e9
        trial, self._trial = self._trial, None
        if trial is None:
            if not self._ratio / CHANGED <= ratio <= self._ratio * CHANGED:
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
            # The resize may have changed the ratio.
            self._ratio = ratio
            return None
        return Decision(
            size._replace(num_workers=workers),
            f"{before:.3g} batches/s with {workers} workers, {rate:.3g} with {now}",
        )

    def _next(self, v: Window, size: Size, most: Size) -> Decision | None:
        advice = advise(v)
        named: dict[str, int] = advice.change
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
        return Decision(Size(workers, buffer), advice.sentence)


def log_change(before: Size, after: Size, why: str) -> None:
    """Log a change in size."""
    changes = [
        f"{name} {old} → {new}"
        for name, old, new in zip(Size._fields, before, after, strict=True)
        if old != new
    ]
    log.info("%s: %s", ", ".join(changes), why)


class Controller:
    """Measures and resizes a pool, in the thread that consumes its batches.

    If a signal handler interrupts a call, the next call completes the work.
    """

    def __init__(self, pool: Any, auto: tuple[bool, bool]) -> None:
        self._pool = pool
        self._tuner = Tuner(auto)
        # Statistics at the start of the window, and the time of the next check (`now_ns`).
        self._window_start: Stats | None = None
        self._due_ns = 0
        self._resizing: Size | None = None

    def __call__(self) -> None:
        """Check the pool if a check is due."""
        if now_ns() < self._due_ns:
            return
        pool, tuner = self._pool, self._tuner
        if self._resizing is not None:
            self._resize(self._resizing)
        # Workers that are still starting would distort the measurements.
        if not pool.is_staffed:
            self._window_start = None
            return
        stats: Stats = pool.stats()
        if self._window_start is None:
            self._begin_window(stats)
            return
        window = stats.since(self._window_start).window()
        if not tuner.is_enough(window):
            return
        size: Size = pool.size
        decision = tuner.look(window, size, pool.most(stats))
        if decision is None:
            self._begin_window(stats)
            return
        self._window_start = None
        self._resize(decision.size)
        log_change(size, decision.size, decision.why)

    def _begin_window(self, stats: Stats) -> None:
        self._window_start = stats
        self._due_ns = now_ns() + int(self._tuner.span * 1e9)

    def _resize(self, size: Size) -> None:
        self._resizing = size
        self._pool.resize(*size)
        self._resizing = None
