"""A pool: a crew, its tickets, and the feed that connects them to the loop.

Only one thread at a time may call a pool. Other threads can wake that thread with `notify_all`.
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

# Minimum number of seconds between messages: at the end of an epoch, and during an epoch.
LONG, OFTEN = 20.0, 600.0
# Log advice as info or as a warning if the loop waits for at least this fraction of the time.
LOGGED, WARNED = 0.05, 0.2


class Pool(Generic[K]):
    """A crew, its tickets and its feed.

    The constructor starts nothing: a signal handler may raise before a `Run` can close the pool.

    Attributes
    ----------
    run : RunState
        The current generation, and the lock that callers of this pool must hold.
    takes_turns : bool
        Whether the workers are threads that share the GIL.
    logged_causes : set of str
        The causes of waiting that have been logged. All pools of a manager share this set.
    is_hurried : bool
        Whether `close` waits only `HURRY` seconds for a busy runner.
    """

    is_hurried = False
    controller: Controller | None = None

    def __init__(self, crew: Crew, tickets: K) -> None:
        self.crew, self.tickets = crew, tickets
        tickets.pool = self
        self.rings, self.lanes = crew.rings, crew.lanes
        self.make_next, self.on_cancel = crew.make_next, crew.on_cancel
        self.num_workers = crew.lanes.num_workers
        self.takes_turns = crew.lanes.kind == "thread" and HAS_GIL
        self.run = RunState()
        self._advised_stats, self._advised_ns = Stats(), now_ns()
        self.logged_causes: set[str] = set()
        self._has_waited, self._gpu_waits, self._gpu_dry = False, 0, 0
        self.feed = Feed(
            self.run,
            crew.rings,
            crew.reader.decoder(convert=crew.convert, leaf_for=crew.leaf_for),
            self,
            errors=tickets.errors,
            interrupted=tickets.interrupted,
        )
        self.feed.pool_number = crew.lanes.number
        self._history, self._skips = History(crew.rings), tickets.errors == "skip"
        crew.lanes.join_traces()

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the worker processes, or None."""
        return self.crew.supervisor

    def open(self) -> None:
        """Start the runners. If this call is interrupted, `close` stops them."""
        self.tickets.open()

    def notify_all(self) -> None:
        """Wake up a waiting call in another thread, which then checks the generation."""
        self.rings[0].notify_all()

    def close(self) -> None:
        """Stop the crew within a limited time. Can be called twice."""
        # There is no other thread to finish an inline crew's tickets.
        if self.crew.is_inline:
            self.lanes.leave_traces()
            self.feed.end()
        self.crew.close(hurried=self.is_hurried)
        self.tickets.close()

    def _check(self, awaited: Awaited | None) -> None:
        """Raise a worker's error, or handle an overdue ticket according to `on_timeout`."""
        crew, options = self.crew, self.tickets.options
        crew.check()
        if options.timeout is not None and crew.timed:
            is_restarted, working = options.on_timeout == "restart", self.tickets.working(awaited)
            crew.check_time(working, options.timeout, restart=is_restarted)

    # -- for the feed

    def decode(
        self,
        ring_number: int,
        cell: int,
        status: int,
        slot: int,
        capacity: int,
        record: tuple[int, ...],
    ) -> tuple[Any, BaseException | None]:
        """Decode a batch that the C code cannot handle."""
        crew = self.crew
        entry = cell + self.rings[ring_number].first_entry
        if status & RAISED:
            died = crew.died_of(ring_number, cell)
            return None, died or crew.reader.error(entry, slot, capacity, record)
        batch = crew.reader.decode(entry, slot, capacity, record)
        return batch if crew.convert is None else crew.convert(batch), None

    def describe(self, ring_number: int, cell: int, error: BaseException) -> tuple[Any, Any]:
        """Return the exception with a ticket's details added, and any entry for `skipped`."""
        return self.tickets.describe(ring_number, cell, error)

    def list_left(
        self, ring_number: int, cell: int, left: tuple[tuple[Any, str], ...]
    ) -> list[Any]:
        """Record the samples that are missing from a batch."""
        return self.tickets.list_left(ring_number, cell, left)

    def await_next(self) -> None:
        """Sleep until the next ticket is ready. Raises StopIteration at the end."""
        self.await_for(self.feed.generation, self._advance)
        if not self._has_waited:
            self._has_waited = True
        elif (idle := gpu_is_idle()) is not None:
            self._gpu_waits += 1
            self._gpu_dry += idle

    def look(self) -> None:
        """Record progress, log advice and resize the pool. Called about ten times a second."""
        self._history.note()
        if self.controller is not None:
            self.controller()
        self._advise(OFTEN)

    def _advance(self) -> bool | None:
        ready = self.feed.advance()
        if ready is None:
            self._advise(LONG)
            raise StopIteration
        return ready or None

    def _advise(self, seconds: float) -> None:
        """Log why the loop has been waiting, once per cause."""
        if now_ns() - self._advised_ns < seconds * 1e9 or os.environ.get("CSEQ_ADVICE") == "0":
            return
        before, self._advised_stats, self._advised_ns = self._advised_stats, self.stats(), now_ns()
        stats = self._advised_stats.since(before)
        if stats.elapsed < LONG or stats.loop_waiting < LOGGED:
            return
        advice = stats.advice()
        if advice.cause not in {"unknown", *self.logged_causes}:
            self.logged_causes.add(advice.cause)
            level = logging.WARNING if stats.loop_waiting >= WARNED else logging.INFO
            log.log(level, "%s (CSEQ_ADVICE=0 switches this off)", advice)

    def await_for(
        self, generation: int, look: Callable[[], T | None], awaited: Awaited | None = None
    ) -> T:
        """Sleep until `look` returns a result."""
        feed, began = self.feed, now_ns()
        self.tickets.note_wait()
        while True:
            notices = feed.notices()
            if self.run.generation != generation:
                raise InterruptedError
            self._check(awaited)
            if not self._has_waited and self.supervisor is not None:
                self.supervisor.check_start(began)
            result = look()
            if result is not None:
                return result
            feed.wait(notices, awaited)

    def stats(self) -> Stats:
        """Return the statistics, even if the feed no longer exists."""
        return self.crew.stats(
            past=self._history.rows,
            skips=self.feed.skips if self._skips else 0,
            num_workers=self.num_workers,
            num_converters=self.tickets.num_converters,
            threads=self.takes_turns,
            gpu_waits=self._gpu_waits,
            gpu_dry=self._gpu_dry,
        )
