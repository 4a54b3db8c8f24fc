"""Base class for managers: starts and finishes runs."""

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
    """Create the pool for a job."""
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
    """Base class for managers: holds the current run and a lock.

    Between runs, `_stats` and `_skipped` describe the last run. `_logged_causes` lists the
    causes of waiting that have already been logged, because each is logged only once.
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
        """Raise TypeError, because two copies of a manager cannot share its workers."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied; make a manager in each process "
            "that needs one, with the same arguments, and call load_state_dict(state_dict()) to "
            "continue at the same position"
        )

    @property
    def _state(self) -> str:
        if self._run is None or self._run.is_ended:
            return "not started"
        return "in its own 'with'" if self._is_entered else "started"

    def _alone(self) -> Hold:
        """Hold the lock. Raise RuntimeError if this thread is in the middle of another call."""
        rest()
        if self._run is not None:
            self._run.lock.refuse_mine()
        self._lock.refuse_mine()
        return self._lock.hold()

    def _look(self) -> Hold:
        """Hold the lock to read state.

        If this thread already holds the run's lock, do not wait, because that could deadlock.
        """
        within = self._run is not None and self._run.lock.is_mine
        return self._lock.hold(0 if within else -1)

    def _put_off(self, call: Callable[[], object]) -> bool:
        """If this thread is in the middle of another call, defer `call` and return True."""
        run = self._run
        for lock in (self._lock,) if run is None else (self._lock, run.lock):
            if lock.is_mine:
                if run is not None:
                    run.interrupt()
                lock.put_off(call)
                return True
        return False

    def _open(self, pool: Pool[Batches]) -> None:
        """Open a pool. The previous run must have ended."""
        pool.logged_causes = self._logged_causes
        # Set `_run` before opening the pool, so that `_end` can close the pool after an exception.
        self._run = run = Run(pool)
        try:
            run.close_with(self)
            pool.open()
        except BaseException as error:
            self._end(error)
            raise

    def _started(self) -> Self:
        """Return the manager. Raise InterruptedError if `finish` was called during startup."""
        if self._run is None:
            raise InterruptedError("finish() was called while the manager was starting")
        return self

    def _present(self) -> Run[Batches]:
        """Return the current run. Raise OSError if a parent process started it."""
        run = self._run
        assert run is not None
        if not run.is_ours:
            raise OSError(
                "this manager was started by the process that forked this one; call "
                "start() here, or create another manager"
            )
        return run

    def finish(self) -> None:
        """Stop the workers within a bounded time. A second call has no effect.

        Workers have 5 s to finish their current batch, or 0.5 s if an exception is propagating
        (Ctrl-C). If this method is called during another call to the manager, for example by a
        signal handler, the run ends after that call.

        Raises
        ------
        OSError
            If the method is called inside the manager's own ``with``, which calls it on exit.
        """
        self._refuse_inside_with("finish")
        if not self._put_off(self.finish):
            with self._lock.hold():
                self._refuse_inside_with("finish")
                self._end()

    def _begin_trace(self, path: str | os.PathLike[str] | None, rank: int) -> None:
        """Start a trace if a path is given. Call this before starting the run."""
        if path is not None:
            self._trace = trace = tracing.Trace(path, rank=rank)
            trace.begin_recording()

    def _end(self, ended: BaseException | None = None) -> None:
        """End the run, if any. If a signal handler raises during this call, call it again."""
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
        """Raise OSError inside the manager's own ``with`` statement."""
        if self._is_entered:
            raise OSError(
                f"{verb}() was called inside the manager's own 'with' block, which finishes the "
                "manager on exit; leave the block first"
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
        # Clear the flag before any call, so that `finish` works after an interruption.
        self._is_entered = False
        if not self._put_off(self.finish):
            with self._lock.hold():
                self._end(error)

    def stats(self) -> Stats:
        """Return counts and timings since the last start.

        Returns
        -------
        Stats
            A snapshot of batch counts, timings, and the limiting factor (`Stats.bottleneck`).

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
        return {}

    def advice(self, since: Stats | None = None) -> Advice:
        """Explain why the loop is waiting, and suggest a change.

        Parameters
        ----------
        since : Stats, optional
            An earlier `stats()` result from this run. The advice then covers only later batches.

        Returns
        -------
        Advice
            Print the advice, or use its `cause` (one word) and `change` (the arguments to change).

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, out_type="null")
        >>> with manager.start_test() as batches:
        ...     count = sum(1 for _ in batches)
        ...     print(manager.advice())
        inline: num_workers=0 (or test mode): the loop makes its own batches → num_workers=2.
        """
        now = self.stats()
        return (now if since is None else now.since(since)).advice()

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Write an HTML report that shows why the loop waits.

        The report covers the current or the last run. The page contains no scripts, loads nothing
        from the network, and can be printed.

        Parameters
        ----------
        path : str or path
            The file to write. An existing file is replaced.
        title : str, optional
            The heading of the page. Defaults to the name of the script.

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
        """The samples and batches that ``on_error='skip'`` has skipped since the last start.

        The list contains the most recent 1000 entries, with the attributes ``epoch``, ``batch``,
        ``sample`` (None for a whole batch), ``error`` and ``indices``. The total number of skipped
        batches is ``stats().skips``.
        """
        with self._look():
            return list(self._skipped) if self._run is None else self._run.pool.tickets.skipped
