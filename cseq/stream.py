"""A stream of items from each worker process, each in its own order.

Worker w of N makes its own items. The trainer asks for them ahead, by tickets on a ring for each
worker. The tickets of a worker that dies run again in its replacement. See docs/inside/streams.md.

::

    trainer                                             worker w
      Streams.begin(assignments) ── request in a slot ─► producer.begin(assignment)
              ask(method, …)     ── request in a slot ─► producer.method(…)
              next(iterator)     ◄── slots ───────────── producer.items(start)
      begin(assignments, keys)   ── cell, or request ──► producer.make(key)

In an epoch of *keys*, these name the items: the trainer draws keys from an iterator, `prefetch` for
each worker at first, then one for each item that it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from cseq._lock import rest
from cseq.check import MOST_WORKERS, choice, flag, integer
from cseq.engine._feed import FeedIterator, ItemFailure
from cseq.engine.pool import Pool
from cseq.engine.tickets.items import Items, Naming
from cseq.indexing.producer import KeyProducer, Producer
from cseq.options import MAX_RESTARTS, WorkerOptions
from cseq.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from cseq.measure.stats import Stats
    from cseq.processes.launcher import Child

__all__ = ["ItemFailure", "KeyProducer", "Naming", "Producer", "Streams"]

MOST_AHEAD = 2**62  # items


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
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How processes are started; None: forkserver where it exists.
    max_restarts : int
        Worker processes that may die and be replaced in an epoch.
    timeout : float, optional
        Seconds that an item, or a call, may take before `on_timeout`: from when the worker begins
        it or, if that is later, from when it is waited for. A worker may take ten times as long to
        get ready.
    on_timeout : 'raise' or 'restart'
        Raise `WorkerTimeout`, or replace the worker, which tries again.
    memory_limit : int, str or None
        Most shared memory that held items may occupy; beyond it, items are copied. See `MSequence`.
    threads, preload
        See `MSequence`.
    errors : 'raise' or 'return'
        Raise exceptions in place of items, or return an `ItemFailure` there, which has the
        ``error`` and the number of the ``worker``.
    naming : Naming
        What messages call an item, and what it counts for.
    lethal : 'raise' or 'return'
        In an epoch of keys, what an item does that has ended three workers: its `WorkerDied` ends
        the streams, or takes its place.
    launch : 'now' or 'begin'
        When workers are started: by the constructor; or by the first `ask`, or the first `begin`
        once it has posted what they have to do. A forked worker then makes its first items while
        others are forked; what the iterator of keys has changed here, it has changed in theirs.

    kind : 'processes' or 'threads'
        What the workers are. Between threads nothing is pickled: they have `producer`, assignments
        and keys as they are, and the loop has the items. No thread dies, or can be replaced.

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

    If a signal handler raises (Ctrl-C) in ``next``, no item has been taken, and the next call
    returns it. If one raises in `begin`, no epoch is under way. In the middle of a call, a handler
    can neither take items nor begin an epoch: RuntimeError.

    Methods are for one thread at a time; `interrupt` and `close` are for any.
    """

    def __init__(
        self,
        producer: Callable[[int, int], Producer | KeyProducer],
        num_workers: int,
        *,
        prefetch: int = 10,
        start_method: str | None = None,
        max_restarts: int = MAX_RESTARTS,
        timeout: float | None = None,
        on_timeout: str = "raise",
        memory_limit: int | str | None = None,
        threads: int | None = 1,
        preload: bool = True,
        errors: Literal["raise", "return"] = "raise",
        naming: Naming = Naming(),  # noqa: B008 - a tuple
        lethal: Literal["raise", "return"] = "raise",
        launch: Literal["now", "begin"] = "now",
        kind: Literal["processes", "threads"] = "processes",
    ) -> None:
        rest()
        if not callable(producer):
            raise TypeError(
                f"producer={producer!r} cannot be called; give producer(number, num_workers)"
            )
        early = choice("launch", launch, ("now", "begin")) == "now"
        workers = integer("num_workers", num_workers, most=MOST_WORKERS)
        options = WorkerOptions(
            start_method, max_restarts, timeout, on_timeout, memory_limit, threads, preload
        ).checked()
        items = Items(
            workers,
            options,
            prefetch=integer("prefetch", prefetch, most=MOST_AHEAD),
            errors=choice("errors", errors, ("raise", "return")),
            naming=naming,
            fails=choice("lethal", lethal, ("raise", "return")) == "return",
        )
        if choice("kind", kind, ("processes", "threads")) == "threads":
            from cseq.engine.crews.threads import ThreadCrew as Crew
        else:
            from cseq.engine.crews.processes import ProcessCrew as Crew  # type: ignore[assignment]
        pool = Pool(Crew(items), items)
        self._run = Run(pool)
        self._feed = items.feed_of(pool)
        self._run.close_with(self)
        try:
            pool.crew.prepare(producer, "producer")
            if early:
                pool.crew.launch()
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._run.pool.num_workers

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

        Items are then asked for ahead.

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
            fewer than `prefetch` keys whose items were not taken. 'free': to the one that has the
            fewest keys to work on.
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
        first = integer("first", first, least=0, most=self.num_workers - 1)
        if keys is not None and not hasattr(keys, "__next__"):
            raise TypeError(f"keys={keys!r} is not an iterator; give iter(...) of it")
        run = self._ours()
        run.lock.refuse_mine()
        generation = run.interrupt()
        try:
            with run.lock.hold():
                return run.pool.tickets.begin_epoch(
                    assignments, keys, generation, ordered=ordered, free=free, first=first
                )
        finally:
            rest()

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
            The worker's reply, or all workers' replies, in their order.

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
        if worker is not None and not 0 <= worker < self.num_workers:
            raise IndexError(f"worker={worker} is not one of {self.num_workers}")
        asked = range(self.num_workers) if worker is None else [worker]
        try:
            with run.lock.hold():
                replies = run.pool.tickets.ask(method, args, asked, behind=behind)
        finally:
            rest()
        return replies if worker is None else replies[0]

    @property
    def latest(self) -> int:
        """The worker of the item that was returned last."""
        worker: int = self._feed.latest
        return worker

    @property
    def glance(self) -> Callable[[], Any]:
        """Return what is next in an ordered epoch of keys, if it is ready; else None.

        It stays next: no key is drawn. See `Feed.glance`.
        """
        return self._feed.glance

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

    def stats(self) -> Stats:
        """Return counts and times so far: a batch is an item, samples are as `naming` says."""
        return self._run.pool.stats()

    def pids(self) -> list[int | None]:
        """Process ids of the workers, in their order; None for one that is just being started."""
        supervisor = self._run.pool.supervisor
        return [] if supervisor is None else supervisor.pids()

    def processes(self, *, wait: bool = False) -> dict[int, Child]:
        """Latest process of each worker, by the worker's number; it may have ended.

        Always the same dict, into which a process is put when it is started: who holds it knows the
        processes also when the streams are gone. With `wait`, all are started on return, unless the
        streams end meanwhile.
        """
        supervisor = self._run.pool.supervisor
        if supervisor is None:
            return {}
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

    def _ours(self) -> Run[Items]:
        """Return the run, if it can be used here."""
        rest()
        if not self._run.is_ours:
            raise OSError("these streams belong to the process that forked this one; make new ones")
        if self._run.is_ended:
            raise OSError("these streams were closed; make new ones")
        return self._run
