"""What a running manager has done so far, and which side waits for the other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cseq._core import now_ns
from cseq.compute import cores

if TYPE_CHECKING:
    from cseq._core import Ring

__all__ = ["Clock", "Stats"]

# `Stats.bottleneck`; all parts are of the time that `elapsed` says
ENOUGH_BATCHES = 8  # for any other answer than 'unknown'
LITTLE = 0.1  # part of the time; if the loop waits less, the loop is the bottleneck
BOTH = 0.25  # part of the time; if both sides wait as much or more, batches are uneven
SHORT = 50e-6  # seconds a batch; if the loop waits less, nothing is the bottleneck
ONE_CORE = (0.4, 1.3)  # cores that busy threads use if only one of them runs at a time


@dataclass(frozen=True)
class Stats:
    """Counts and times of a manager since its start, over all epochs.

    Times are of the epochs alone, from the first batch of the first one on: neither the start nor
    a pause between two epochs is in them.

    Attributes
    ----------
    batches, samples : int
        Delivered to the loop (test mode counts batches and skips alone).
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
        Seconds that indexers waited for tickets, summed over all indexers, and converters for
        batches, summed over all converters.
    elapsed : float
        Seconds that epochs took: what `loop_waited` is a part of.
    start_waited : float
        Seconds that the loop waited for its first batch: start, imports, constructors.
    num_workers, num_converters : int
    computed : float or None
        Seconds that all threads of this process together computed, where workers are threads that
        share a GIL.
    agents : int
        Of a fleet: those that can be sent something at this moment.
    parcels, lost, hedged : int
        Parcels that were sent to agents; whose agents were lost; whose agents were late, so that
        others made them as well.
    received : int
        Bytes that agents have sent.
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
    agents: int = 0
    parcels: int = 0
    lost: int = 0
    hedged: int = 0
    received: int = 0

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
            ``'unknown'``: fewer than 8 batches were delivered, or it is test mode.
            ``'gil'``: worker threads are busy, but all threads of the process together compute on
            one core: use processes. ``'loop'``: the loop itself; it waited less than a tenth of the
            time, or a smaller part of it than the workers. ``'none'``: it waited more, but less
            than 50 µs for a batch, which is what handing it over takes. ``'workers'``: more
            workers, or a faster indexer, give more batches. ``'converters'``: indexers wait for
            them. ``'stragglers'``: the loop and the workers both wait, since single batches take
            much longer than others: a larger `buffer`, or ``ordered=False``, helps.
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
        if self.computed is None or self.num_workers < 2 or cores() < 2:
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
    """Seconds on the clocks of some rings."""

    elapsed: float
    waited: float  # the loop, for batches
    idle: tuple[float, ...]  # each runner
    computed: float  # CPU time of all threads of this process


class Pause(NamedTuple):
    """The pauses between epochs, summed: seconds that passed, and CPU seconds of this process."""

    elapsed: float
    computed: float


def _longer(pauses: Pause, since: Pause, now: Pause | Times) -> Pause:
    """Add a pause that began at `since`."""
    return Pause(
        pauses.elapsed + now.elapsed - since.elapsed,
        pauses.computed + now.computed - since.computed,
    )


class Clock:
    """Times of the epochs of some rings; the clock stops between two epochs.

    In such a pause no ticket is posted and every runner waits. So the beginning and the end of an
    epoch read one clock, and `read` subtracts the pauses from what all runners have waited.

    Parameters
    ----------
    *rings : Ring
    computing : bool
        Read the CPU time of this process, too.

    Attributes
    ----------
    starting : bool
        The loop has not waited for a batch yet.
    start_waited : float
        Seconds that the loop waited for its first batch.
    """

    def __init__(self, *rings: Ring, computing: bool = False) -> None:
        self._rings = rings
        self._process_time = time.process_time if computing else float
        self.starting = True
        self.start_waited = 0.0
        # Where counting began, the pauses since then, and when the present one began (None: an
        # epoch runs). In one tuple, since `read` may be called from other threads.
        self._state: tuple[Times, Pause, Pause | None]
        self._state = self._now(), Pause(0.0, 0.0), self._mark()

    def run(self) -> None:
        """An epoch begins."""
        zero, pauses, since = self._state
        if since is not None:
            self._state = zero, _longer(pauses, since, self._mark()), None

    def started(self) -> None:
        """The loop has waited for its first batch: the time waited until now was the start."""
        self.starting = False
        if sum(ring.taken_batches for ring in self._rings) > 1:
            return  # other batches came before it, without a wait
        now = self._now()
        self.start_waited = now.waited
        self._state = now, Pause(0.0, 0.0), None

    def stop(self) -> None:
        """The epoch is over."""
        zero, pauses, since = self._state
        if since is None:
            self._state = zero, pauses, self._mark()

    def read(self) -> Times:
        """Return the times of all epochs, up to now or to the end of the last one."""
        zero, pauses, since = self._state
        now = self._now()
        if since is not None:
            pauses = _longer(pauses, since, now)
        elapsed = now.elapsed - zero.elapsed - pauses.elapsed
        return Times(
            elapsed,
            now.waited - zero.waited,
            # a sleep that began before counts from there
            tuple(
                min(max(seconds - then - pauses.elapsed, 0.0), elapsed)
                for seconds, then in zip(now.idle, zero.idle, strict=True)
            ),
            now.computed - zero.computed - pauses.computed,
        )

    def _mark(self) -> Pause:
        """Read the clocks of a pause."""
        return Pause(now_ns() / 1e9, self._process_time())

    def _now(self) -> Times:
        """Read all clocks."""
        idle = tuple(ns / 1e9 for ring in self._rings for ns in ring.idle_ns())
        waited = sum(ring.waited_ns for ring in self._rings) / 1e9
        return Times(now_ns() / 1e9, waited, idle, self._process_time())
