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
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cseq import codec, failure
from cseq._core import now_ns, ring_bytes, wait_any
from cseq._lock import RunState
from cseq._memory import SMALL, Mapping
from cseq._slots import Lease
from cseq._stream import (
    CALLED,
    ENDED,
    IN_REQUEST,
    ITEM,
    KEY,
    KEYS,
    ItemFailure,
    ItemIterator,
    ItemReader,
    Request,
    StreamConsumer,
)
from cseq.check import MOST_WORKERS, choice, count, flag, modules, seconds
from cseq.deaths import Deaths, Held
from cseq.errors import RemoteTraceback
from cseq.launcher import make_launcher, start_methods
from cseq.memory_limit import memory_limit_of
from cseq.pickling import Pickled, dump, dumps
from cseq.producer import ENTRY, EncodedItem, KeyProducer, Producer, Task
from cseq.run import Run, close_with
from cseq.shared import Shared
from cseq.stage import RAISED
from cseq.stats import Clock, Stats
from cseq.supervisor import Supervisor
from cseq.transport import SlotReader
from cseq.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from cseq.launcher import Child
    from cseq.segment import Segment

    Post = tuple[int, int]  # cell and number of a ticket
    Answer = tuple[int, int, int, int, int, tuple[int, ...]]  # see `StreamConsumer.peek`

__all__ = ["EncodedItem", "ItemFailure", "KeyProducer", "Producer", "Streams"]

DEEPEST = 64  # the most tickets of one worker in flight, also if `prefetch` is larger
MOST_BYTES = 16 << 20  # of all cells, beyond what `prefetch` of each worker takes
MOST_AHEAD = 2**62  # items
MOST_KEY = 2**24  # ints
CALLS = 2  # cells for calls: one that was given up may still be worked on
NEVER = 2**32 - 1


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
            unit=unit,
            show=show,
            lost=lost,
        )
        self._run = Run(pool)
        self._reader = ItemReader(
            pool.run,
            pool.consumers,
            pool.write_key,
            pool.await_any,
            pool.clock.stop,
            depth=pool.depth,
            raises=choice("errors", errors, ("raise", "return")) == "raise",
        )
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
        run, reader = self._ours(), self._reader
        run.lock.refuse_mine()
        generation = run.interrupt()
        with run.lock.hold():
            reader.end()
            post = partial(reader.begin, keys, ordered=ordered, free=free, first=first)
            try:
                replies = run.pool.begin(assignments, post, generation, keyed=keys is not None)
                run.pool.check(generation)
            except BaseException as error:
                reader.end()
                if isinstance(error, Exception):
                    run.pool.check(generation)
                raise
            reader.open(generation)
            return replies

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
        """Return the next item of a worker's stream: ``next(worker)``; see `ItemReader.next`.

        Not in an epoch of keys.
        """
        return self._reader.next

    @property
    def glance(self) -> Callable[[], Any]:
        """Return what is next in an ordered epoch of keys, if it is ready; else None.

        It stays next: no key is drawn. See `ItemReader.glance`.
        """
        return self._reader.glance

    @property
    def peek(self) -> Callable[[], tuple[int, Any]]:
        """Return the number of the next item in the epoch, and the item; see `ItemReader.peek`.

        `peek` and `commit` together are ``next`` for callers that keep a record of items. `peek`
        returns the same item and number, also after an interrupt (Ctrl-C), until `commit` has been
        called with that number; so what is recorded in between must be the same when it is recorded
        twice. An exception has a number, too; `peek` raises and removes it.
        """
        return self._reader.peek

    @property
    def commit(self) -> Callable[[int], None]:
        """Remove the item that `peek` has returned with this number; see `ItemReader.commit`."""
        return self._reader.commit

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the epoch: one item of each worker in turn, or the items of the keys.

        Workers that have no more items are left out. With ``ordered=False``: items that are ready.
        """
        return ItemIterator(self._reader, self)

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


class StreamPool:
    """The pool of `Streams`; for one thread at a time, except `interrupt` and `close`."""

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
        unit: str,
        show: Callable[[Any], Any] | None,
        lost: str,
    ) -> None:
        self.num_workers = num_workers
        self._encoded = encoded
        self._unit, self._show = unit, show
        self.timeout, self._patient, self._restart = timeout, patient, restart
        depth = min(prefetch, DEEPEST)
        # Besides items, a worker may hold a BEGIN and one ticket that was given up.
        besides = 2 + CALLS
        # One worker may have all keys, unless the cells for them would take too much memory.
        room = KEYS + key_size
        cell = ring_bytes(2, room, 1) - ring_bytes(1, room, 1)
        affordable = MOST_BYTES // (num_workers * cell) - besides
        self.depth = max(depth, min(prefetch * num_workers, DEEPEST, affordable))
        self._shared = shared = Shared(
            self.depth + besides,
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
            describe=self._describe,
            deaths=Deaths(max_restarts, num_workers, unit, "look at what makes it", lost),
        )
        self._arena = arena = shared.arena
        self._slots = SlotReader(arena)
        self._writers: list[Writer] = []  # that nothing is written with
        self.consumers = [
            StreamConsumer(
                ring,
                arena.slots,
                self._read,
                number=number,
                prefetch=prefetch,
                depth=depth,
                small=None if encoded else (arena.mapped, codec.reader, SMALL),
            )
            for number, ring in enumerate(shared.rings)
        ]
        for ring in shared.rings:
            ring.wake_at = NEVER  # see `StreamConsumer.request`
        self._epoch = 0  # as tickets have it, where 0 is none; messages count epochs from 0
        self.run = RunState()
        self._generation = -1  # of the present epoch
        self.clock = Clock(*shared.rings)

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

    def write_key(self, key: Any, number: int) -> Request:
        """Write a key into a slot; TypeError if it cannot be pickled."""
        return self._write(key, f"key {number} of epoch {self._epoch - 1}")

    # -- waiting

    def _await(
        self, waiting: Sequence[tuple[StreamConsumer, Post]], generation: int
    ) -> Answer | None:
        """Sleep until one of some tickets of different workers is answered; peek at the answer.

        None: a ticket is not in the ring any more, since a signal handler has made a call.
        """
        ring = waiting[0][0].ring  # the trainer sleeps at one gate for all of them
        idle: dict[int, int] = {}
        begun = now_ns() if self._patient else 0
        while True:
            seen = ring.notices()
            self.check(generation)
            for consumer, post in waiting:
                answer = consumer.peek(*post)
                if answer is not None or not consumer.holds(*post):
                    return answer
            self.supervisor.check()
            if self.timeout is not None:
                working = self._awaited(waiting, idle, begun)
                self.supervisor.check_time(working, self.timeout, restart=self._restart)
            for each in self.consumers:
                each.wake()
            rings = [consumer.ring for consumer, _ in waiting]
            wait_any(rings, [cell for _, (cell, _) in waiting], seen)

    def await_any(self, consumers: Sequence[StreamConsumer]) -> None:
        """Sleep until the oldest ticket of one of some workers is answered."""
        waiting = [(consumer, consumer.oldest() or (0, 0)) for consumer in consumers]
        self._await(waiting, self._generation)

    def _awaited(
        self, waiting: Sequence[tuple[StreamConsumer, Post]], idle: dict[int, int], begun: int
    ) -> list[tuple[int, int, str]]:
        """Return what some workers work on, and since when (ns), but not before `begun`.

        `idle`: since when a worker is ready and has claimed nothing: its process may be stopped.
        """
        awaited = []
        for consumer, (cell, _) in waiting:
            owner = consumer.number + 1
            working = self._working(consumer)
            if working or not self.supervisor.is_ready(owner):
                idle.pop(owner, None)
            else:
                since = idle.setdefault(owner, now_ns())
                working = [(owner, since, self._place(consumer, cell))]
            awaited += [(owner, max(since, begun), place) for owner, since, place in working]
        return awaited

    def _working(self, consumer: StreamConsumer) -> list[tuple[int, int, str]]:
        """Return what a worker works on, and since when (ns of `now_ns`)."""
        working = []
        for cell in consumer.ring.held(1):
            claimed = consumer.ring.holder(cell)[1]
            if claimed:
                working.append((consumer.number + 1, claimed, self._place(consumer, cell)))
        return working

    def _place(self, consumer: StreamConsumer, cell: int) -> str:
        """Name the item, or the call, of the ticket in a cell."""
        return self._named_by(consumer, cell, self._key(consumer, cell))

    def _named_by(self, consumer: StreamConsumer, cell: int, key: Any) -> str:
        """Name the item of a key, or the call, of the ticket in a cell."""
        epoch, kind, _ = consumer.ring.ticket(cell)
        if kind != ITEM:
            return f"{consumer.names[cell]} in worker {consumer.number}"
        named = f"{self._unit} {consumer.ring.start(cell)}"
        of_key = "" if key is None else f" ({reprlib.repr(key)})"
        return f"{named}{of_key} of worker {consumer.number}, epoch {epoch - 1}"

    def _key(self, consumer: StreamConsumer, cell: int) -> Any:
        """Return the key of the ticket in a cell, as it is shown; None: it has none, or unknown."""
        if consumer.ring.ticket(cell)[1] != ITEM:
            return None
        words = consumer.ring.indices(cell)
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

    def _describe(self, owner: int, cell: int) -> Held:
        """Describe the ticket in a cell that a dead worker held, on the supervisor's thread."""
        consumer = self.consumers[owner - 1]
        epoch, _, count = consumer.ring.ticket(cell)
        start = consumer.ring.start(cell)
        try:
            key = self._key(consumer, cell)
            place = self._named_by(consumer, cell, key)
        except BaseException:  # noqa: BLE001 - the user's class must not end this thread
            key, place = None, self._named_by(consumer, cell, None)
        items = list(range(start, start + count))
        if key is not None:
            items = key if isinstance(key, list) else [key]
        return Held(epoch - 1, start, items, place)

    # -- items

    def _read(self, consumer: StreamConsumer) -> tuple[Any, str, bool, int] | None:
        """Wait for the oldest ticket and decode its item; it stays in the ring."""
        answer = self._await([(consumer, consumer.oldest() or (0, 0))], self._generation)
        if answer is None:
            return None
        if self.clock.starting:
            self.clock.started()
        _, cell, status, _, _, record = answer
        ended = bool(consumer.ring.indices(cell)[ENDED])
        if ended and status != RAISED:
            return None, "", True, 0
        item, failed, number = self._decode(*answer[1:]), "", consumer.number
        if type(item) is ItemFailure:
            error = _signed(item.error, number)
            failed = _ended_by(error, number) if ended else ""
            place = f"{self._unit} {consumer.ring.start(cell)} of worker {number}"
            item = ItemFailure(failure.named(error, f"{place}, epoch {self._epoch - 1}"), number)
        return item, failed, ended, codec.used(record)

    def _decode(
        self, cell: int, status: int, slot: int, capacity: int, record: tuple[int, ...]
    ) -> Any:
        """Decode a ticket's item."""
        if status == RAISED:
            return ItemFailure(self._slots.error(cell, slot, capacity, record))
        if self._encoded:
            lent = self._arena.lend(slot, codec.used(record), capacity)
            return EncodedItem(lent, record, slot if type(lent) is Lease else -1)
        try:
            return self._slots.decode(cell, slot, capacity, record)
        except MemoryError:
            raise  # the next attempt may find more memory
        except Exception as error:  # noqa: BLE001 - of the user's class; takes the item's place
            return ItemFailure(error)

    # -- calls

    def begin(
        self, assignments: Sequence[Any], post: Callable[[], None], generation: int, *, keyed: bool
    ) -> list[Any]:
        """Begin an epoch, call `post` once that is posted to all workers; return the replies."""
        self._end()
        self.supervisor.check()
        self.supervisor.deaths.begin()
        self._arena.tidy()
        self._epoch += 1
        name = f"the beginning of epoch {self._epoch - 1}"
        try:
            requests = self._write_all(assignments)
            begun = [
                (consumer, consumer.begin(self._epoch, request, name, keyed))
                for consumer, request in zip(self.consumers, requests, strict=True)
            ]
            post()
            self.supervisor.launch()
            replies = [self._reply(consumer, at, generation) for consumer, at in begun if at]
        except BaseException:
            self._end()
            raise
        self._generation = generation
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
        """Give up all tickets."""
        for consumer in self.consumers:
            consumer.end()

    def ask(
        self, method: str, args: tuple[Any, ...], workers: Sequence[int], *, behind: bool
    ) -> list[Any]:
        """Call a method in some workers. A call that is interrupted is given up by the next one."""
        generation = self.run.generation
        self.supervisor.check()
        self.supervisor.launch()
        consumers = [self.consumers[number] for number in workers]
        if behind:
            for consumer in consumers:
                newest = consumer.newest()
                if newest is not None:
                    self._await([(consumer, newest)], generation)
        request = self._write((method, args), f"{method}'s arguments")
        name = f"a call of {method}()"
        posts = [(consumer, consumer.call(request, name)) for consumer in consumers]
        del request  # it is freed with the last ticket that refers to it
        return [self._reply(*post, generation) for post in posts]

    def _reply(self, consumer: StreamConsumer, post: Post, generation: int) -> Any:
        """Wait for the answer to a call."""
        answer = self._await([(consumer, post)], generation)
        if answer is None:
            raise InterruptedError("a signal handler has made another call")
        token, cell, status, slot, capacity, record = answer
        if status != RAISED:
            reply = self._slots.decode(cell, slot, capacity, record)
            consumer.take_reply(cell, token, "")
            return reply
        error = self._slots.error(cell, slot, capacity, record)
        place = self._place(consumer, cell)
        consumer.take_reply(cell, token, _ended_by(error, consumer.number))
        try:
            failure.deliver(_signed(error, consumer.number), place)
        finally:
            del error  # its traceback refers to this frame: a reference cycle

    # -- the rest

    def check(self, generation: int) -> None:
        """Raise InterruptedError if another generation has begun."""
        if self.run.generation != generation:
            raise InterruptedError(
                "the epoch was interrupted, or the streams were closed"
            ) from None

    def notify_all(self) -> None:
        """Have calls that wait in other threads look at the generation."""
        self._shared.notify_all()

    def stats(self) -> Stats:
        """Return counts and times of this pool so far."""
        times = self.clock.read()
        deaths, consumers, rings = self.supervisor.deaths, self.consumers, self._shared.rings
        posted, middle, ready = zip(*(ring.depths() for ring in rings), strict=True)
        return Stats(
            batches=sum(consumer.items for consumer in consumers),
            samples=sum(consumer.items for consumer in consumers),
            nbytes=sum(consumer.nbytes for consumer in consumers),
            restarts=deaths.restarts,
            retries=deaths.retries,
            copies=self._arena.copies,
            depths=(sum(posted), sum(middle), sum(ready)),
            start_waited=self.clock.start_waited,
            loop_waited=times.waited,
            workers_waited=sum(times.idle),
            elapsed=times.elapsed,
            num_workers=len(consumers),
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
