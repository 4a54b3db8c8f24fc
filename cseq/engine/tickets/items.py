"""Tickets for `Streams`: items, items for keys, and calls to producers."""

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

    Answer = tuple[int, int, int, tuple[int, ...]]

__all__ = ["Items", "Naming"]

# Maximum number of tickets per worker, and of bytes in all cells unless `prefetch` needs more.
DEEPEST, MOST_BYTES = 64, 16 << 20
# Lists of more than KEY_ROOM ints are pickled. One call and one cancelled call may be pending.
KEY_ROOM, CALLS = 512, 2


class Naming(NamedTuple):
    """The wording of messages about items, and a function that counts an item's samples.

    Attributes
    ----------
    unit : str
        A noun for an item.
    lost : str
        Text to log when a worker is replaced.
    samples : callable, optional
        ``samples(key)`` returns the number of samples in an item (default 1), for `stats`.
    interrupted : str
        The message of the InterruptedError if no epoch is in progress.
    """

    unit: str = "item"
    lost: str = ""
    samples: Callable[[Any], int] | None = None
    interrupted: str = (
        "no epoch is in progress: none was begun, the last one was interrupted, or the streams "
        "were closed; call begin()"
    )


class Items(Tickets):
    """Tickets in one queue per worker. Only `Pool.close` is thread-safe."""

    pool: Pool[Items]
    calls = CALLS
    runners = 1
    instead = "a thread cannot be replaced, so its items will be late"

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
        # Extra cells: for a cancelled ticket that the worker may still hold, and for calls.
        besides = 1 + CALLS
        # If memory permits, a single worker may hold all keys in flight.
        self.words = words = KEYS + KEY_ROOM
        cell = ring_bytes(2, words, 1) - ring_bytes(1, words, 1)
        affordable = MOST_BYTES // (num_workers * cell) - besides
        self._most = max(depth, min(prefetch * num_workers, DEEPEST, affordable))
        self.rings = self.num_workers = num_workers
        self.cells = self._most + besides
        self.ahead = num_workers * (depth + besides)
        # `_epoch` is 0 before the first epoch. `_idle` says when each runner was first seen idle.
        self._epoch = self._wait_began = 0
        self._idle: dict[int, int] = {}
        self.assignments: list[Request] = []

    def task(self, runner_number: int, *, forks: bool) -> ItemTask:  # noqa: ARG002
        """Return a worker's task."""
        return ItemTask(self.num_workers)

    def deaths(self) -> Deaths:
        """Create the `Deaths` that decides whether a dead worker is replaced."""
        most, naming = self.options.max_restarts, self._naming
        advice = "check the code that makes it"
        return Deaths(most, self.num_workers, naming.unit, advice, naming.lost, fails=self._fails)

    def feed_of(self, pool: Pool[Items]) -> Feed:
        """Set up the rings and return the feed.

        The pool keeps only a weak reference to the feed. Otherwise, the `Streams` finalizer would
        keep the `Streams` alive through the pool, the feed and the key iterator.
        """
        for ring in pool.rings:
            # Waking up a worker costs more than making a small item, so wait until half of
            # the items are consumed.
            ring.wake_at = (self._depth + 1) // 2
        feed = pool.feed
        pool.feed = weakref.proxy(feed)
        return feed

    def _write_key(self, key: object, number: int) -> Request:
        return self.pool.crew.write(key, f"key {number} of epoch {self._epoch - 1}")

    # -- waiting

    def note_wait(self) -> None:
        """Record that the loop has started to wait."""
        self._idle, self._wait_began = {}, now_ns()

    def working(self, awaited: Awaited | None) -> Working:
        """List what the awaited workers have been doing since the wait started."""
        everything = []
        first = dict(reversed(self.pool.feed.awaited() if awaited is None else awaited))
        for worker, cell in first.items():
            runner_number = worker + 1
            working = self._held_by(worker)
            if working or not self.pool.crew.is_ready(runner_number):
                self._idle.pop(runner_number, None)
            # If a ready worker has no ticket, its process may be suspended.
            else:
                since = self._idle.setdefault(runner_number, now_ns())
                working = [(runner_number, since, self.held(worker, cell).location)]
            everything += [(k, max(since, self._wait_began), text) for k, since, text in working]
        return everything

    def _held_by(self, worker: int) -> Working:
        ring = self.pool.rings[worker]
        held = [(cell, ring.holder(cell)[1]) for cell in ring.held(1)]
        return [
            (worker + 1, since, self.held(worker, cell).location) for cell, since in held if since
        ]

    def held(self, worker: int, cell: int, most: int = failure.MOST) -> Held:
        """Describe the item or call in a cell. Thread-safe."""
        ring = self.pool.rings[worker]
        (epoch, kind, _), start, key = ring.ticket(cell), ring.start(cell), None
        if kind == CALL:
            kept = ring.kept[cell]
            location = f"{kept[-1] if kept else 'a call'} in worker {worker}"
        else:
            of_key = ""
            try:
                key = self._key(worker, cell)
                of_key = "" if key is None else f" ({failure.listed(key, most)})"
            except (Exception, SystemExit) as error:
                if failure.ends_program(error):
                    raise
            location = f"{self._naming.unit} {start}{of_key} of worker {worker}, epoch {epoch - 1}"
        items = key if isinstance(key, list) else [start if key is None else key]
        return Held(epoch - 1, start, items, location, kind == ITEM)

    def _key(self, worker: int, cell: int) -> Any:
        """Return the key of the ticket in a cell, if it has one."""
        words = self.pool.rings[worker].indices(cell)
        count = int(words[KEY])
        if count >= 0:
            return words[KEYS : KEYS + count].tolist()
        return self.pool.crew.requested_key(worker, cell) if count == IN_REQUEST else None

    def describe(self, worker: int, cell: int, error: BaseException) -> tuple[BaseException, None]:
        """Add the item's details to an exception."""
        error = _signed(error, worker)
        location = f"{self._naming.unit} {self.pool.rings[worker].start(cell)} of worker {worker}"
        named = failure.named(error, f"{location}, epoch {self._epoch - 1}")
        return named, None

    # -- the epoch

    def begin_epoch(
        self,
        assignments: Sequence[object],
        keys: Iterator[object] | None,
        generation: int,
        *,
        ordered: bool,
        free: bool,
        first: int,
    ) -> list[Any]:
        """Start an epoch and return the workers' replies."""
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
                posts = [self.post_call(worker, None, name) for worker in range(self.num_workers)]
            feed.refill()
            # Re-raise an exception from the key iterator.
            source.finish()
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

    def _write_all(self, assignments: Sequence[object]) -> list[Request]:
        """Write the assignments. An object that several workers share is written only once."""
        written: dict[int, Request] = {}
        for assignment in assignments:
            if id(assignment) not in written:
                written[id(assignment)] = self.pool.crew.write(assignment, "assignment")
        return [written[id(assignment)] for assignment in assignments]

    def _end(self) -> None:
        self.assignments = []
        self.pool.feed.end()

    # -- calls

    def ask(
        self, method: str, args: tuple[object, ...], workers: Sequence[int], *, behind: bool
    ) -> list[Any]:
        """Call a method in the given workers. An interrupted call is cancelled by the next."""
        generation = self.pool.run.generation
        try:
            self.pool.crew.check()
            self.pool.crew.launch()
            for worker in workers if behind else ():
                for cell, ticket in self.pool.feed.tickets(worker)[-1:]:
                    self._await_answer(worker, cell, ticket, generation)
            request = self.pool.crew.write((method, args), f"{method}'s arguments")
            name = f"a call of {method}()"
            posts = [self.post_call(worker, request, name) for worker in workers]
            # The last ticket that refers to the request frees its slot.
            del request
            return [self._reply(*post, generation) for post in posts]
        except InterruptedError:
            self.pool.feed.check(generation)
            raise

    def post_call(self, worker: int, request: Request | None, name: str) -> tuple[int, int, int]:
        """Post a call. Return the worker, and the ticket's cell and number."""
        assignments = self.assignments
        epoch = (assignments[worker], self._epoch) if assignments else ()
        return worker, *self.pool.feed.post_call(worker, request, name, *epoch)

    def _await_answer(self, worker: int, cell: int, ticket: int, generation: int) -> Answer | None:
        """Sleep until a ticket is answered. Return None if it is gone."""
        peek = self.pool.rings[worker].peek
        answer: Any = self.pool.await_for(generation, lambda: peek(cell, ticket), [(worker, cell)])
        return answer or None

    def _reply(self, worker: int, cell: int, ticket: int, generation: int) -> object:
        answer = self._await_answer(worker, cell, ticket, generation)
        if answer is None:
            raise InterruptedError("a signal handler cancelled this call by making another one")
        entry = cell + self.pool.rings[worker].first_entry
        if not answer[0] & RAISED:
            try:
                reply = self.pool.crew.reader.decode(entry, *answer[1:])
            except SystemExit as ending:
                if failure.ends_program(ending):
                    raise
                raise failure.ordinary(ending) from ending
            self.pool.feed.commit_reply(worker, cell, ticket)
            return reply
        error = self.pool.crew.reader.error(entry, *answer[1:])
        location = self.held(worker, cell).location
        self.pool.feed.commit_reply(worker, cell, ticket, ends=True)
        try:
            error = failure.named(_signed(error, worker), location)
            raise error
        # The traceback refers to this frame, so break the cycle.
        finally:
            del error


def _signed(error: BaseException, worker: int) -> BaseException:
    """Add the worker's number to an exception."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        cause.worker = worker
    return error
