"""A stream of items from each worker process, each in its own order.

The trainer requests items in advance by posting tickets on each worker's ring. A replacement
reprocesses a dead worker's tickets. See docs/inside/streams.md.

::

    trainer                                             worker w
      Streams.begin(assignments) ── request in a slot ─► producer.begin(assignment)
              ask(method, …)     ── request in a slot ─► producer.method(…)
              next(iterator)     ◄── slots ───────────── producer.items(start)
      begin(assignments, keys)   ── cell, or request ──► producer.make(key)

In an epoch of *keys*, each item is made from a key. The trainer first draws `prefetch` keys per
worker from an iterator, then one more for each item that the loop receives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from cseq._lock import rest
from cseq.check import MOST_WORKERS, choice, flag, integer
from cseq.engine._feed import FeedIterator, ItemFailure
from cseq.engine.crews.processes import ProcessCrew
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

# Maximum value of `prefetch`.
MOST_AHEAD = 2**62


class Streams:
    """Streams of items that worker processes make ahead of the loop.

    Parameters
    ----------
    producer : callable
        ``producer(number, num_workers)`` creates a `Producer` in the worker process. As with the
        worker of an `MPSequence`, a callable that cannot be imported is pickled by value.
    num_workers : int
    prefetch : int
        The maximum number of items per worker that are requested, in progress, or waiting. In an
        epoch of keys, the number of keys per worker that are drawn in advance.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How to start processes. Defaults to a fork server where available.
    max_restarts : int
        The maximum number of dead worker processes to replace per epoch.
    timeout : float, optional
        The time limit for an item or a call in seconds, after which `on_timeout` applies. The clock
        starts when the worker begins or when the loop starts waiting, whichever is later. A worker
        can take ten times as long to start.
    on_timeout : 'raise' or 'restart'
        Whether to raise `WorkerTimeout`, or to replace the worker and retry.
    memory_limit : int, str or None
        The maximum amount of shared memory for items that are still referenced. Beyond the limit,
        items are copied. See `MSequence`.
    threads, preload
        See `MSequence`.
    errors : 'raise' or 'return'
        Whether to raise an item's exception, or to return an `ItemFailure` with the ``error`` and
        the ``worker`` number.
    naming : Naming
        The name of an item in messages, and the number of samples in an item.
    lethal : 'raise' or 'return'
        In an epoch of keys, an item that has killed three workers causes a `WorkerDied` error. With
        'raise', the error ends the streams. With 'return', the error replaces only that item.
    launch : 'now' or 'begin'
        With 'now', the constructor starts the workers. With 'begin', they are started by the first
        `ask`, or by the first `begin` once it has posted work. A forked worker then makes its first
        items while others are being forked, and inherits changes that the key iterator has made.
    kind : 'processes' or 'threads'
        The kind of worker. With threads, nothing is pickled: workers share `producer`, assignments
        and keys with the trainer, and items with the loop. A thread cannot die or be replaced.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or if `producer` cannot be pickled.

    Notes
    -----
    The constructor does not wait for the workers. If `producer` raises an exception, the first call
    that waits re-raises it. Each item is encoded before the producer makes the next one, so the
    producer can reuse its buffers. An item remains valid while any part of it is referenced.

    If an item cannot be made, an exception is raised at the item's position. Its ``__cause__``
    contains the worker's traceback, and ``__cause__.worker`` is the worker's number. An
    exception in `Producer.items` ends the worker's stream until the next `begin`. If
    `KeyProducer.make` raises, or an item cannot be pickled or decoded, the epoch continues.

    A dead worker is replaced. The new process starts the epoch with the same assignment and
    continues with the first item that was not received (`Producer.items`). Changes that `ask` made
    in the dead worker are lost.

    If a signal handler raises (Ctrl-C) during ``next``, no item is consumed, and the next call
    returns the item. If a handler raises during `begin`, no epoch is active. A RuntimeError is
    raised if a handler consumes items or starts an epoch in the middle of another call.

    Only one thread at a time can call methods, except for `interrupt` and `close`.
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
                f"producer={producer!r} is not callable; pass a function that takes the worker's "
                "number and num_workers"
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
            from cseq.engine.crews.threads import ThreadCrew

            pool = Pool(ThreadCrew(items), items)
        else:
            pool = Pool(ProcessCrew(items), items)
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
        """End the previous epoch, start one in every worker, and request items in advance.

        Parameters
        ----------
        assignments : sequence
            The argument of ``begin`` for each worker, which is pickled and can be of any size.
        keys : iterator, optional
            If given, items are ``producer.make(key)`` instead of ``producer.items(start)``. A key
            can be any object that can be pickled. This method draws `prefetch` keys per worker.
            Exactly one more key is drawn before each item is returned or raised. The iterator runs
            in the calling thread. If it raises an exception, the epoch ends. The exception is
            raised by this method, or once by the loop after the items of all earlier keys.
        ordered : bool
            If False, items are returned as they become ready, oldest first.
        assign : 'turn' or 'free'
            With 'turn', keys are assigned round-robin. With ``ordered=False``, a worker is skipped
            while `prefetch` of its keys have unconsumed items. With 'free', each key is assigned to
            the worker with the fewest pending keys.
        first : int
            The worker with which the rotation starts, for keys as well as ``iter``.

        Returns
        -------
        list
            The results of ``begin`` in worker order. With `keys`, the list is empty because the
            method does not wait for results, and exceptions from ``begin`` are raised instead of
            items.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or if an object cannot be pickled.
        OSError
            If the streams are closed, or belong to a parent process that forked this one.
        BaseException
            If the key iterator or the ``begin`` method of a producer raises an exception.
        """
        if len(assignments) != self.num_workers:
            raise ValueError(
                f"got {len(assignments)} assignments for {self.num_workers} workers; pass one per "
                "worker"
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
        """Call a method of the producers and wait for the results.

        A worker executes the call before it starts the next requested item.

        Parameters
        ----------
        method : str
        *args : object
            Arguments that can be pickled.
        worker : int, optional
            The number of the worker to call. Defaults to all workers.
        behind : bool
            If True, execute the call after all requested items. The worker then makes no more items
            until one is consumed.

        Returns
        -------
        object or list
            The result from the worker, or a list of the results from all workers in order.

        Raises
        ------
        IndexError
            If no worker has this number.
        OSError
            If the streams are closed, or belong to a parent process that forked this one.
        Exception
            If the method raises an exception. This ends the worker's stream, but not an epoch of
            keys.
        """
        run = self._ours()
        if worker is not None and not 0 <= worker < self.num_workers:
            raise IndexError(
                f"worker={worker} does not exist; pass a number from 0 to {self.num_workers - 1}"
            )
        asked = range(self.num_workers) if worker is None else [worker]
        try:
            with run.lock.hold():
                replies = run.pool.tickets.ask(method, args, asked, behind=behind)
        finally:
            rest()
        return replies if worker is None else replies[0]

    @property
    def latest(self) -> int:
        """The number of the worker that produced the most recent item."""
        worker: int = self._feed.latest
        return worker

    @property
    def glance(self) -> Callable[[], Any]:
        """A function that returns the next item of an ordered epoch of keys without consuming it.

        It does not draw a key, and returns None if the item is not ready. See `Feed.glance`.
        """
        return self._feed.glance

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items of the epoch: one from each worker in turn, or one for each key.

        Workers that have no more items are skipped. With ``ordered=False``, items are returned as
        they become ready.
        """
        self._feed.check(self._feed.generation)
        return FeedIterator(self._feed, self._feed.generation, self)

    def interrupt(self) -> None:
        """End the epoch without returning more items. A waiting call raises InterruptedError."""
        self._run.interrupt()

    def close(self) -> None:
        """Stop the workers within a bounded time. A second call has no effect."""
        self._run.close()

    def stats(self) -> Stats:
        """Return counts and timings. Items count as batches. `naming` sets the samples per item."""
        return self._run.pool.stats()

    def pids(self) -> list[int | None]:
        """Return the workers' process ids in order, with None for workers that have not started."""
        supervisor = self._run.pool.supervisor
        return [] if supervisor is None else supervisor.pids()

    def processes(self, *, wait: bool = False) -> dict[int, Child]:
        """Return a dict that maps each worker's number to its latest process.

        The dict is updated when a process starts, and stays valid after the streams are gone. If
        `wait` is True, wait until all processes have been started or the streams end.
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
        """Return the run. Raise OSError if it has ended or belongs to a parent process."""
        rest()
        if not self._run.is_ours:
            raise OSError("these streams belong to the process that forked this one; make new ones")
        if self._run.is_ended:
            raise OSError("these streams are closed; make new ones")
        return self._run
