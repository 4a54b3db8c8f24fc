"""What a running manager has done so far, and which side waits for the other."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cseq._core import now_ns

if TYPE_CHECKING:
    from cseq._core import Ring

__all__ = ["Clock", "Stats"]

# `Stats.bottleneck`; all parts are of the time that `elapsed` says
ENOUGH_BATCHES = 8  # to say anything
LITTLE = 0.1  # part of the time that the loop may wait without the workers' being the bottleneck
BOTH = 0.25  # part of the time that both sides must wait for their batches to be uneven
SHORT = 50e-6  # seconds a batch that the loop may wait, whatever part that is
ONE_CORE = (0.4, 1.3)  # cores that threads use which run in turns


@dataclass(frozen=True)
class Stats:
    """Counted since `start`, over all epochs.

    Times are of the epochs alone, from the first batch of the first one on: neither the start nor
    a pause between two epochs is in them.

    Attributes
    ----------
    batches, samples : int
        Finished and taken for the loop (test mode counts batches alone).
    nbytes : int
        Bytes of shared memory that those batches took.
    restarts : int
        Worker processes that were replaced.
    retries : int
        Batches that were made again after their worker had died.
    skips : int
        Batches left out because their indexer raised (``on_error='skip'``).
    copies : int
        Batches that were copied out of shared memory because too many were held.
    depths : (int, int, int)
        Tickets waiting at this moment for an indexer, for a converter, for the loop.
    loop_waited : float
        Seconds that the loop waited for batches.
    workers_waited, converters_waited : float
        Seconds that indexers waited for tickets, and converters for batches, summed over all of
        each.
    elapsed : float
        Seconds that epochs took: what `loop_waited` is a part of.
    start_waited : float
        Seconds that the loop waited for its first batch: start, imports, constructors.
    num_workers, num_converters : int
    computed : float or None
        Seconds that all threads of this process together computed, where workers are threads that
        share a GIL.
    """

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    restarts: int = 0
    retries: int = 0
    skips: int = 0
    copies: int = 0
    depths: tuple[int, int, int] = (0, 0, 0)
    loop_waited: float = 0.0
    workers_waited: float = 0.0
    converters_waited: float = 0.0
    elapsed: float = 0.0
    start_waited: float = 0.0
    num_workers: int = 0
    num_converters: int = 0
    computed: float | None = None

    @property
    def loop_waiting(self) -> float:
        """Part of the time that the loop waited, from 0 to 1."""
        return _part(self.loop_waited, self.elapsed)

    @property
    def workers_waiting(self) -> float:
        """Part of the time that an indexer waited, from 0 to 1, the mean of all of them."""
        return _part(self.workers_waited, self.elapsed * self.num_workers)

    @property
    def bottleneck(self) -> str:
        """What limits the rate of batches.

        Returns
        -------
        str
            ``'unknown'``: fewer than 8 batches were taken, or workers are not timed (test mode).
            ``'gil'``: worker threads are busy, but all threads of the process together compute on
            one core: use processes. ``'loop'``: the loop itself; it waited less than a tenth of the
            time, or a smaller part of it than the workers. ``'none'``: it waited more, but less
            than 50 µs for a batch, which is what handing it over takes. ``'workers'``: more
            workers, or a faster indexer, give more batches. ``'converters'``: indexers wait for
            them. ``'stragglers'``: the loop and the workers both wait, since single batches take
            much longer than others: a larger `buffer`, or ``ordered=False``.
        """
        if self.batches < ENOUGH_BATCHES or not self.num_workers or self.elapsed <= 0:
            return "unknown"
        loop, workers = self.loop_waiting, self.workers_waiting
        if workers < BOTH and self._runs_in_turns():
            return "gil"  # whatever the loop waited: it waits for the GIL, too
        if loop < LITTLE:
            return "loop"
        if self.loop_waited < SHORT * self.batches:
            return "none"
        converters = _part(self.converters_waited, self.elapsed * self.num_converters)
        if self.num_converters and workers >= BOTH > converters:
            return "converters"
        if min(loop, workers) >= BOTH:
            return "stragglers"
        return "loop" if loop < workers else "workers"

    def _runs_in_turns(self) -> bool:
        """Tell whether several threads that are busy compute on no more than one core."""
        if self.computed is None or self.num_workers < 2 or (os.cpu_count() or 1) < 2:
            return False
        least, most = ONE_CORE
        return least <= self.computed / self.elapsed <= most

    def __str__(self) -> str:
        waiting, middle, ready = self.depths
        return (
            f"{self.batches} batches, {self.samples} samples, {self.nbytes / 1e6:.1f} MB; "
            f"queues {waiting} in, {middle} middle, {ready} out; "
            f"first batch after {self.start_waited:.3f} s; of {self.elapsed:.3f} s since then the "
            f"loop waited {self.loop_waiting:.0%}, {self.num_workers} workers "
            f"{self.workers_waiting:.0%} (bottleneck: {self.bottleneck}); "
            f"{self.restarts} restarts, {self.retries} retries, {self.skips} skips, "
            f"{self.copies} copies"
        )


def _part(seconds: float, of: float) -> float:
    """Return a part in [0, 1]; 0 of nothing."""
    return min(seconds / of, 1.0) if of > 0 else 0.0


class Times(NamedTuple):
    """Seconds on the clocks of a ring, or between two readings of them."""

    elapsed: float
    waited: float  # the loop, for batches
    idle: tuple[float, ...]  # each runner
    computed: float  # all threads of this process

    def since(self, before: Times) -> Times:
        """Return what was added; a sleep that began before counts from there."""
        elapsed = self.elapsed - before.elapsed
        idle = zip(self.idle, before.idle, strict=True)
        return Times(
            elapsed,
            self.waited - before.waited,
            tuple(min(now - then, elapsed) for now, then in idle),
            self.computed - before.computed,
        )

    def plus(self, other: Times) -> Times:
        """Return the sum."""
        return Times(
            self.elapsed + other.elapsed,
            self.waited + other.waited,
            tuple(a + b for a, b in zip(self.idle, other.idle, strict=True)),
            self.computed + other.computed,
        )


class Clock:
    """Times of the epochs of some rings; it stops between two epochs.

    Reads clocks when an epoch begins and ends, and once for the first batch; none for the others.

    Attributes
    ----------
    starting : bool
        No batch was awaited yet.
    start_waited : float
        Seconds that the loop waited for the first one.
    """

    def __init__(self, *rings: Ring) -> None:
        self._rings = rings
        # What was summed up, and when it began to run (None: it is stopped). In one tuple, since
        # `read` may be called from other threads.
        runners = sum(len(ring.idle_ns()) for ring in rings)
        nothing = Times(0.0, 0.0, (0.0,) * runners, 0.0)
        self._state: tuple[Times, Times | None] = nothing, None
        self.starting = True
        self.start_waited = 0.0

    def run(self) -> None:
        """An epoch begins."""
        self._state = self.read(), self._now()

    def started(self) -> None:
        """The first batch that was awaited is there: what was waited until now was the start."""
        self.starting = False
        if sum(ring.taken_batches for ring in self._rings) > 1:
            return  # others came before it, without a wait
        now = self._now()
        self.start_waited = now.waited
        self._state = self._state[0], now

    def stop(self) -> None:
        """The epoch is over."""
        self._state = self.read(), None

    def read(self) -> Times:
        """Return the times of all epochs, and of the one that is not over."""
        total, before = self._state
        return total if before is None else total.plus(self._now().since(before))

    def _now(self) -> Times:
        """Read all clocks."""
        idle = tuple(ns / 1e9 for ring in self._rings for ns in ring.idle_ns())
        waited = sum(ring.waited_ns for ring in self._rings) / 1e9
        return Times(now_ns() / 1e9, waited, idle, time.process_time())
