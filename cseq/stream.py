"""A stream of items from each worker process, each in its own order.

Worker w of N makes its own items. The trainer requests items in advance via tickets on one ring per
worker. If a worker dies, its replacement processes the tickets again. See docs/inside/streams.md.

::

    trainer                                             worker w
      Streams.begin(assignments) ── request in a slot ─► producer.begin(assignment)
              ask(method, …)     ── request in a slot ─► producer.method(…)
              next(iterator)     ◄── slots ───────────── producer.items(start)
      begin(assignments, keys)   ── cell, or request ──► producer.make(key)

In an epoch of *keys*, each item has a key. The trainer draws keys from an iterator: initially
`prefetch` keys per worker, then one key for each item that it returns.
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

# The maximum value of `prefetch`.
MOST_AHEAD = 2**62


class Streams:
    """Streams of items that worker processes make ahead of the loop.

    Parameters
    ----------
    producer : callable
        ``producer(number, num_workers)`` creates a `Producer` in the worker's process. Like an
        `MPSequence` worker, the callable is pickled by value if it cannot be imported.
    num_workers : int
    prefetch : int
        The maximum number of items per worker that are requested, in progress, or waiting. In an
        epoch of keys, the number of keys drawn per worker ahead of the consumed items.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How to start processes. The default is a fork server where available.
    max_restarts : int
        The number of worker processes that may die and be replaced in an epoch.
    timeout : float, optional
        The number of seconds that an item or a call may take before `on_timeout` applies. Time
        counts from when the worker starts it or the loop starts waiting, whichever is later. A
        worker may take ten times as long to start.
    on_timeout : 'raise' or 'restart'
        Whether to raise `WorkerTimeout`, or to replace the worker and retry.
    memory_limit : int, str or None
        The maximum shared memory for held items. Beyond it, items are copied. See `MSequence`.
    threads, preload
        See `MSequence`.
    errors : 'raise' or 'return'
        Whether to raise an item's exception, or to return an `ItemFailure` with the ``error`` and
        the number of the ``worker``.
    naming : Naming
        The name of an item in messages, and the number of samples in an item.
    lethal : 'raise' or 'return'
        In an epoch of keys, an item that killed three workers results in `WorkerDied`. With
        'raise', the error ends the streams. With 'return', it replaces only that item.
    launch : 'now' or 'begin'
        With 'now', the constructor starts the workers. With 'begin', the first `ask` starts them,
        or the first `begin` after posting work. A forked worker then makes its first items while
        others are forked, and inherits changes that the key iterator made.
    kind : 'processes' or 'threads'
        The kind of workers. Threads do not pickle anything: they share `producer`, assignments and
        keys with the trainer, and items with the loop. A thread cannot die or be replaced.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, or `producer` cannot be pickled.

    Notes
    -----
    Starting does not wait for the workers. The first call that waits raises any exception from
    `producer`. An item is encoded before the producer is asked for the next one, so the producer
    may reuse its buffers. An item stays intact as long as any part of it is referenced.

    An exception replaces its item. Its ``__cause__`` shows the worker's traceback and stores the
    worker's number (``worker``). If `Producer.items` raises, the worker's stream ends until the
    next `begin`. If a key's item raises, or an item fails to pickle or decode, the epoch continues.

    A dead worker is replaced. The new process starts the epoch from the same assignment and
    continues with the first item that was not received (`Producer.items`). Changes that `ask` made
    in the dead worker are lost.

    If a signal handler raises (Ctrl-C) in ``next``, no item was consumed, and the next call returns
    the item. If a handler raises in `begin`, no epoch is active. A handler that consumes items or
    starts an epoch in the middle of another call gets a RuntimeError.

    Only one thread at a time may call methods, but any thread may call `interrupt` and `close`.
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
                f"producer={producer!r} cannot be called; pass producer(number, num_workers)"
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
        """The number of workers."""
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
        """Start an epoch in every worker and request items in advance. End any earlier epoch.

        Parameters
        ----------
        assignments : sequence
            The argument for each worker's ``begin``. Arguments are pickled and may be of any size.
        keys : iterator, optional
            With keys, items are ``producer.make(key)`` instead of ``producer.items(start)``. A key
            can be any object that can be pickled. `prefetch` keys per worker are drawn here, and
            exactly one more before each item is returned or raised. The iterator runs in the
            calling thread. An exception from the iterator ends the epoch. It is raised here, or
            once after the items of earlier keys.
        ordered : bool
            If False, items are returned as they become ready, oldest first.
        assign : 'turn' or 'free'
            With 'turn', keys are assigned round-robin. With ``ordered=False``, workers that have
            `prefetch` keys with unconsumed items are skipped. With 'free', a key goes to the worker
            with the fewest pending keys.
        first : int
            The first worker in the rotation, both for keys and in ``iter``.

        Returns
        -------
        list
            The replies from the workers' ``begin`` in worker order. With `keys`, the list is empty,
            as no reply is awaited, and exceptions from ``begin`` are raised instead of items.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or an object cannot be pickled.
        OSError
            The streams are closed, or belong to the process that forked this one.
        BaseException
            The iterator of keys or a producer's ``begin`` raised an exception.
        """
        if len(assignments) != self.num_workers:
            raise ValueError(
                f"{len(assignments)} assignments for {self.num_workers} workers; pass one for each"
            )
        free = choice("assign", assign, ("turn", "free")) == "free"
        ordered = flag("ordered", ordered)
        first = integer("first", first, least=0, most=self.num_workers - 1)
        if keys is not None and not hasattr(keys, "__next__"):
            raise TypeError(f"keys={keys!r} is not an iterator; pass iter(keys)")
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
        """Call a method of the producers and wait for the replies.

        A worker executes the call before requested items that it has not started.

        Parameters
        ----------
        method : str
        *args : object
            The arguments, which are pickled.
        worker : int, optional
            The number of the worker to call. The default is all workers.
        behind : bool
            If True, execute the call after all requested items are made. A worker that has replied
            makes no item until one is consumed.

        Returns
        -------
        object or list
            The worker's reply, or a list of all replies in worker order.

        Raises
        ------
        IndexError
            No worker has this number.
        OSError
            The streams are closed, or belong to the process that forked this one.
        Exception
            The method raised an exception. This ends the worker's stream, but not an epoch of keys.
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
        """The number of the worker that made the last returned item."""
        worker: int = self._feed.latest
        return worker

    @property
    def glance(self) -> Callable[[], Any]:
        """A function that returns the next item of an ordered epoch of keys without consuming it.

        The function returns None if the item is not ready, and draws no key. See `Feed.glance`.
        """
        return self._feed.glance

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the epoch's items: one from each worker in turn, or one for each key.

        Workers without items are skipped. With ``ordered=False``, items are returned when ready.
        """
        self._feed.check(self._feed.generation)
        return FeedIterator(self._feed, self._feed.generation, self)

    def interrupt(self) -> None:
        """End the epoch, so it yields no more items. A waiting call raises InterruptedError."""
        self._run.interrupt()

    def close(self) -> None:
        """Stop the workers within a bounded time. A second call has no effect."""
        self._run.close()

    def stats(self) -> Stats:
        """Return counts and times so far. An item counts as a batch. `naming` counts samples."""
        return self._run.pool.stats()

    def pids(self) -> list[int | None]:
        """Return the workers' process ids in order, with None for a process not yet started."""
        supervisor = self._run.pool.supervisor
        return [] if supervisor is None else supervisor.pids()

    def processes(self, *, wait: bool = False) -> dict[int, Child]:
        """Return each worker's latest process by worker number. A process may have exited.

        The method always returns the same dict, which is updated at each start and remains valid
        after the streams are gone. With `wait`, all processes have started on return, unless the
        streams end in the meantime.
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
        """Return the run. Raise OSError if it cannot be used in this process."""
        rest()
        if not self._run.is_ours:
            raise OSError("these streams belong to the process that forked this one; make new ones")
        if self._run.is_ended:
            raise OSError("these streams were closed; make new ones")
        return self._run
