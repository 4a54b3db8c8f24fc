"""A stream of items from each worker process, each in its own order.

Worker w of N makes its own items. The trainer asks for them ahead, by tickets on a ring for each
worker. The tickets of a worker that dies run again in its replacement. See docs/inside/streams.md.

::

    trainer                                             worker w
      Streams.begin(assignments) ── request in a slot ─► producer.begin(assignment)
              ask(method, …)     ── request in a slot ─► producer.method(…)
              next(w)            ◄── slots ───────────── producer.items(start)
      begin(assignments, keys)   ── cell, or request ──► producer.make(key)

In an epoch of *keys*, these name the items: the trainer draws keys from an iterator, `prefetch` for
each worker at first, then one for each item that it returns.
"""

from __future__ import annotations

import contextlib
import reprlib
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cseq._core import now_ns, ring_bytes
from cseq._feed import FeedIterator, ItemFailure
from cseq._memory import Mapping
from cseq._slots import Lease
from cseq._source import (
    BEGIN,
    CALL,
    CALLED,
    IN_REQUEST,
    ITEM,
    KEY,
    KEYS,
    ItemSource,
    KeySource,
    Request,
)
from cseq.check import MOST_WORKERS, choice, count, flag, modules, seconds
from cseq.encoding import codec, failure
from cseq.encoding.pickling import Pickled, dump, dumps
from cseq.encoding.transport import SlotReader
from cseq.errors import RemoteTraceback
from cseq.indexing.producer import ENTRY, EncodedItem, KeyProducer, Producer, Task
from cseq.memory.memory_limit import memory_limit_of
from cseq.memory.shared import Shared
from cseq.memory.writer import Writer
from cseq.pools.base import Pool
from cseq.processes.deaths import Deaths, Held
from cseq.processes.launcher import make_launcher, start_methods
from cseq.processes.supervisor import Supervisor
from cseq.run import Run, close_with
from cseq.stage import RAISED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from cseq._feed import Feed
    from cseq.encoding.transport import Ends
    from cseq.memory.segment import Segment
    from cseq.pools.base import Awaited, Working
    from cseq.processes.launcher import Child
    from cseq.stats import Stats

    Answer = tuple[int, int, int, tuple[int, ...]]  # see `Ring.peek`
    T = TypeVar("T")

__all__ = ["EncodedItem", "ItemFailure", "KeyProducer", "Producer", "Streams"]

DEEPEST = 64  # the most tickets of one worker in flight, also if `prefetch` is larger
MOST_BYTES = 16 << 20  # of all cells, beyond what `prefetch` of each worker takes
MOST_AHEAD = 2**62  # items
MOST_KEY = 2**24  # ints
CALLS = 2  # cells for calls: one that was given up may still be worked on


class Streams:
    """Streams of items from worker processes, made ahead of the loop.

    Parameters
    ----------
    producer : callable
        ``producer(number, num_workers)`` makes a worker's `Producer`, in its process. It travels
        there as the workers of `MPSequence` do: by value if it cannot be imported.
    num_workers : int
    prefetch : int
        The most items of a worker that are asked for, being made, or waiting. In an epoch of keys:
        how many keys for each worker are drawn ahead of the items that were taken.
    key_size : int
        A key that is a list of at most so many ints travels in the ticket; other keys are pickled.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How processes are started; None: forkserver where it exists.
    max_restarts : int
        Worker processes that may die and be replaced in an epoch.
    timeout : float, optional
        Seconds that an item, or a call, may take before `on_timeout`. A worker may take ten
        times as long to get ready.
    timed_from : 'item' or 'wait'
        When these seconds begin: when the worker begins the item, or, if that is later, when a call
        begins to wait for it. With 'wait', a call after a `WorkerTimeout` waits as long again.
    on_timeout : 'raise' or 'restart'
        Raise `WorkerTimeout`, or replace the worker, which tries again.
    memory_limit : int, str or None
        Most shared memory that held items may occupy; beyond it, items are copied. See `MSequence`.
    threads, preload
        See `MSequence`.
    encoded : bool
        Items come out as `EncodedItem`, for another process to decode; see `segment`.
    errors : 'raise' or 'return'
        Raise exceptions in place of items, or return an `ItemFailure` there, which has the
        ``error`` and the number of the ``worker``.
    unit : str
        What messages call an item.
    show : callable, optional
        ``show(key)`` is what messages and errors have for a key, if not the key itself.
    lost : str
        What the log adds where it says that a worker was replaced.
    launch : 'now' or 'begin'
        When workers are started: by the constructor; or by the first `ask`, or the first `begin`
        once it has posted what they have to do. A forked worker then makes its first items while
        others are forked; what the iterator of keys has changed here, it has changed in theirs.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or `producer` cannot be pickled.

    Notes
    -----
    What starts the workers does not wait for them: an exception of `producer` is raised by the
    first call that waits for them. An item is encoded before the next one is asked of the producer,
    so the producer may reuse its buffers. An item stays intact as long as there are references to a
    part of it.

    An exception takes the place of its item; its ``__cause__`` shows the worker's traceback and has
    the worker's number (``worker``). That of `Producer.items` also ends the worker's stream until
    the next `begin`; that of a key's item, or of an item that cannot be pickled or decoded, ends
    nothing.

    A worker that has died is replaced: the new process begins the epoch from the same assignment
    and goes on from the first item that was not received (`Producer.items`). Changes that `ask` has
    made in the dead worker are lost.

    If a signal handler raises (Ctrl-C) in `next`, no item has been taken, and the next call returns
    it. If one raises in `begin`, no epoch is under way. In the middle of a call, a handler can
    neither take items nor begin an epoch: RuntimeError.

    Methods are for one thread at a time; `interrupt` and `close` are for any.
    """

    def __init__(
        self,
        producer: Callable[[int, int], Producer | KeyProducer],
        num_workers: int,
        *,
        prefetch: int = 10,
        key_size: int = 512,
        start_method: str | None = None,
        max_restarts: int = 100,
        timeout: float | None = None,
        timed_from: Literal["item", "wait"] = "item",
        on_timeout: str = "raise",
        memory_limit: int | str | None = None,
        threads: int | None = 1,
        preload: Sequence[str] | Literal[False] | None = None,
        encoded: bool = False,
        errors: Literal["raise", "return"] = "raise",
        unit: str = "item",
        show: Callable[[Any], Any] | None = None,
        lost: str = "",
        launch: Literal["now", "begin"] = "now",
    ) -> None:
        if not callable(producer):
            raise TypeError(
                f"producer={producer!r} cannot be called; give producer(number, num_workers)"
            )
        early = choice("launch", launch, ("now", "begin")) == "now"
        preload = modules("preload", preload)
        pool = StreamPool(
            count("num_workers", num_workers, most=MOST_WORKERS),
            prefetch=count("prefetch", prefetch, most=MOST_AHEAD),
            key_size=count("key_size", key_size, least=0, most=MOST_KEY),
            start_method=choice("start_method", start_method, (None, *start_methods())),
            max_restarts=count("max_restarts", max_restarts, least=0),
            timeout=seconds("timeout", timeout),
            patient=choice("timed_from", timed_from, ("item", "wait")) == "wait",
            restart=choice("on_timeout", on_timeout, ("raise", "restart")) == "restart",
            memory_limit=memory_limit_of(memory_limit),
            threads=None if threads is None else count("threads", threads),
            encoded=flag("encoded", encoded),
            errors=choice("errors", errors, ("raise", "return")),
            unit=unit,
            show=show,
            lost=lost,
        )
        self._run = Run(pool)
        self._feed = pool.give_feed()
        self._finalizer = close_with(self, self._run)
        try:
            pool.supervisor.prepare(
                producer, name="producer", preload=preload, timeout=pool.timeout
            )
            if early:
                pool.supervisor.launch()
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._run.pool.num_workers

    @property
    def segment(self) -> tuple[int, int]:
        """Where encoded items lie: the descriptor of the slots' file, and the bytes of a slot.

        While there are references to an item's memory here, another process that has the file finds
        it there: ``item.memory.nbytes`` bytes from the beginning of slot ``item.slot`` on.
        """
        segment = self._run.pool.segment
        return segment.fd, segment.width

    def begin(
        self,
        assignments: Sequence[Any],
        keys: Iterator[Any] | None = None,
        *,
        ordered: bool = True,
        assign: Literal["turn", "free"] = "turn",
        first: int = 0,
    ) -> list[Any]:
        """Begin an epoch in every worker; what is left of an earlier one is dropped.

        Items are asked for ahead from here on.

        Parameters
        ----------
        assignments : sequence
            The argument of each worker's ``begin``, one for each worker: of any size, pickled.
        keys : iterator, optional
            The items are ``producer.make(key)`` of these, instead of ``producer.items(start)``. A
            key is anything that can be pickled. `prefetch` keys for each worker are drawn here, and
            exactly one more for each item that is returned or raised, before it is. The iterator
            runs in the thread that calls. Its exception is raised here, or once, after the items of
            the keys before, and ends the epoch.
        ordered : bool
            False: items come as they get ready; of several that are ready, the oldest first.
        assign : 'turn' or 'free'
            'turn': keys go to the workers in turn; with ``ordered=False``, to the next one that has
            fewer than `prefetch` keys whose items were not taken. 'free': only the keys that are
            drawn here, later ones go to the worker that has the fewest keys to work on.
        first : int
            The worker whose turn is the first, also of those that ``iter`` takes items from.

        Returns
        -------
        list
            The replies of the workers' ``begin``, in the order of the workers. With `keys` empty:
            no reply is awaited, and an exception of ``begin`` is raised in place of an item.

        Raises
        ------
        TypeError, ValueError
            An argument is wrong, or something cannot be pickled.
        OSError
            The streams are closed, or belong to the process that forked this one.
        BaseException
            An exception of the iterator of keys, or of a producer's ``begin``.
        """
        if len(assignments) != self.num_workers:
            raise ValueError(
                f"{len(assignments)} assignments for {self.num_workers} workers; give one for each"
            )
        free = choice("assign", assign, ("turn", "free")) == "free"
        ordered = flag("ordered", ordered)
        first = count("first", first, least=0, most=self.num_workers - 1)
        if keys is not None and not hasattr(keys, "__next__"):
            raise TypeError(f"keys={keys!r} is no iterator; give iter(...) of it")
        run = self._ours()
        run.lock.refuse_mine()
        generation = run.interrupt()
        with run.lock.hold():
            return run.pool.begin(
                assignments, keys, generation, ordered=ordered, free=free, first=first
            )

    def ask(self, method: str, *args: Any, worker: int | None = None, behind: bool = False) -> Any:
        """Call a method of the producers, and wait for the replies.

        The call comes before items that were asked for and whose ticket the worker has not begun.

        Parameters
        ----------
        method : str
            Its name.
        *args : object
            Pickled.
        worker : int, optional
            The number of the worker to ask; None: all of them.
        behind : bool
            Call when all items that were asked for are made. A worker that has answered makes no
            item until one is taken.

        Returns
        -------
        object or list
            The worker's reply; or those of all workers, in their order.

        Raises
        ------
        IndexError
            There is no such worker.
        OSError
            The streams are closed, or belong to the process that forked this one.
        Exception
            What the method raised; the worker's stream is then over (but not an epoch of keys).
        """
        run = self._ours()
        all_of_them = range(self.num_workers)
        with run.lock.hold():
            if worker is None:
                return run.pool.ask(method, args, all_of_them, behind=behind)
            if not 0 <= worker < self.num_workers:
                raise IndexError(f"worker={worker} is not one of {self.num_workers}")
            return run.pool.ask(method, args, [worker], behind=behind)[0]

    @property
    def next(self) -> Callable[[int], Any]:
        """Return the next item of a worker's stream: ``next(worker)``; see `Feed.next`.

        Not in an epoch of keys.
        """
        return self._feed.next

    @property
    def glance(self) -> Callable[[], Any]:
        """Return what is next in an ordered epoch of keys, if it is ready; else None.

        It stays next: no key is drawn. See `Feed.glance`.
        """
        return self._feed.glance

    @property
    def peek(self) -> Callable[[], tuple[int, Any]]:
        """Return the number of the next item in the epoch, and the item; see `Feed.peek`.

        `peek` and `commit` together are ``next`` for callers that keep a record of items. `peek`
        returns the same item and number, also after an interrupt (Ctrl-C), until `commit` has been
        called with that number; so what is recorded in between must be the same when it is recorded
        twice. An exception has a number, too; `peek` raises and removes it.
        """
        return self._feed.peek

    @property
    def commit(self) -> Callable[[int], None]:
        """Remove the item that `peek` has returned with this number; see `Feed.commit_item`."""
        return self._feed.commit_item

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the epoch: one item of each worker in turn, or the items of the keys.

        Workers that have no more items are left out. With ``ordered=False``: items that are ready.
        """
        self._feed.check(self._feed.generation)
        return FeedIterator(self._feed, self._feed.generation, self)

    def interrupt(self) -> None:
        """End the epoch: it gives no more items; a call that waits raises InterruptedError."""
        self._run.interrupt()

    def close(self) -> None:
        """Stop the workers; returns within a bounded time. Calling it twice is fine."""
        self._run.close()
        self._finalizer.detach()  # not before: if `close` is interrupted, it can be called again

    def stats(self) -> Stats:
        """Return counts and times so far: a batch is an item, and so is a sample."""
        return self._run.pool.stats()

    def pids(self) -> list[int | None]:
        """Process ids of the workers, in their order; None for one that is just being started."""
        return self._run.pool.pids()

    def processes(self, *, wait: bool = False) -> dict[int, Child]:
        """Latest process of each worker, by the worker's number; it may have ended.

        Always the same dict, into which a process is put when it is started: who holds it knows the
        processes also when the streams are gone. With `wait`, all are started on return, unless the
        streams end meanwhile.
        """
        supervisor = self._run.pool.supervisor
        if wait and self._run.is_ours:
            supervisor.await_launch()
        return supervisor.processes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ours(self) -> Run[StreamPool]:
        """Return the run, if it can be used here."""
        if not self._run.is_ours:
            raise OSError("these streams belong to the process that forked this one; make new ones")
        if not self._finalizer.alive:
            raise OSError("these streams were closed; make new ones")
        return self._run


class StreamPool(Pool):
    """The pool of `Streams`; for one thread at a time, except `interrupt` and `close`."""

    supervisor: Supervisor

    def __init__(
        self,
        num_workers: int,
        *,
        prefetch: int,
        key_size: int,
        start_method: str | None,
        max_restarts: int,
        timeout: float | None,
        patient: bool,
        restart: bool,
        memory_limit: int,
        threads: int | None,
        encoded: bool,
        errors: Literal["raise", "return"],
        unit: str,
        show: Callable[[Any], Any] | None,
        lost: str,
    ) -> None:
        self._unit, self._show = unit, show
        self.timeout, self._patient, self._restart = timeout, patient, restart
        self._prefetch = prefetch
        self._depth = depth = min(prefetch, DEEPEST)
        # Besides items, a worker may hold a BEGIN and one ticket that was given up.
        besides = 2 + CALLS
        # One worker may have all keys, unless the cells for them would take too much memory.
        room = KEYS + key_size
        cell = ring_bytes(2, room, 1) - ring_bytes(1, room, 1)
        affordable = MOST_BYTES // (num_workers * cell) - besides
        self._most = max(depth, min(prefetch * num_workers, DEEPEST, affordable))
        self._shared = shared = Shared(
            self._most + besides,
            room,
            1,
            owners=num_workers,
            memory_limit=memory_limit,
            rings=num_workers,
            calls=CALLS,
            tickets=num_workers * (depth + besides),
        )
        self.supervisor = Supervisor(
            make_launcher(start_method, entry=ENTRY, threads=threads),
            shared,
            readers=num_workers,
            task=lambda _: Task(num_workers),
            describe=self._describe_held,
            deaths=Deaths(max_restarts, num_workers, unit, "look at what makes it", lost),
        )
        self._arena = shared.arena
        self._slots = SlotReader(self._arena)
        super().__init__(
            shared.rings,
            EncodedReader(self._arena) if encoded else self._slots,
            errors=errors,
            num_workers=num_workers,
            interrupted="no epoch is under way: none was begun, or it was interrupted; "
            "call begin()",
        )
        for ring in self.rings:
            # Waking a worker costs more than a small item does. It sleeps only when all items asked
            # for are ready, so it is woken when half of them are asked for again.
            ring.wake_at = (depth + 1) // 2
        self._writers: list[Writer] = []  # that nothing is written with
        self._epoch = 0  # as tickets have it, where 0 is none; messages count epochs from 0
        self.assignments: list[Request] = []  # of the epoch that is under way
        self._begun = 0  # when the present wait began
        self._idle: dict[int, int] = {}  # since when a worker is ready and has claimed nothing

    def give_feed(self) -> Feed:
        """Return the feed, to which this pool then refers weakly.

        What closes dropped `Streams` refers to the pool, and the feed to the iterator of keys,
        and so perhaps to the `Streams`.
        """
        feed = self.feed
        self.feed = weakref.proxy(feed)
        return feed

    @property
    def segment(self) -> Segment:
        """The file of the slots."""
        return self._arena.segment

    # -- requests

    def _write(self, value: Any, name: str) -> Request:
        """Write something for a worker into a slot.

        A signal handler may do the same meanwhile, with another writer.
        """
        pickled = self._pickle(value, name)
        request = Request(self._arena.slots)
        segment = self._arena.segment
        writer = self._writers.pop() if self._writers else Writer(segment.fd, segment.width)
        writer.select(request.slot, self._arena.request(request.slot))
        record = codec.encode_pickled(pickled, writer)
        request.locate(writer.capacity, record)
        self._writers.append(writer)
        return request

    def _pickle(self, value: Any, name: str) -> Pickled:
        """Pickle something for a worker; one that was forked from this process has its classes."""
        if self.supervisor.takes_objects:
            with contextlib.suppress(Exception):  # `dump` raises it again, and explains it
                buffers: list[memoryview] = []
                return Pickled(dumps([value], buffers), buffers)
        return dump(value, name=name)

    def _write_key(self, key: Any, number: int) -> Request:
        """Write a key into a slot; TypeError if it cannot be pickled."""
        return self._write(key, f"key {number} of epoch {self._epoch - 1}")

    # -- waiting

    def _await(
        self, generation: int, look: Callable[[], T | None], awaited: Awaited | None = None
    ) -> T:
        """Sleep until `look` finds something; times are measured from here on."""
        self._idle, self._begun = {}, now_ns() if self._patient else 0
        return super()._await(generation, look, awaited)

    def _check(self, awaited: Awaited | None) -> None:
        """Raise errors of workers; raise or restart for what takes too long."""
        self.supervisor.check()
        if self.timeout is not None:
            first = dict(reversed(self.feed.awaited() if awaited is None else awaited))
            working = self._awaited(first)
            self.supervisor.check_time(working, self.timeout, restart=self._restart)

    def _awaited(self, awaited: dict[int, int]) -> Working:
        """Return what some workers work on, and since when (ns), but not before the wait began.

        `awaited`: by worker, the cell of the ticket that is waited for.
        """
        found = []
        for number, cell in awaited.items():
            owner = number + 1
            working = self._working(number)
            if working or not self.supervisor.is_ready(owner):
                self._idle.pop(owner, None)
            else:  # its process may be stopped
                since = self._idle.setdefault(owner, now_ns())
                working = [(owner, since, self._place(number, cell))]
            found += [(owner, max(since, self._begun), place) for owner, since, place in working]
        return found

    def _working(self, number: int) -> Working:
        """Return what a worker works on, and since when (ns of `now_ns`)."""
        ring = self.rings[number]
        held = [(cell, ring.holder(cell)[1]) for cell in ring.held(1)]
        return [(number + 1, since, self._place(number, cell)) for cell, since in held if since]

    def _place(self, number: int, cell: int) -> str:
        """Name the item, or the call, of the ticket in a cell."""
        return self._named_by(number, cell, self._key(number, cell))

    def _named_by(self, number: int, cell: int, key: Any) -> str:
        """Name the item of a key, or the call, of the ticket in a cell."""
        epoch, kind, _ = self.rings[number].ticket(cell)
        if kind == BEGIN:
            return f"the beginning of epoch {epoch - 1} in worker {number}"
        if kind == CALL:
            kept = self.rings[number].kept[cell]
            return f"{kept[-1] if kept else 'a call'} in worker {number}"
        named = f"{self._unit} {self.rings[number].start(cell)}"
        of_key = "" if key is None else f" ({reprlib.repr(key)})"
        return f"{named}{of_key} of worker {number}, epoch {epoch - 1}"

    def _key(self, number: int, cell: int) -> Any:
        """Return the key of the ticket in a cell, as it is shown; None: it has none, or unknown."""
        ring = self.rings[number]
        if ring.ticket(cell)[1] != ITEM:
            return None
        words = ring.indices(cell)
        count = int(words[KEY])
        if count >= 0:
            key = words[KEYS : KEYS + count].tolist()
        elif count == IN_REQUEST:
            slot, capacity, *record = words[CALLED].tolist()
            # Not by the arena, whose lock the loop's thread may have.
            memory = Mapping(self.segment.fd, slot * self.segment.width, capacity, own=True)
            try:
                key = codec.decode(memory, record)
            except Exception:  # noqa: BLE001 - the user's class; the item has a number, too
                return None
        else:
            return None
        return key if self._show is None else self._show(key)

    def _describe_held(self, owner: int, cell: int) -> Held:
        """Describe the ticket in a cell that a dead worker held, on the supervisor's thread."""
        number = owner - 1
        epoch, _, count = self.rings[number].ticket(cell)
        start = self.rings[number].start(cell)
        try:
            key = self._key(number, cell)
            place = self._named_by(number, cell, key)
        except BaseException:  # noqa: BLE001 - the user's class must not end this thread
            key, place = None, self._named_by(number, cell, None)
        items = list(range(start, start + count))
        if key is not None:
            items = key if isinstance(key, list) else [key]
        return Held(epoch - 1, start, items, place)

    def _describe(self, number: int, cell: int, error: BaseException) -> tuple[BaseException, str]:
        """Name the item in an exception; say why a worker's items have ended, if they have."""
        error = _signed(error, number)
        place = f"{self._unit} {self.rings[number].start(cell)} of worker {number}"
        named = failure.named(error, f"{place}, epoch {self._epoch - 1}")
        return named, _ended_by(error, number)

    # -- the epoch

    def begin(
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
        feed = self.feed
        self._end()
        try:
            self.supervisor.check()
            self.supervisor.deaths.begin()
            self._arena.tidy()
            self._epoch += 1
            requests = self._write_all(assignments)
            source: ItemSource | KeySource
            if keys is None:
                source = ItemSource(
                    self.rings, self._epoch, requests, depth=self._depth, first=first
                )
            else:
                source = KeySource(
                    self.rings,
                    self._epoch,
                    requests,
                    keys,
                    self._write_key,
                    depth=self._most,
                    first=first,
                    prefetch=self._prefetch,
                    in_order=ordered,
                    free=free,
                )
            feed.begin(source, ordered=ordered)
            self.assignments = requests
            feed.refill()
            source.open()
            for ring in self.rings:
                ring.wake()
            self.supervisor.launch()
            replies = []
            if keys is None:
                begun = [(k, *feed.tickets(k)[0]) for k in range(self.num_workers)]
                replies = [self._reply(*post, generation) for post in begun]
            self.check(generation)
        except BaseException as error:
            self._end()
            if isinstance(error, Exception):
                self.check(generation)
            raise
        feed.generation = generation
        self.clock.run()
        return replies

    def _write_all(self, assignments: Sequence[Any]) -> list[Request]:
        """Write the workers' assignments; an object given for several is written once."""
        written: dict[int, Request] = {}
        for assignment in assignments:
            if id(assignment) not in written:
                written[id(assignment)] = self._write(assignment, "assignment")
        return [written[id(assignment)] for assignment in assignments]

    def _end(self) -> None:
        """Give up the epoch, and the calls that are under way."""
        self.assignments = []
        self.feed.end()

    def check(self, generation: int) -> None:
        """Raise InterruptedError if another generation has begun."""
        if self.run.generation != generation:
            raise InterruptedError(
                "the epoch was interrupted, or the streams were closed"
            ) from None

    # -- calls

    def ask(
        self, method: str, args: tuple[Any, ...], workers: Sequence[int], *, behind: bool
    ) -> list[Any]:
        """Call a method in some workers. A call that is interrupted is given up by the next one."""
        generation = self.run.generation
        try:
            self.supervisor.check()
            self.supervisor.launch()
            for number in workers if behind else ():
                for cell, ticket in self.feed.tickets(number)[-1:]:
                    self._await_answer(number, cell, ticket, generation)
            request = self._write((method, args), f"{method}'s arguments")
            posts = [(number, *self._post_call(number, request, method)) for number in workers]
            del request  # it is freed with the last ticket that refers to it
            return [self._reply(*post, generation) for post in posts]
        except InterruptedError:
            self.check(generation)
            raise

    def _post_call(self, number: int, request: Request, method: str) -> tuple[int, int]:
        """Post a call; return cell and number of its ticket."""
        name, known = f"a call of {method}()", self.assignments
        if known:
            return self.feed.post_call(number, request, name, known[number], self._epoch)
        return self.feed.post_call(number, request, name)

    def _await_answer(self, number: int, cell: int, ticket: int, generation: int) -> Answer | None:
        """Sleep until a ticket is answered. None: it is not in the ring any more."""
        peek = self.rings[number].peek
        answer: Any = self._await(generation, lambda: peek(cell, ticket), [(number, cell)])
        return answer or None

    def _reply(self, number: int, cell: int, ticket: int, generation: int) -> Any:
        """Wait for the answer to a call, and take it out."""
        answer = self._await_answer(number, cell, ticket, generation)
        if answer is None:
            raise InterruptedError("a signal handler has made another call")
        if not answer[0] & RAISED:
            reply = self._slots.decode(cell, *answer[1:])
            self.feed.dismiss(number, cell, ticket)
            return reply
        error = self._slots.error(cell, *answer[1:])
        place = self._place(number, cell)
        self.feed.dismiss(number, cell, ticket, _ended_by(error, number))
        try:
            failure.deliver(_signed(error, number), place)
        finally:
            del error  # its traceback refers to this frame: a reference cycle

    # -- the rest

    def stats(self) -> Stats:
        """Return counts and times of this pool so far."""
        deaths = self.supervisor.deaths
        return replace(
            super().stats(),
            restarts=deaths.restarts,
            retries=deaths.retries,
            copies=self._arena.copies,
        )

    def pids(self) -> list[int | None]:
        """Process ids of the workers."""
        return [self.supervisor.pid(number + 1) for number in range(self.num_workers)]

    def close(self) -> None:
        """End the workers and free the memory; returns within a bounded time."""
        self.supervisor.close()
        for writer in self._writers:
            writer.close()
        self._shared.close()


class EncodedReader(SlotReader):
    """Leaves items as the workers have encoded them."""

    @property
    def ends(self) -> Ends:
        """The slots; nothing is decoded in C."""
        return {"slots": self._arena.slots}

    def decode(self, cell: int, slot: int, capacity: int, record: tuple[int, ...]) -> Any:  # noqa: ARG002
        """Return the item as it lies in its slot, or a copy."""
        lent = self._arena.lend(slot, codec.used(record), capacity)
        return EncodedItem(lent, record, slot if type(lent) is Lease else -1)


def _signed(error: BaseException, worker: int) -> BaseException:
    """Set the worker's number on the cause of its exception, if it was raised there."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        cause.worker = worker
    return error


def _ended_by(error: BaseException, worker: int) -> str:
    """Return a text that says what has ended a worker's stream."""
    text = failure.str_of(error)
    return f"an exception has ended the stream of worker {worker} ({type(error).__name__}: {text})"
