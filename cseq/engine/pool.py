"""A pool: a crew, the tickets it works on, and the feed, the loop's end of both.

One thread calls a pool. Other threads report errors (a worker that cannot be made, or that died too
often) through `Crew.check`, which raises them in that thread, and wake it with `notify_all`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cseq._core import now_ns
from cseq._lock import RunState
from cseq._memory import HAS_GIL
from cseq.engine._feed import Feed
from cseq.measure.meters import History
from cseq.measure.stats import Stats
from cseq.stage import RAISED
from cseq.system import gpu_is_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.engine.crews.base import Crew
    from cseq.engine.tickets.base import Awaited, Tickets
    from cseq.engine.tuning import Controller
    from cseq.processes.supervisor import Supervisor

__all__ = ["Pool"]

T = TypeVar("T")
K = TypeVar("K", bound="Tickets")

log = logging.getLogger("cseq")

LONG = 20.0  # seconds that are looked at for a line in the log, at least: at an epoch's end
OFTEN = 600.0  # and in the middle of one
TOLD, WARNED = 0.05, 0.2  # parts of it that the loop waits, for a line and for a warning


class Pool(Generic[K]):
    """A crew, the tickets that it works on, and the feed.

    The constructor starts nothing: an exception of a signal handler may drop the pool before there
    is a `Run` to close it.

    Attributes
    ----------
    run : RunState
        The generation of what is under way, and the lock for the calls of this pool.
    num_workers : int
        At present.
    takes_turns : bool
        The workers are threads that share a GIL.
    controller : Controller or None
        Of 'auto'.
    told : set of str
        Causes that were logged; its owner has the same set for each of its pools.
    is_hurried : bool
        `close` waits no longer than `HURRY` seconds for a runner that is busy with a batch.
    """

    is_hurried = False
    controller: Controller | None = None

    def __init__(self, crew: Crew, tickets: K) -> None:
        self.crew, self.tickets = crew, tickets
        tickets.pool = self
        self.rings, self.lanes = crew.rings, crew.lanes
        self.make, self.on_cancel = crew.make, crew.on_cancel
        self.num_workers = crew.lanes.num_workers
        self.takes_turns = crew.lanes.kind == "thread" and HAS_GIL
        self.run = RunState()
        self._seen, self._looked = Stats(), now_ns()  # when a line was last considered
        self.told: set[str] = set()
        self._waited = False  # for the first batch
        self._gpu_waits = self._gpu_dry = 0
        self.feed = Feed(
            self.run,
            crew.rings,
            crew.reader.decoder(convert=crew.convert, leaf_for=crew.leaf_for),
            self,
            errors=tickets.errors,
            interrupted=tickets.interrupted,
        )
        self.feed.number = crew.lanes.number
        self._history, self._skips = History(crew.rings), tickets.errors == "skip"
        crew.lanes.begin()

    @property
    def supervisor(self) -> Supervisor | None:
        """The worker processes, if there are any."""
        return self.crew.supervisor

    def open(self) -> None:
        """Start the runners. If this raises, or a signal handler does, `close` ends them."""
        self.tickets.open()

    def notify_all(self) -> None:
        """Have a call that waits in another thread look at the run's generation."""
        self.rings[0].notify_all()

    def close(self) -> None:
        """End all that was started; returns within a bounded time. Calling it twice is fine."""
        if self.crew.is_inline:  # no other thread ends what lies in the ring
            self.lanes.end()
            self.feed.end()
        self.crew.close(hurried=self.is_hurried)
        self.tickets.close()

    def _check(self, awaited: Awaited | None) -> None:
        """Raise errors of workers and of other threads, also for tickets that take too long.

        `awaited`: the tickets that are waited for; None: those that the feed waits for. With
        on_timeout='restart', a worker is restarted instead.
        """
        crew, options = self.crew, self.tickets.options
        crew.check()
        if options.timeout is not None and crew.timed:
            is_restarted, working = options.on_timeout == "restart", self.tickets.working(awaited)
            crew.check_time(working, options.timeout, restart=is_restarted)

    # -- for the feed

    def decode(
        self, number: int, cell: int, status: int, slot: int, capacity: int, record: tuple[int, ...]
    ) -> tuple[Any, BaseException | None]:
        """Decode what C does not; see `Feed`."""
        crew = self.crew
        at = cell + self.rings[number].first
        if status & RAISED:
            died = crew.died_of(number, cell)
            return None, died or crew.reader.error(at, slot, capacity, record)
        batch = crew.reader.decode(at, slot, capacity, record)
        return batch if crew.convert is None else crew.convert(batch), None

    def describe(self, number: int, cell: int, error: Any) -> tuple[Any, Any]:
        """Name the ticket in an exception; return that, and the note."""
        return self.tickets.describe(number, cell, error)

    def list_left(self, number: int, cell: int, left: tuple[tuple[Any, str], ...]) -> list[Any]:
        """Note the samples that a batch lacks; return their entries."""
        return self.tickets.list_left(number, cell, left)

    def await_next(self) -> None:
        """Sleep until the next ticket is ready; StopIteration: no more come."""
        self.await_for(self.feed.generation, self._advance)
        if not self._waited:
            self._waited = True
        elif (idle := gpu_is_idle()) is not None:
            self._gpu_waits += 1
            self._gpu_dry += idle

    def look(self) -> None:
        """Note and tell how the run goes, and change its size, some ten times a second."""
        self._history.note()
        if self.controller is not None:
            self.controller()
        self._advise(OFTEN)

    def _advance(self) -> bool | None:
        """Post what can be posted; return whether the next ticket is ready."""
        ready = self.feed.advance()
        if ready is None:
            self._advise(LONG)
            raise StopIteration
        return ready or None

    def _advise(self, seconds: float) -> None:
        """Log why the loop has waited, if it has and the last look is so long ago, once a cause."""
        if now_ns() - self._looked < seconds * 1e9 or os.environ.get("CSEQ_ADVICE") == "0":
            return
        before, self._seen, self._looked = self._seen, self.stats(), now_ns()
        seen = self._seen.since(before)
        if seen.elapsed < LONG or seen.loop_waiting < TOLD:
            return
        advice = seen.advice()
        if advice.cause not in {"unknown", *self.told}:
            self.told.add(advice.cause)
            level = logging.WARNING if seen.loop_waiting >= WARNED else logging.INFO
            log.log(level, "%s (CSEQ_ADVICE=0 switches this off)", advice)

    def await_for(
        self, generation: int, look: Callable[[], T | None], awaited: Awaited | None = None
    ) -> T:
        """Sleep until `look` finds something.

        `awaited`: the tickets that are waited for, if not the feed's.
        """
        feed, began = self.feed, now_ns()
        self.tickets.note_wait()
        while True:
            seen = feed.notices()
            if self.run.generation != generation:
                raise InterruptedError
            self._check(awaited)
            if not self._waited and self.supervisor is not None:
                self.supervisor.check_start(began)
            found = look()
            if found is not None:
                return found
            feed.wait(seen, awaited)

    def stats(self) -> Stats:
        """Return counts and times of this pool so far; also when its feed was dropped."""
        return self.crew.stats(
            past=self._history.rows,
            skips=self.feed.skips if self._skips else 0,
            num_workers=self.num_workers,
            num_converters=self.tickets.num_converters,
            threads=self.takes_turns,
            gpu_waits=self._gpu_waits,
            gpu_dry=self._gpu_dry,
        )
