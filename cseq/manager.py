"""A manager: started, used in a `with`, finished; each start is a `Run`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from cseq import tracing
from cseq._lock import Hold, Lock, rest
from cseq.engine.pool import Pool
from cseq.engine.tickets.batches import Batches
from cseq.measure.stats import Stats
from cseq.order.place import Place
from cseq.runs import Run

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from cseq.arguments import Job
    from cseq.engine.crews.base import Crew
    from cseq.indexing.leaving import Skipped
    from cseq.measure.advice import Advice

__all__ = ["Manager", "pool_of"]


def pool_of(kind: str, job: Job) -> Pool[Batches]:
    """Make a pool that makes batches in processes, in threads, on a Ray fleet, or inline."""
    make: Callable[[Batches], Crew]
    if kind == "ray":
        from cseq.fleet.ray import FleetCrew, of_fleet

        job = of_fleet(job)
        make = partial(FleetCrew, fleet=job.worker)
    elif kind == "proc":
        from cseq.engine.crews.processes import ProcessCrew

        make = ProcessCrew
    elif kind == "thread":
        from cseq.engine.crews.threads import ThreadCrew

        make = ThreadCrew
    else:
        from cseq.engine.crews.inline import InlineCrew

        make = InlineCrew
    tickets = Batches(job)
    return Pool(make(tickets), tickets)


class Manager:
    """Has one run after another: its pool, the loop's place, and the lock around both.

    `_stats` and `_skipped` are the last run's while none runs; `_trace` is the last start's. The
    log names each of `_logged_causes` once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._run: Run[Batches] | None = None
        self._is_entered = False
        self._trace: tracing.Trace | None = None
        self._place = Place()
        self._stats = Stats()
        self._skipped: list[Skipped] = []
        self._logged_causes: set[str] = set()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: whether two share an order or workers is undefined."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied; make a manager in each process "
            "that needs one, with the same arguments, and call load_state_dict(state_dict()) to "
            "continue at the same place"
        )

    @property
    def _state(self) -> str:
        if self._run is None or self._run.is_ended:
            return "not started"
        return "in its own 'with'" if self._is_entered else "started"

    def _alone(self) -> Hold:
        """Hold the lock for a call that must not interrupt another one."""
        rest()
        if self._run is not None:
            self._run.lock.refuse_mine()
        self._lock.refuse_mine()
        return self._lock.hold()

    def _look(self) -> Hold:
        """Hold the lock to read what it protects; in the middle of a call, only if it is free.

        Its holder may be waiting for that very call.
        """
        within = self._run is not None and self._run.lock.is_mine
        return self._lock.hold(0 if within else -1)

    def _put_off(self, call: Callable[[], object]) -> bool:
        """Defer a call to the end of the call that this thread is in, if any."""
        run = self._run
        for lock in (self._lock,) if run is None else (self._lock, run.lock):
            if lock.is_mine:
                if run is not None:
                    run.interrupt()
                lock.put_off(call)
                return True
        return False

    def _open(self, pool: Pool[Batches]) -> None:
        """Start a pool, while nothing runs."""
        pool.logged_causes = self._logged_causes
        # The pool opens last: if a signal handler raises before, `_end` has a run to close.
        self._run = run = Run(pool)
        try:
            run.close_with(self)
            pool.open()
        except BaseException as error:
            self._end(error)
            raise

    def _started(self) -> Self:
        """Return the manager at the end of a start, unless a callback finished it meanwhile."""
        if self._run is None:
            raise InterruptedError("finish() was called while the manager was being started")
        return self

    def _present(self) -> Run[Batches]:
        """Return the run, for an iterator of this process."""
        run = self._run
        assert run is not None
        if not run.is_ours:
            raise OSError(
                "this manager was started by the process that forked this one; call "
                "start() here, or make another manager"
            )
        return run

    def finish(self) -> None:
        """Stop the workers within a bounded time. You can call it twice.

        A signal handler, an order or a destructor may call it in the middle of another call of the
        manager. It then only sets a mark: the other call takes no more batches and ends the run.

        While an exception propagates (Ctrl-C), workers get 0.5 s instead of 5 s to end their batch.

        Raises
        ------
        OSError
            It was called inside the manager's own ``with``, whose end calls it.
        """
        self._refuse_inside_with("finish")
        if not self._put_off(self.finish):
            with self._lock.hold():
                self._refuse_inside_with("finish")
                self._end()

    def _begin_trace(self, path: str | os.PathLike[str] | None, rank: int) -> None:
        """Record until `_end` if there is a path. Nothing runs yet."""
        if path is not None:
            self._trace = trace = tracing.Trace(path, rank=rank)
            trace.begin_recording()

    def _end(self, ended: BaseException | None = None) -> None:
        """End the run, if any. If a signal handler raises here, call it again to go on.

        `ended` is the exception that propagates.
        """
        self._is_entered = False
        run = self._run
        if run is not None:
            self._place.keep()
            self._stats, self._skipped = run.pool.stats(), run.pool.tickets.skipped
            run.close()
            self._run = None
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.end_recording(ended)

    def _refuse_inside_with(self, verb: str) -> None:
        """Raise OSError inside the manager's own ``with``, which needs the run."""
        if self._is_entered:
            raise OSError(
                f"{verb}() inside the manager's own 'with': its end finishes the manager; leave "
                "the block first"
            )

    def __enter__(self) -> Self:
        with self._lock.hold():
            if self._state != "started":
                raise OSError(
                    f"'with' needs a manager that was just started, but this one is "
                    f"{self._state}; write: with manager.start() as m:"
                )
            self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # This comes before any call: `finish` has to work after an interrupt.
        self._is_entered = False
        if not self._put_off(self.finish):
            with self._lock.hold():
                self._end(error)

    def stats(self) -> Stats:
        """Return counts and times since the last start.

        Returns
        -------
        Stats
            A snapshot: numbers of batches, seconds, and what limits the rate (`Stats.bottleneck`).

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null")
        >>> with manager.start_test() as batches:
        ...     count = sum(1 for _ in batches)
        ...     manager.stats().batches
        4
        """
        with self._look():
            stats = self._stats if self._run is None else self._run.pool.stats()
            return replace(stats, source_tokens=self._count_tokens())

    def _count_tokens(self) -> dict[str, int]:
        """Return the tokens of each source that the loop had, if the manager knows them."""
        return {}

    def advice(self, since: Stats | None = None) -> Advice:
        """Return why the loop waits, since the last start, and what helps.

        Parameters
        ----------
        since : Stats, optional
            An earlier result of `stats` in this run. Only what came after it counts.

        Returns
        -------
        Advice
            Print it, or read its `cause` (a word) and its `change` (the arguments to change).

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null")
        >>> with manager.start_test() as batches:
        ...     count = sum(1 for _ in batches)
        ...     print(manager.advice())
        inline: num_workers=0 (or test mode): the loop makes its batches itself → num_workers=2.
        """
        now = self.stats()
        return (now if since is None else now.since(since)).advice()

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Write an HTML page about the run: why the loop waited, and what would help.

        It is about the present run, or else the last one. The page needs no script and no network,
        and you can print it.

        Parameters
        ----------
        path : str or path
            The file to write. An existing one is replaced.
        title : str, optional
            The page's heading, by default the script's name.

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null")
        >>> with manager.start_test() as batches:
        ...     count = sum(1 for _ in batches)
        >>> manager.report("loader.html", title="eight numbers")
        """
        from cseq.report import page

        name, _, facts = repr(self).removesuffix(")").partition("(")
        page.write(path, [page.Part(name, facts, self.stats(), has_remake=True)], title)

    @property
    def skipped(self) -> list[Skipped]:
        """The samples and whole batches that ``on_error='skip'`` left out since the last start.

        The list has the latest 1000, each with ``epoch``, ``batch``, ``sample`` (or None for a
        whole batch), ``error`` and ``indices``. ``stats().skips`` counts every such batch.
        """
        with self._look():
            return list(self._skipped) if self._run is None else self._run.pool.tickets.skipped
