"""A stream of items from each worker process, every one in its own order.

Worker w of N makes its own items. The trainer asks for them ahead, by tickets that are pinned to w,
on the same ring and in the same slots as everything else; so a dead worker's tickets run again in
the one that takes its place, and nobody sees a difference.

::

    trainer                                            worker w
      Streams.begin(assignments) ── letter in a slot ─► producer.begin(assignment)
              ask(method, …)     ── letter in a slot ─► producer.method(…)
              next(w)            ◄── slots ──────────── producer.items(start)
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq import codec, failure, payload
from cseq._core import Lease, now_ns
from cseq.arena import Writer, memory_limit_of
from cseq.check import choice, count, seconds
from cseq.edge import SlotReader
from cseq.launcher import start_methods
from cseq.producer import (
    ASSIGNED,
    BEGIN,
    BROKEN,
    CALL,
    CALLED,
    ENDED,
    ENTRY,
    ITEMS,
    MOST,
    SINCE,
    Parcel,
    Producer,
    Task,
    parse,
)
from cseq.run import Run
from cseq.staff import Deaths, Held, Staff
from cseq.stage import RAISED
from cseq.stats import Clock, Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from cseq._core import Memory
    from cseq.arena import Segment

    Taken = tuple[int, int, int, int, tuple[int, ...]]

__all__ = ["Parcel", "Producer", "Streams"]

MOST_WORKERS = 2**15 - 1
DEEPEST = 64  # tickets of one worker in flight, however many items may be asked for ahead
TICKET_BYTES = 1 << 16  # what a ticket of several items should take at most
TICKET_NS = 5_000_000  # and how long it should
TICKETS = 1 << 40  # numbers of tickets
AHEAD = 1 << 38  # how far a call's number lies before those of items, which it overtakes
NEVER = 2**32 - 1


class Streams:
    """Items from worker processes, from each in its own order, asked for ahead.

    Parameters
    ----------
    producer : callable
        ``producer(number, num_workers)`` makes a worker's `Producer`, in its process. It travels
        there as the workers of `MPSequence` do: by value if it cannot be imported.
    num_workers : int
    prefetch : int
        The most items of a worker that are made ahead of what was taken from it.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How processes are started; None: forkserver where it exists.
    max_restarts : int
        Worker processes that may die and be replaced in an epoch.
    timeout : float, optional
        Seconds that an item, or a call, may take before `on_timeout`. A worker may take ten
        times as long to get ready.
    on_timeout : 'raise' or 'restart'
        Raise `WorkerTimeout`, or replace the worker and let it try again.
    memory_limit : int, str or None
        Most shared memory that items in the user's hands may hold ('2GiB'; None: a quarter of the
        machine's or the container's); beyond it, items are copied out of it.
    preload : sequence of str
        Modules that a fork server imports, so that its workers have them at once.
    sealed : bool
        Items come out as `Parcel`, for another process to open; see `segment`.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or `producer` cannot be pickled.

    Notes
    -----
    The workers are started at once and not waited for: what `producer` raises comes out of the
    first call that waits for them. An item is laid down before the next one is asked of the
    producer, so that one may reuse what it has given away. Small and quick items cross several at a
    time. What comes out of a slot stays intact for as long as anybody has a part of it.

    An exception of a producer comes out of the call that waits for it, as itself; its
    ``__cause__`` shows the worker's traceback and has the worker's number (``worker``). That
    worker's stream is over then until the next `begin`.

    A worker that has died is replaced: the new process begins the epoch from the same assignment
    and goes on from the first item that has not come out (`Producer.items`). Whatever `ask` may
    have changed in the dead one is lost.

    Where a signal handler raises (Ctrl-C) in the middle of `next` or `ask`, the next call goes on
    with the first item that was not on its way out; in that of `begin`, an epoch is to be begun.

    One thread at a time gets in; `interrupt` and `close` may be called from any.
    """

    def __init__(
        self,
        producer: Callable[[int, int], Producer],
        num_workers: int,
        *,
        prefetch: int = 10,
        start_method: str | None = None,
        max_restarts: int = 100,
        timeout: float | None = None,
        on_timeout: str = "raise",
        memory_limit: int | str | None = None,
        preload: Sequence[str] = (),
        sealed: bool = False,
    ) -> None:
        if not callable(producer):
            raise TypeError(
                f"producer={producer!r} cannot be called; give producer(number, num_workers)"
            )
        pool = StreamPool(
            producer,
            count("num_workers", num_workers, most=MOST_WORKERS),
            prefetch=count("prefetch", prefetch),
            start_method=choice("start_method", start_method, (None, *start_methods())),
            max_restarts=count("max_restarts", max_restarts, least=0),
            timeout=seconds("timeout", timeout),
            restart=choice("on_timeout", on_timeout, ("raise", "restart")) == "restart",
            memory_limit=memory_limit_of(memory_limit),
            preload=preload,
            sealed=sealed,
        )
        self._run = Run(pool)
        self._present = -1  # the run's generation in which an epoch was begun
        self._finalizer = weakref.finalize(self, Run.close, self._run)
        try:
            pool.open()
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._run.pool.num_workers

    @property
    def segment(self) -> tuple[int, int]:
        """Where parcels lie: the descriptor of the slots' file, and the bytes from one to the next.

        Another process that has the file finds a parcel there for as long as somebody here has its
        memory: ``parcel.memory.nbytes`` bytes from slot number ``parcel.slot`` on.
        """
        segment = self._run.pool.segment
        return segment.fd, segment.width

    def begin(self, assignments: Sequence[Any]) -> list[Any]:
        """Begin an epoch in every worker; what is left of an earlier one is dropped.

        Items are asked for ahead from here on.

        Parameters
        ----------
        assignments : sequence
            What each worker's ``begin`` is called with, of any size; by value if need be.

        Returns
        -------
        list
            What they returned, in the order of the workers.

        Raises
        ------
        OSError
            The streams are closed, or belong to the process that forked this one.
        """
        if len(assignments) != self.num_workers:
            raise ValueError(
                f"{len(assignments)} assignments for {self.num_workers} workers; give one for each"
            )
        run = self._ours()
        run.interrupt()
        with run.turn:
            self._present, present = -1, run.present
            replies = run.pool.begin(assignments)
            self._present = present
            return replies

    def ask(self, method: str, *args: Any, worker: int | None = None, behind: bool = False) -> Any:
        """Call a method of the producers, between two items.

        It overtakes the items that were asked for and are not yet being made.

        Parameters
        ----------
        method : str
        *args : object
        worker : int, optional
            The one to ask; None: all of them.
        behind : bool
            Overtake nothing: a worker that has answered makes no item until one is taken.

        Returns
        -------
        object or list
            What it returned; from all of them, in the order of the workers.
        """
        run = self._ours()
        everybody = range(self.num_workers)
        with run.turn:
            if worker is None:
                return run.pool.ask(method, args, everybody, behind=behind)
            only = [everybody[self._number(worker)]]
            return run.pool.ask(method, args, only, behind=behind)[0]

    def next(self, worker: int) -> Any:
        """Return the next item of a worker's stream.

        Raises
        ------
        StopIteration
            There is none.
        InterruptedError
            No epoch is under way: none was begun, or it was interrupted.
        """
        run = self._run
        with run.turn:
            if run.present != self._present or not 0 <= worker < run.pool.num_workers:
                self._check_present(run)
                self._number(worker)
            return run.pool.next(worker)

    def shelf(self, worker: int) -> deque[Any]:
        """Return a worker's items that are here: the first is the next one, and there is one.

        ``del shelf[0]`` takes it. No signal handler runs in that, nor in the assignments beside it;
        so whoever keeps books of items can write them in the same step, and Ctrl-C loses nothing.

        Raises
        ------
        StopIteration
            There are no more.
        RuntimeError
            What the producer has raised has ended the stream, and came out before.
        InterruptedError
            No epoch is under way: none was begun, or it was interrupted.
        """
        run = self._run
        with run.turn:
            if run.present != self._present or not 0 <= worker < run.pool.num_workers:
                self._check_present(run)
                self._number(worker)
            return run.pool.shelf(worker)

    def __iter__(self) -> Iterator[Any]:
        """Go round the workers, one item of each, leaving out those that have no more."""
        self._check_present(self._run)
        return RoundRobin(self, self._present)

    def interrupt(self) -> None:
        """End the epoch: no item of it comes out any more; who waits gets an InterruptedError."""
        self._run.interrupt()

    def close(self) -> None:
        """End the workers; returns within a bounded time. Twice is fine."""
        self._run.close()
        self._finalizer.detach()  # not before: whatever interrupts this, it can be done again

    def stats(self) -> Stats:
        """Count what was done so far: a batch is the items of one ticket, a sample is an item."""
        return self._run.pool.stats()

    def pids(self) -> list[int | None]:
        """Process ids of the workers, in their order; None for one that is just being started."""
        return self._run.pool.pids()

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
            raise OSError("these streams belong to the process that forked this one; make others")
        if not self._finalizer.alive:
            raise OSError("these streams were closed; make others")
        return self._run

    def _number(self, worker: int) -> int:
        """Check a worker's number."""
        if not 0 <= worker < self.num_workers:
            raise IndexError(f"worker={worker} is not one of {self.num_workers}")
        return worker

    def _check_present(self, run: Run[StreamPool]) -> None:
        """Refuse items of an epoch that is not under way."""
        if run.present != self._present:
            raise InterruptedError(
                "no epoch is under way: none was begun, or it was interrupted; call begin()"
            )


class RoundRobin:
    """Iterator over the items of all workers in turn."""

    def __init__(self, streams: Streams, present: int) -> None:
        self._streams = streams  # keeps them alive
        self._run = streams._run
        self._present = present

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        run = self._run
        with run.turn:
            if run.present != self._present:
                raise InterruptedError("this iterator was interrupted: its epoch is over")
            return run.pool.next_in_turn()


class Letter(NamedTuple):
    """Something for a worker, in a slot."""

    slot: int
    words: tuple[int, ...]


class Posted(NamedTuple):
    """What a ticket is for."""

    what: str  # a call; empty: items
    worker: int
    epoch: int
    start: int
    items: int
    slot: int

    @property
    def place(self) -> str:
        """A name for it."""
        if self.what:
            return f"{self.what} in worker {self.worker}"
        last = self.start + self.items - 1
        named = f"item {last}" if self.items == 1 else f"items {self.start} to {last}"
        return f"{named} of worker {self.worker}, epoch {self.epoch}"


class Stream:
    """What the trainer knows of one worker's stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.assignment: Letter | None = None
        self.over = True  # nothing more will come out of the ring
        self.count = 1  # items that the next ticket asks for
        self.pace = NEVER  # nanoseconds that an item of the last ticket took
        self.quick = False  # they take so little that waking a worker is not nothing
        self.unwoken = 0  # items asked for since the workers were last woken
        self.start = 0  # the next item to ask for
        self.asked = 0  # items in tickets
        self.tickets: deque[tuple[int, int]] = deque()  # cell and items, oldest first
        self.hand: Taken | None = None  # the oldest, out of the ring and not yet unpacked
        self.copy: Memory | None = None  # of what lay in its slot: see `StreamPool._mend`
        self.ready: deque[Any] = deque()
        self.error: BaseException | None = None  # to be raised behind them
        self.failed = ""  # what has ended it, and was raised or is about to be

    def begin(self) -> None:
        """Begin an epoch."""
        self.over = False
        self.failed = ""
        self.start = self.unwoken = 0

    def end(self) -> None:
        """Nothing more comes out of the ring."""
        self.over = True
        self.start -= self.asked
        self.asked = 0
        self.hand = self.copy = None
        self.tickets = deque()

    def clear(self) -> None:
        """Forget the epoch; its tickets were given up."""
        self.end()
        self.assignment = self.error = None
        self.ready = deque()

    def adapt(self, made: int, nbytes: int, ns: int, most: int) -> None:
        """Choose how many items the next ticket asks for, from how the last two went.

        The quicker of them counts: another process may have been running in the worker's place.
        """
        before, self.pace = self.pace, max(ns // made, 1) if made else NEVER
        fit = TICKET_NS // min(before, self.pace)
        self.quick = fit > 0
        fit = min(fit, TICKET_BYTES * made // max(nbytes, 1))
        self.count = max(1, min(2 * self.count, fit, most))


class StreamPool:
    """The engine below `Streams`; one thread at a time, but for `interrupt` and `close`."""

    def __init__(
        self,
        producer: Callable[[int, int], Producer],
        num_workers: int,
        *,
        prefetch: int,
        start_method: str | None,
        max_restarts: int,
        timeout: float | None,
        restart: bool,
        memory_limit: int,
        preload: Sequence[str],
        sealed: bool,
    ) -> None:
        self.num_workers = num_workers
        self._sealed = sealed
        self._prefetch = prefetch
        self._depth = min(prefetch, DEEPEST)
        self._most = max(1, min(MOST, prefetch // 2))  # two tickets at least: one to work on
        self._timeout, self._restart = timeout, restart
        # Besides its items a worker has a call, and one ticket that was given up in its hands.
        cells = num_workers * (self._depth + 2)
        deaths = Deaths(max_restarts, num_workers, "ticket", "look at what it does there")
        self._staff = staff = Staff(
            cells, MOST, num_workers, deaths=deaths, memory_limit=memory_limit
        )
        self._ring, self._arena = staff.ring, staff.arena
        self._ring.wake_at = NEVER  # see _request
        self._rooms = [self._ring.indices(cell) for cell in range(cells)]
        self._assigned: list[Letter | None] = [None] * cells  # whose words stand in each cell
        self._posted = [Posted("", 0, 0, 0, 0, 0)] * cells  # what each cell was last posted for
        self._reader = SlotReader(self._arena)
        self._writer = Writer(self._arena.segment.fd, self._arena.segment.width)
        self._streams = [Stream(number) for number in range(num_workers)]
        self._left: list[Stream] = []  # those that go round
        self._turn = 0  # whose turn it is
        self._called: Letter | None = None  # what a call is about that is waited for
        self._retired: list[Letter] = []  # letters that a given-up ticket may still want
        self._torn = False  # an exception has come in the middle of something: see `_mend`
        self._ticket = AHEAD
        self._epoch = 0
        self._interrupts = 0
        self._began = -1  # `_interrupts` when the epoch was begun
        self._tickets = self._items = self._nbytes = 0  # taken out
        self._clock = Clock(self._ring)
        self._start = partial(
            staff.start,
            producer,
            num_workers,
            readers=num_workers,
            task=lambda owner: Task(owner - 1, num_workers, timed=timeout is not None),
            describe=self._describe,
            method=start_method,
            entry=ENTRY,
            name="producer",
            preload=preload,
        )

    def open(self) -> None:
        """Start the workers. Whatever is raised, also by a signal handler: `close` ends them."""
        self._start()

    # -- letters

    def _write(self, value: Any, name: str) -> Letter:
        """Lay something for a worker into a slot."""
        packed = self._pack(value, name)
        slot = self._arena.acquire()
        writer = self._writer
        try:
            writer.begin(slot, self._arena.capacity(slot))
            record = codec.encode(packed, writer)
            self._arena.look(slot, writer.capacity)  # so that it knows how large the slot is
        except BaseException:
            self._arena.release(slot)
            raise
        return Letter(slot, (slot, writer.capacity, *record))

    def _pack(self, value: Any, name: str) -> tuple[bytes, list[Any]]:
        """Pickle something for a worker: by name if it is a copy of this process, and if it can."""
        if self._staff.takes_objects:
            with contextlib.suppress(Exception):  # `dump` raises it again, and explains it
                return pickle.dumps((value, None), protocol=5), []
        packed = payload.dump(value, name=name)
        return packed.pickle, [np.frombuffer(buffer, np.uint8) for buffer in packed.buffers]

    def _sweep(self) -> None:
        """Free the cells and letters of given-up tickets that no worker is busy with any more."""
        for cell, slot in self._ring.sweep():
            self._reader.drop(cell, slot)
        if not self._ring.abandoned_count:
            retired, self._retired = self._retired, []
            for letter in retired:
                self._arena.release(letter.slot)

    def _retire(self, letter: Letter | None) -> None:
        """Free a letter as soon as no ticket can want it."""
        if letter is not None and letter not in self._retired:
            self._retired.append(letter)

    # -- tickets

    def _post(
        self,
        stream: Stream,
        kind: int,
        count: int,
        what: str = "",
        call: Letter | None = None,
        *,
        behind: bool = False,
    ) -> int:
        """Post a ticket for a worker, and return its cell; a call overtakes all items, or none."""
        ring = self._ring
        if ring.abandoned_count:
            self._sweep()
        cell = ring.vacant()
        if cell < 0:
            raise RuntimeError("the ring of these streams is full, which it never should be")
        assignment = stream.assignment
        if assignment is not self._assigned[cell] and assignment is not None:
            self._rooms[cell][ASSIGNED] = assignment.words
            self._assigned[cell] = assignment
        if call is not None:
            self._rooms[cell][CALLED] = call.words
        slot, capacity = self._reader.room()
        start, epoch = stream.start, self._epoch if assignment is not None else 0
        self._posted[cell] = Posted(what, stream.number, epoch, start, count, slot)
        ticket = self._ticket
        self._ticket = (ticket + 1) % TICKETS
        if kind == CALL and not behind:
            ticket = (ticket - AHEAD) % TICKETS
        ring.post(cell, ticket, epoch, kind, count, start, slot, capacity, stream.number + 1)
        return cell

    def _request(self, stream: Stream, leaving: int) -> None:
        """Ask for items ahead; `leaving` of those that are ready are about to be handed out.

        Waking a worker costs more than a small item does, so that waits until half of what is
        asked for ahead has gathered: workers only sleep when all of it was ready.
        """
        before = stream.start
        while not stream.over and len(stream.tickets) < self._depth:
            count = stream.count
            if len(stream.ready) - leaving + stream.asked + count > self._prefetch:
                break
            cell = self._post(stream, ITEMS, count)
            stream.tickets.append((cell, count))
            stream.asked += count
            stream.start += count
        stream.unwoken += stream.start - before
        if stream.unwoken and (not stream.quick or 2 * stream.unwoken >= self._prefetch):
            stream.unwoken = 0
            self._ring.wake()

    def _await(self, stream: Stream, cell: int, generation: int) -> Taken:
        """Sleep until the ticket in a cell is finished, and take it."""
        ring = self._ring
        idle = 0  # since when its worker, which could, has not taken it up: has that been stopped?
        while True:
            seen = ring.alarms()
            if self._interrupts != generation:
                raise InterruptedError("the epoch was interrupted, or the streams were closed")
            taken = ring.take(cell=cell)
            if taken is not None:
                return taken
            self._staff.check()
            if self._timeout is not None:
                owner = stream.number + 1
                working = self._working(owner)
                if working or not self._staff.is_ready(owner):
                    idle = 0
                else:
                    idle = idle or now_ns()
                    working = [(owner, idle, self._posted[cell].place)]
                self._staff.check_time(working, self._timeout, restart=self._restart)
            ring.wait(seen, cell=cell)

    def _working(self, owner: int) -> list[tuple[int, int, str]]:
        """Say what a worker works on, and since when."""
        working = []
        for cell in self._ring.held(owner):
            claimed, posted = self._ring.holder(cell)[1], self._posted[cell]
            if claimed:
                begun = int(self._rooms[cell][SINCE]) if posted.items > 1 else 0
                working.append((owner, max(claimed, begun), posted.place))
        return working

    def _describe(self, cell: int) -> Held:
        """Name what is in a cell."""
        posted = self._posted[cell]
        items = list(range(posted.start, posted.start + posted.items))
        return Held(posted.epoch, posted.start, items, posted.place)

    # -- items

    def next(self, worker: int, turn: int | None = None) -> Any:
        """Return the next item of a worker, or raise StopIteration; whose turn it is after that."""
        stream = self._streams[worker]
        if not stream.ready:
            self._receive(stream)
        self._ask_ahead(stream)
        if turn is not None:
            self._turn = turn
        return stream.ready.popleft()

    def shelf(self, worker: int) -> deque[Any]:
        """Return a worker's items that are here, at least one, or raise StopIteration."""
        stream = self._streams[worker]
        if not stream.ready:
            if stream.failed and stream.error is None:
                raise RuntimeError(f"{stream.failed}; begin another epoch")
            self._receive(stream)
        self._ask_ahead(stream)
        return stream.ready

    def _ask_ahead(self, stream: Stream) -> None:
        """Ask for items if there is room for a ticket, the first that is ready being taken."""
        # Which is looked at first: this is done for every single item.
        if len(stream.ready) + stream.asked + stream.count <= self._prefetch + 1:
            self._settle()
            self._request(stream, 1)
            self._torn = False

    def next_in_turn(self) -> Any:
        """Return the next item of the worker whose turn it is, or raise StopIteration."""
        left = self._left
        while left:
            turn = self._turn if self._turn < len(left) else 0
            try:
                return self.next(left[turn].number, turn + 1)
            except StopIteration:
                self._turn = turn
                del left[turn]
        raise StopIteration

    @property
    def segment(self) -> Segment:
        """The file of the slots."""
        return self._arena.segment

    def delivered(self, worker: int) -> int:
        """Count the items of a worker that have come out."""
        stream = self._streams[worker]
        return stream.start - stream.asked - len(stream.ready)

    def _receive(self, stream: Stream) -> None:
        """Take tickets out of the ring until an item is ready; raise what was raised instead."""
        while not stream.ready:
            if stream.error is not None:
                error, stream.error = stream.error, None
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame: a circle
            if stream.over:
                raise StopIteration
            self._settle()
            if not stream.tickets:  # only after an exception: `next` asks ahead
                self._request(stream, 0)
            if stream.hand is None:
                stream.hand = self._await(stream, stream.tickets[0][0], self._began)
            self._unpack(stream, stream.hand)
            self._torn = False

    def _unpack(self, stream: Stream, taken: Taken) -> None:
        """Take the items of the oldest ticket out of its slot, and the ticket out of the books."""
        cell, record, count = taken[0], taken[4], stream.tickets[0][1]
        items, error, slot = self._read(stream, taken, single=count == 1)
        made, nbytes = len(items), codec.used(record)
        ended = error is not None or bool(record[5] & ENDED)
        failed = ""
        if error is not None:
            at = f"item {stream.start - stream.asked + made} of worker {stream.number}"
            error = failure.named(_signed(error, stream.number), f"{at}, epoch {self._epoch}")
            failed = _ended_by(error, stream.number)
        # No signal handler runs before the next call: all of this is done, or nothing.
        stream.ready, stream.error, stream.failed = items, error, failed
        stream.hand = stream.copy = None
        stream.over = ended
        stream.asked -= count
        stream.start -= count - made
        del stream.tickets[0]
        self._tickets += 1
        self._items += made
        self._nbytes += nbytes
        if slot >= 0:
            self._reader.drop(cell, slot)
        if ended:
            self._end(stream)
        else:
            stream.adapt(made, nbytes, record[4], self._most)

    def _read(
        self, stream: Stream, taken: Taken, *, single: bool
    ) -> tuple[deque[Any], BaseException | None, int]:
        """Read a ticket's items, what was raised behind them, and which slot is to be freed."""
        _, status, slot, capacity, record = taken
        items: deque[Any] = deque()
        error = None
        if status == RAISED:
            packed, slot = self._take(stream, taken, sealed=False)
            error = failure.unpack(packed)
        elif single:
            if record[5] >> 2:
                item, slot = self._take(stream, taken, sealed=self._sealed)
                items.append(item)
        else:
            memory = self._arena.look(slot, capacity) if stream.copy is None else stream.copy
            items.extend(parse(memory, record, sealed=self._sealed))
            if record[5] & BROKEN:
                packed = items.pop()
                error = failure.unpack(packed.open() if self._sealed else packed)
        return items, error, slot

    def _take(self, stream: Stream, taken: Taken, *, sealed: bool) -> tuple[Any, int]:
        """Take what lies in a slot out of it, perhaps as a parcel; and the slot, if it is free."""
        cell, _, slot, capacity, record = taken
        if stream.copy is not None:
            parcel = Parcel(stream.copy, record)
        elif sealed:
            memory = self._arena.take(slot, codec.used(record), capacity)
            parcel = Parcel(memory, record, slot if type(memory) is Lease else -1)
        else:
            return self._reader.collect(cell, slot, capacity, record)
        return parcel if sealed else parcel.open(), -1

    def _end(self, stream: Stream) -> None:
        """Nothing more comes from a worker: give up what else it was asked for."""
        stream.over = True
        cells = [cell for cell, _ in stream.tickets]
        stream.end()
        for cell in cells:
            self._ring.abandon(cell)

    # -- after an exception

    def _settle(self) -> None:
        """Begin a step that must not stay half done; bring one to its end that did."""
        if self._torn:
            self._mend()
        self._torn = True

    def _mend(self) -> None:
        """Make the books true again, after an exception in the middle of a step.

        A signal handler may raise (Ctrl-C does) after any call, and what the call has returned is
        lost then. But what there is says everything, and nothing has been posted since:

        - A ticket in the ring is named by `_posted`, which is written before it. So `tickets`,
          `asked` and `start` follow from the ring. Nobody waits for a call any more.
        - The oldest ticket is in the books and not in the ring: it was taken out, and not
          unpacked, for it leaves the books in one step with that. What the worker has written of
          it stands in its cell until the next post. Its slot may have been lent meanwhile, or
          freed, but nobody has got it since: what lies there is copied.
        - A slot that is in no cell of the ring, and of no letter, is lost, and freed.

        Each step leaves what the others need, so that it may itself be interrupted.
        """
        self._retire(self._called)
        self._called = None
        cells: list[list[int]] = [[] for _ in self._streams]
        for cell in self._ring.awaited(ordered=False):
            posted = self._posted[cell]
            if posted.what or self._streams[posted.worker].over:
                self._ring.abandon(cell)
            else:
                cells[posted.worker].append(cell)
        for stream in self._streams:
            self._count(stream, cells[stream.number])
        self._sweep()
        letters = [*self._retired, *(stream.assignment for stream in self._streams)]
        slots = [letter.slot for letter in letters if letter is not None]
        self._reader.keep(slots + self._ring.slots())
        self._torn = False

    def _count(self, stream: Stream, cells: list[int]) -> None:
        """Make the books of a stream true, of which these cells are in the ring."""
        if stream.over:
            stream.end()
            return
        tickets = deque((cell, self._posted[cell].items) for cell in cells)
        if stream.hand is not None or (stream.tickets and stream.tickets[0][0] not in cells):
            oldest = stream.tickets[0]
            if stream.copy is None:
                self._save(stream, oldest[0])
            tickets.appendleft(oldest)
        asked = sum(count for _, count in tickets)
        received = stream.start - stream.asked
        stream.tickets, stream.asked, stream.start = tickets, asked, received + asked

    def _save(self, stream: Stream, cell: int) -> None:
        """Copy what the oldest ticket has brought out of its slot."""
        _, status, capacity, record, _ = self._ring.left_in(cell)
        slot = self._posted[cell].slot
        copy = self._arena.copy(slot, codec.used(record), capacity)
        stream.copy, stream.hand = copy, (cell, status, -1, 0, record)

    # -- calls

    def begin(self, assignments: Sequence[Any]) -> list[Any]:
        """Begin an epoch."""
        generation = self._interrupts
        self._clear()
        self._staff.check()
        self._staff.deaths.begin()
        self._epoch += 1
        self._torn = True
        try:
            self._assign(assignments)
            cells = []
            for stream in self._streams:
                stream.begin()
                what = f"the beginning of epoch {self._epoch}"
                cells.append((stream, self._post(stream, BEGIN, 0, what)))
                self._request(stream, 0)
            self._ring.wake()
            replies = [self._reply(*cell, generation) for cell in cells]
        except BaseException:
            self._clear()
            raise
        self._left = list(self._streams)
        self._turn = 0
        self._began = generation
        self._clock.run()
        self._torn = False
        return replies

    def _assign(self, assignments: Sequence[Any]) -> None:
        """Write the workers' letters; one that several share is written once."""
        written: dict[int, Letter] = {}
        for stream, assignment in zip(self._streams, assignments, strict=True):
            if id(assignment) not in written:
                written[id(assignment)] = self._write(assignment, "assignment")
            stream.assignment = written[id(assignment)]

    def _clear(self) -> None:
        """Give up everything that is under way."""
        self._torn = True
        for stream in self._streams:
            self._retire(stream.assignment)
            stream.clear()
        self._left = []
        self._assigned = [None] * len(self._assigned)
        self._ring.abandon()
        self._mend()

    def ask(
        self, method: str, args: tuple[Any, ...], workers: Sequence[int], *, behind: bool
    ) -> list[Any]:
        """Call a method in some workers."""
        generation = self._interrupts
        self._staff.check()
        self._settle()
        try:
            letter = self._called = self._write((method, args), f"{method}'s arguments")
            cells: list[tuple[Stream, int]] = []
            for number in workers:
                stream = self._streams[number]
                what = f"a call of {method}()"
                cells.append((stream, self._post(stream, CALL, 0, what, letter, behind=behind)))
            self._ring.wake()
            return [self._reply(*cell, generation) for cell in cells]
        finally:
            self._mend()  # that the letter is not needed any more, and what was not waited for

    def _reply(self, stream: Stream, cell: int, generation: int) -> Any:
        """Wait for the answer to a call."""
        place = self._posted[cell].place
        _, status, slot, capacity, record = self._await(stream, cell, generation)
        if status == RAISED:
            error, slot = self._reader.error(cell, slot, capacity, record)
        else:
            reply, slot = self._reader.collect(cell, slot, capacity, record)
        if slot >= 0:
            self._reader.drop(cell, slot)
        if status == RAISED:
            stream.failed = _ended_by(error, stream.number)
            self._end(stream)
            try:
                failure.deliver(_signed(error, stream.number), place)
            finally:
                del error
        return reply

    # -- the rest

    def interrupt(self) -> None:
        """Let whoever waits in another thread raise InterruptedError; `begin` ends this."""
        self._interrupts += 1
        self._ring.alarm()

    def stats(self) -> Stats:
        """Count what this pool has done so far."""
        deaths = self._staff.deaths
        times = self._clock.read()
        return Stats(
            batches=self._tickets,
            samples=self._items,
            nbytes=self._nbytes,
            restarts=deaths.restarts,
            retries=deaths.retries,
            copies=self._arena.copies,
            depths=self._ring.depths(),
            loop_waited=times.waited,
            workers_waited=sum(times.idle),
            elapsed=times.elapsed,
            num_workers=len(self._streams),
        )

    def pids(self) -> list[int | None]:
        """Process ids of the workers."""
        return [self._staff.pid(stream.number + 1) for stream in self._streams]

    def close(self) -> None:
        """Tell the workers to leave, and see to it that they have."""
        if self._staff.is_here:  # garbage collection can strike anywhere
            threading.Thread(target=self.close, name="cseq-closer").start()
            return
        self._staff.closed = True
        self._staff.close()
        self._writer.close()
        self._staff.free()


def _signed(error: BaseException, worker: int) -> BaseException:
    """Note on an exception whose it is."""
    cause: Any = error.__cause__
    cause.worker = worker
    return error


def _ended_by(error: BaseException, worker: int) -> str:
    """Say what has ended a worker's stream."""
    text = failure.str_of(error)
    return f"an exception has ended the stream of worker {worker} ({type(error).__name__}: {text})"
