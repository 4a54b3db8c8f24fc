"""A stream of items from each worker process, each in its own order.

Worker w of N makes its own items. The trainer asks for them ahead by tickets, on one ring for each
worker. If a worker dies, its replacement works on its tickets again. See docs/inside/streams.md.

::

    trainer                                             worker w
      Streams.begin(assignments) ── request in a slot ─► producer.begin(assignment)
              ask(method, …)     ── request in a slot ─► producer.method(…)
              next(iterator)     ◄── slots ───────────── producer.items(start)
      begin(assignments, keys)   ── cell, or request ──► producer.make(key)

In an epoch of *keys*, each item has a key. The trainer draws keys from an iterator: `prefetch` for
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

# Items.
MOST_AHEAD = 2**62


class Streams:
    """Streams of items from worker processes, made ahead of the loop.

    Parameters
    ----------
    producer : callable
        ``producer(number, num_workers)`` makes a worker's `Producer`, in its process. It travels
        there as the workers of `MPSequence` do: by value if it cannot be imported.
    num_workers : int
    prefetch : int
        The most items of a worker that are asked for, being made, or waiting. In an epoch of keys,
        how many keys for each worker are drawn ahead of the items taken.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How processes are started, by default by a fork server where there is one.
    max_restarts : int
        Worker processes that may die and be replaced in an epoch.
    timeout : float, optional
        Seconds that an item, or a call, may take before `on_timeout` applies. They count from when
        the worker begins or the loop waits, whichever is later. A worker may take ten times as long
        to get ready.
    on_timeout : 'raise' or 'restart'
        Raise `WorkerTimeout`, or replace the worker, which tries again.
    memory_limit : int, str or None
        Most shared memory that held items may occupy; beyond it, items are copied. See `MSequence`.
    threads, preload
        See `MSequence`.
    errors : 'raise' or 'return'
        Raise an item's exception, or return an `ItemFailure` with the ``error`` and the number of
        the ``worker``.
    naming : Naming
        What messages call an item, and how many samples it counts for.
    lethal : 'raise' or 'return'
        In an epoch of keys, an item that killed three workers is a `WorkerDied`. It ends the
        streams, or replaces that item alone.
    launch : 'now' or 'begin'
        Start the workers in the constructor; or in the first `ask`, or in the first `begin` after
        it posted their work. A forked worker then makes its first items while others are forked,
        and it sees what the iterator of keys changed in this process.
    kind : 'processes' or 'threads'
        What the workers are. Between threads nothing is pickled: they share `producer`, assignments
        and keys with the trainer, and items with the loop. No thread dies or can be replaced.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or `producer` cannot be pickled.

    Notes
    -----
    The start does not wait for the workers: the first call that waits for them raises an exception
    of `producer`. An item is encoded before the producer is asked for the next one, so the producer
    may reuse its buffers. An item stays intact as long as there are references to any part.

    An exception replaces its item. Its ``__cause__`` shows the worker's traceback and has the
    worker's number (``worker``). If `Producer.items` raises, the worker's stream ends until the
    next `begin`. If a key's item raises, or an item cannot be pickled or decoded, nothing ends.

    A worker that died is replaced: the new process begins the epoch from the same assignment and
    continues with the first item that was not received (`Producer.items`). Changes that `ask` made
    in the dead worker are lost.

    If a signal handler raises (Ctrl-C) in ``next``, no item was taken, and the next call returns
    it. If one raises in `begin`, no epoch is under way. A handler that takes items or begins an
    epoch in the middle of another call gets RuntimeError.

    One thread at a time may call methods; any may call `interrupt` and `close`.
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
        """Begin an epoch in every worker, and ask for items ahead. An earlier epoch is dropped.

        Parameters
        ----------
        assignments : sequence
            The argument of each worker's ``begin``, one for each worker, pickled, of any size.
        keys : iterator, optional
            The items are ``producer.make(key)`` of these, instead of ``producer.items(start)``. A
            key is anything that can be pickled. `prefetch` keys for each worker are drawn here, and
            exactly one more before each item is returned or raised. The iterator runs in the
            calling thread. Its exception ends the epoch: it is raised here, or once, after the
            items of the keys before.
        ordered : bool
            If False, items come as they become ready, the oldest first.
        assign : 'turn' or 'free'
            'turn': keys go to the workers in turn; with ``ordered=False``, to the next one that has
            fewer than `prefetch` keys whose items were not taken. 'free': a key goes to the worker
            with the fewest keys to work on.
        first : int
            The worker that comes first, both in getting keys and in ``iter``.

        Returns
        -------
        list
            The replies of the workers' ``begin``, in the order of the workers. It is empty with
            `keys`: no reply is awaited, and an exception of ``begin`` is raised instead of an item.

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
            raise TypeError(f"keys={keys!r} is not an iterator; give iter(keys)")
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

        A worker makes the call before the items that it was asked for but has not begun.

        Parameters
        ----------
        method : str
        *args : object
            The arguments, pickled.
        worker : int, optional
            The number of the worker to ask, by default all workers.
        behind : bool
            Call after all items that were asked for are made. A worker that answered makes no item
            until one is taken.

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
            The method raised it. The worker's stream is then over, but not an epoch of keys.
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
        """The number of the worker whose item was returned last."""
        worker: int = self._feed.latest
        return worker

    @property
    def glance(self) -> Callable[[], Any]:
        """Return the next item of an ordered epoch of keys without taking it, or None.

        It is None if that item is not ready. No key is drawn. See `Feed.glance`.
        """
        return self._feed.glance

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the epoch: one item of each worker in turn, or the items of the keys.

        Workers without items are left out. With ``ordered=False``, items come as they become ready.
        """
        self._feed.check(self._feed.generation)
        return FeedIterator(self._feed, self._feed.generation, self)

    def interrupt(self) -> None:
        """End the epoch: it gives no more items. A call that waits raises InterruptedError."""
        self._run.interrupt()

    def close(self) -> None:
        """Stop the workers within a bounded time. You can call it twice."""
        self._run.close()

    def stats(self) -> Stats:
        """Return counts and times so far. Each item is a batch; `naming` counts its samples."""
        return self._run.pool.stats()

    def pids(self) -> list[int | None]:
        """Process ids of the workers, in their order, each None until the process has started."""
        supervisor = self._run.pool.supervisor
        return [] if supervisor is None else supervisor.pids()

    def processes(self, *, wait: bool = False) -> dict[int, Child]:
        """Latest process of each worker, by the worker's number. It may have ended.

        It is always the same dict, updated at each start, so its holder knows the processes even
        after the streams are gone. With `wait`, all are started on return, unless the streams end
        meanwhile.
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
