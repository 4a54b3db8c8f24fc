"""Items of workers, items of keys, calls of producers: the tickets of `Streams`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cseq._core import CALL, IN_REQUEST, ITEM, KEY, KEYS, now_ns, ring_bytes
from cseq.encoding import failure
from cseq.engine._streams import ItemSource, KeySource, Request
from cseq.engine.tickets.base import Tickets
from cseq.errors import RemoteTraceback
from cseq.indexing.producer import ItemTask
from cseq.processes.deaths import Deaths, Held
from cseq.stage import RAISED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cseq.engine._feed import Feed
    from cseq.engine.pool import Pool
    from cseq.engine.tickets.base import Awaited, Working
    from cseq.options import WorkerOptions

    Answer = tuple[int, int, int, tuple[int, ...]]  # see `Ring.peek`

__all__ = ["Items", "Naming"]

DEEPEST = 64  # the most tickets of one worker in flight, also if `prefetch` is larger
MOST_BYTES = 16 << 20  # of all cells, beyond what `prefetch` of each worker takes
KEY_ROOM = 512  # ints: a list of no more travels in its ticket, other keys are pickled
CALLS = 2  # cells for calls: one that was cancelled may still be worked on


class Naming(NamedTuple):
    """What messages call an item, and what it counts for.

    Attributes
    ----------
    unit : str
        What it is.
    lost : str
        What the log adds where it says that a worker was replaced.
    samples : callable, optional
        ``samples(key)`` is how many samples `stats` counts for the item of a key; None: one.
    interrupted : str
        What InterruptedError says where no epoch is under way.
    """

    unit: str = "item"
    lost: str = ""
    samples: Callable[[Any], int] | None = None
    interrupted: str = (
        "no epoch is under way: none was begun, or it was interrupted, or the streams were closed; "
        "call begin()"
    )


class Items(Tickets):
    """A ring for each worker; for one thread at a time, except `Pool.close`."""

    pool: Pool[Items]
    calls = CALLS
    runners = 1
    instead = "a thread cannot be replaced: what it makes comes late"

    def __init__(
        self,
        num_workers: int,
        options: WorkerOptions,
        *,
        prefetch: int,
        errors: Literal["raise", "return"],
        naming: Naming,
        fails: bool,
    ) -> None:
        self.options, self._naming, self._fails = options, naming, fails
        self.errors, self.interrupted = errors, naming.interrupted
        self._prefetch = prefetch
        self._depth = depth = min(prefetch, DEEPEST)
        # Besides items, a worker may hold one ticket that was cancelled.
        besides = 1 + CALLS
        # One worker may have all keys, unless the cells for them would take too much memory.
        self.words = words = KEYS + KEY_ROOM
        cell = ring_bytes(2, words, 1) - ring_bytes(1, words, 1)
        affordable = MOST_BYTES // (num_workers * cell) - besides
        self._most = max(depth, min(prefetch * num_workers, DEEPEST, affordable))
        self.rings = self.num_workers = num_workers
        self.cells = self._most + besides
        self.ahead = num_workers * (depth + besides)
        self._epoch = 0  # as tickets have it, where 0 is none; messages count epochs from 0
        self.assignments: list[Request] = []  # of the epoch that is under way
        self._begun = 0  # when the present wait began
        self._idle: dict[int, int] = {}  # since when a worker is ready and has claimed nothing

    def task(self, runner_number: int, *, forks: bool) -> ItemTask:  # noqa: ARG002
        """Return what a worker is to do."""
        return ItemTask(self.num_workers)

    def deaths(self) -> Deaths:
        """Make what decides on workers that die."""
        most, naming = self.options.max_restarts, self._naming
        advice = "look at what makes it"
        return Deaths(most, self.num_workers, naming.unit, advice, naming.lost, fails=self._fails)

    def feed_of(self, pool: Pool[Items]) -> Feed:
        """Return the feed, to which the pool then refers weakly; the rings are set up.

        What closes dropped `Streams` refers to the pool, and the feed to the iterator of keys,
        and so perhaps to the `Streams`.
        """
        for ring in pool.rings:
            # Waking a worker costs more than a small item does. It sleeps only when all items asked
            # for are ready, so it is woken when half of them are asked for again.
            ring.wake_at = (self._depth + 1) // 2
        feed = pool.feed
        pool.feed = weakref.proxy(feed)
        return feed

    def _write_key(self, key: Any, number: int) -> Request:
        return self.pool.crew.write(key, f"key {number} of epoch {self._epoch - 1}")

    # -- waiting

    def note_wait(self) -> None:
        """Note that the loop begins to wait: times are measured from here."""
        self._idle, self._begun = {}, now_ns()

    def working(self, awaited: Awaited | None) -> Working:
        """List what workers that are waited for work on, and since when: not before the wait."""
        found = []
        # Of each worker, the first.
        first = dict(reversed(self.pool.feed.awaited() if awaited is None else awaited))
        for number, cell in first.items():
            runner_number = number + 1
            working = self._held_by(number)
            if working or not self.pool.crew.is_ready(runner_number):
                self._idle.pop(runner_number, None)
            else:  # its process may be stopped
                since = self._idle.setdefault(runner_number, now_ns())
                working = [(runner_number, since, self.held(number, cell).location)]
            found += [
                (runner_number, max(since, self._begun), location)
                for runner_number, since, location in working
            ]
        return found

    def _held_by(self, number: int) -> Working:
        """Return what a worker works on, and since when (ns of `now_ns`)."""
        ring = self.pool.rings[number]
        held = [(cell, ring.holder(cell)[1]) for cell in ring.held(1)]
        return [
            (number + 1, since, self.held(number, cell).location) for cell, since in held if since
        ]

    def held(self, number: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the item, or the call, of the ticket in a cell; on any thread."""
        ring = self.pool.rings[number]
        (epoch, kind, _), start, key = ring.ticket(cell), ring.start(cell), None
        if kind == CALL:
            kept = ring.kept[cell]
            location = f"{kept[-1] if kept else 'a call'} in worker {number}"
        else:
            of_key = ""
            try:
                key = self._key(number, cell)
                of_key = "" if key is None else f" ({failure.listed(key, most)})"
            except (Exception, SystemExit) as error:  # the user's class; the item has a number, too
                if failure.ends_program(error):
                    raise
            location = f"{self._naming.unit} {start}{of_key} of worker {number}, epoch {epoch - 1}"
        items = key if isinstance(key, list) else [start if key is None else key]
        return Held(epoch - 1, start, items, location, kind == ITEM)

    def _key(self, number: int, cell: int) -> Any:
        """Return the key of the ticket in a cell; None: it has none."""
        words = self.pool.rings[number].indices(cell)
        count = int(words[KEY])
        if count >= 0:
            return words[KEYS : KEYS + count].tolist()
        return self.pool.crew.requested_key(number, cell) if count == IN_REQUEST else None

    def describe(self, number: int, cell: int, error: BaseException) -> tuple[BaseException, None]:
        """Name the item in an exception."""
        error = _signed(error, number)
        location = f"{self._naming.unit} {self.pool.rings[number].start(cell)} of worker {number}"
        named = failure.named(error, f"{location}, epoch {self._epoch - 1}")
        return named, None

    # -- the epoch

    def begin_epoch(
        self,
        assignments: Sequence[Any],
        keys: Iterator[Any] | None,
        generation: int,
        *,
        ordered: bool,
        free: bool,
        first: int,
    ) -> list[Any]:
        """Begin an epoch: post its tickets, start the workers; return the replies."""
        feed = self.pool.feed
        self._end()
        try:
            self.pool.crew.check()
            self.pool.crew.begin_epoch()
            self._epoch += 1
            requests = self._write_all(assignments)
            source: ItemSource | KeySource
            if keys is None:
                source = ItemSource(
                    self.pool.rings, self._epoch, requests, depth=self._depth, first=first
                )
            else:
                source = KeySource(
                    self.pool.rings,
                    self._epoch,
                    requests,
                    keys,
                    self._write_key,
                    depth=self._most,
                    first=first,
                    prefetch=self._prefetch,
                    in_order=ordered,
                    free=free,
                    samples=self._naming.samples,
                )
            feed.begin_epoch(source, ordered=ordered)
            self.assignments = requests
            posts = []
            if keys is None:
                name = f"the beginning of epoch {self._epoch - 1}"
                posts = [self.post_call(number, None, name) for number in range(self.num_workers)]
            feed.refill()
            source.finish()  # which raises what the iterator of keys has raised
            for ring in self.pool.rings:
                ring.wake()
            self.pool.crew.launch()
            replies = [self._reply(*post, generation) for post in posts]
            feed.check(generation)
        except BaseException as error:
            self._end()
            if isinstance(error, Exception):
                feed.check(generation)
            raise
        feed.generation = generation
        feed.run_clock()
        return replies

    def _write_all(self, assignments: Sequence[Any]) -> list[Request]:
        """Write the workers' assignments; an object given for several is written once."""
        written: dict[int, Request] = {}
        for assignment in assignments:
            if id(assignment) not in written:
                written[id(assignment)] = self.pool.crew.write(assignment, "assignment")
        return [written[id(assignment)] for assignment in assignments]

    def _end(self) -> None:
        """Cancel the epoch, and the calls that are under way."""
        self.assignments = []
        self.pool.feed.end()

    # -- calls

    def ask(
        self, method: str, args: tuple[Any, ...], workers: Sequence[int], *, behind: bool
    ) -> list[Any]:
        """Call a method in some workers. The next call cancels an interrupted one."""
        generation = self.pool.run.generation
        try:
            self.pool.crew.check()
            self.pool.crew.launch()
            for number in workers if behind else ():
                for cell, ticket in self.pool.feed.tickets(number)[-1:]:
                    self._await_answer(number, cell, ticket, generation)
            request = self.pool.crew.write((method, args), f"{method}'s arguments")
            name = f"a call of {method}()"
            posts = [self.post_call(number, request, name) for number in workers]
            del request  # it is freed with the last ticket that refers to it
            return [self._reply(*post, generation) for post in posts]
        except InterruptedError:
            self.pool.feed.check(generation)
            raise

    def post_call(self, number: int, request: Request | None, name: str) -> tuple[int, int, int]:
        """Post a call; return the worker, and cell and number of its ticket."""
        known = self.assignments
        epoch = (known[number], self._epoch) if known else ()
        return number, *self.pool.feed.post_call(number, request, name, *epoch)

    def _await_answer(self, number: int, cell: int, ticket: int, generation: int) -> Answer | None:
        """Sleep until a ticket is answered. None: it is not in the ring any more."""
        peek = self.pool.rings[number].peek
        answer: Any = self.pool.await_for(generation, lambda: peek(cell, ticket), [(number, cell)])
        return answer or None

    def _reply(self, number: int, cell: int, ticket: int, generation: int) -> Any:
        """Wait for the answer to a call, and take it out."""
        answer = self._await_answer(number, cell, ticket, generation)
        if answer is None:
            raise InterruptedError("a signal handler has made another call")
        at = cell + self.pool.rings[number].first
        if not answer[0] & RAISED:
            try:
                reply = self.pool.crew.reader.decode(at, *answer[1:])
            except SystemExit as ending:
                if failure.ends_program(ending):
                    raise
                raise failure.ordinary(ending) from ending
            self.pool.feed.commit_reply(number, cell, ticket)
            return reply
        error = self.pool.crew.reader.error(at, *answer[1:])
        location = self.held(number, cell).location
        self.pool.feed.commit_reply(number, cell, ticket, ends=True)
        try:
            error = failure.named(_signed(error, number), location)
            raise error
        finally:
            del error  # its traceback refers to this frame: a reference cycle


def _signed(error: BaseException, worker: int) -> BaseException:
    """Set the worker's number on the cause of its exception, if it was raised there."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        cause.worker = worker
    return error
