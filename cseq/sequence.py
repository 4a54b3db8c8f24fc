"""MSequence, MPSequence, MTSequence: start, iterate, finish."""

from __future__ import annotations

import enum
import inspect
import logging
import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from cseq import converter, indexer, payload
from cseq._core import ALGORITHM, BatchIterator
from cseq.arena import memory_limit_of
from cseq.check import choice, count, flag, seconds
from cseq.launcher import start_methods
from cseq.pools import Job, pool_of
from cseq.run import Run
from cseq.sampler import Sampler, resolve_shard
from cseq.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self, TypedDict, Unpack

    from cseq._core import Consumer
    from cseq.pools import Pool

    class Options(TypedDict, total=False):
        """The keywords of `MSequence` behind `seed`, for the type checker."""

        dtype: Any
        drop_last: bool
        ordered: bool
        start_method: str | None
        shard: tuple[int, int] | str | None
        on_error: str
        max_restarts: int
        timeout: float | None
        on_timeout: str
        memory_limit: int | str | None


__all__ = ["MPSequence", "MSequence", "MTSequence"]

log = logging.getLogger("cseq")


STATE_VERSION = 1
MOST_WORKERS = 2**15 - 1  # with as many converters, they can be numbered in 16 bits
MOST_BATCH = 2**32 - 1  # a ticket counts its samples in 32 bits
MOST_BUFFER = 2**20
MOST_EPOCH = 2**64 - 1


class State(enum.Enum):
    """Where a manager stands.

    ::

        IDLE ──start──► RUNNING ──with──► ENTERED
          ▲               │  ▲ └─start─┘     │
          └────finish─────┘  └───────────────┼── (never: leaving the `with` finishes)
          └──────────────leaving─────────────┘
    """

    IDLE = "not started"
    RUNNING = "started"
    ENTERED = "in its own 'with'"


ALLOWED = {
    State.IDLE: {State.RUNNING, State.IDLE},
    State.RUNNING: {State.RUNNING, State.ENTERED, State.IDLE},
    State.ENTERED: {State.IDLE},
}


class Epoch(BatchIterator):
    """Iterator over the batches of one epoch; a newer one, a start or a finish interrupts it.

    Threads may share it: each batch goes to one of them.
    """

    __slots__ = ("_manager",)

    def __init__(
        self,
        run: Run[Pool],
        consumer: Consumer | None,
        following: Callable[[], Any],
        manager: MSequence,
    ) -> None:
        del run, consumer, following  # are the base class's
        self._manager = manager  # keeps it, and with it the pool, alive


class MSequence:
    """Feeds a training loop with batches: in order, each sample once an epoch.

    Parameters
    ----------
    worker : class, callable or indexer
        A class, or any callable without arguments, that makes an indexer: an object with
        ``__getitem__(indices) -> batch``, where `indices` is a one-dimensional ``int64`` array of
        its own. Called once in every worker process or thread. An object that already has
        ``__getitem__`` (an array, a data set) is taken too, and copied to the processes. If the
        indexer has ``close()``, it is called when its worker ends.
    dset_size : int or one-dimensional array or list of int
        Number of samples, or the samples' indices themselves (never written to).
    num_workers : int
        Workers that index.
    num_converters : int, optional
        Workers that convert, where CUDA is in use. None: ``max(num_workers // 4,
        min(num_workers, 4))``.
    batch_size : int
        Samples in a batch; the last one may be smaller.
    buffer : int
        The most batches in flight or waiting.
    shuffle : bool
        Go through each epoch in an order of its own, a pure function of (seed, epoch).
    thread_type : 'proc' or 'thread'
        Workers are processes or threads.
    out_type : str, None, torch.device or callable
        ``'cuda'``, ``'cuda:1'``: tensors on that device (on the CPU where there is no CUDA);
        ``'cpu'`` or None: CPU tensors (arrays where there is no torch); ``'null'``: what the
        indexer returned; a callable is applied to every array.
    seed : int, optional
        In [0, 2**64). None: one is drawn; see `seed`.
    dtype : data type or None
        What numeric arrays are converted to for ``'cpu'`` and ``'cuda'``; None keeps their own.
    drop_last : bool
        Leave out the last batch if it is short.
    ordered : bool
        False: deliver batches as they are finished.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How processes are started; None: forkserver where it exists.
    shard : (rank, world_size), 'auto' or None
        This rank's part of every global batch of ``batch_size * world_size`` samples. The tail,
        too, gives every rank equally many: up to ``world_size - 1`` samples from the beginning of
        the epoch are repeated in it. 'auto' asks an initialised torch process group, else
        torchrun's environment.
    on_error : 'raise' or 'skip'
        What an exception in the indexer does: comes out of the loop, or is logged and its batch
        left out.
    max_restarts : int
        Worker processes that may die and be replaced in an epoch.
    timeout : float, optional
        Seconds that a batch may take before `on_timeout`; a worker may take ten times as long to
        get ready.
    on_timeout : 'raise' or 'restart'
        Raise `WorkerTimeout`, or replace the worker process and make the batch again.
    memory_limit : int, str or None
        Most shared memory that batches in the user's hands may hold ('2GiB'; None: a quarter of
        the machine's or the container's); beyond it, batches are copied out of it.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong: which one, its value, and what to do.
    """

    def __init__(
        self,
        worker: Any,
        dset_size: Any,
        num_workers: int = 4,
        num_converters: int | None = None,
        batch_size: int = 32,
        buffer: int = 10,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - the position is fixed
        thread_type: str = "proc",
        out_type: Any = "cuda",
        seed: int | None = None,
        *,
        dtype: Any = "float32",
        drop_last: bool = False,
        ordered: bool = True,
        start_method: str | None = None,
        shard: tuple[int, int] | str | None = None,
        on_error: str = "raise",
        max_restarts: int = 100,
        timeout: float | None = None,
        on_timeout: str = "raise",
        memory_limit: int | str | None = None,
    ) -> None:
        if thread_type not in ("proc", "thread"):
            raise TypeError(f"thread_type={thread_type!r} is unknown; give 'proc' or 'thread'")
        indexer.check_worker(worker)
        self._processes = thread_type == "proc"
        workers = count("num_workers", num_workers, most=MOST_WORKERS)
        converters = self._count_converters(workers, num_converters)
        rank, world_size = resolve_shard(shard)
        if seed is None and world_size > 1 and shuffle:
            raise ValueError(
                f"shard={shard!r} needs a seed: ranks that draw their own would go through "
                "different orders; give all of them the same one"
            )
        self._drawn = seed is None
        self._sampler = Sampler(
            dset_size,
            batch_size=count("batch_size", batch_size, most=MOST_BATCH),
            shuffle=flag("shuffle", shuffle),
            seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
            drop_last=flag("drop_last", drop_last),
            rank=rank,
            world_size=world_size,
        )
        self._output = converter.parse(out_type, dtype)
        self._job = Job(
            worker=worker,
            sampler=self._sampler,
            output=self._output,
            seed=self._sampler.seed,
            num_workers=workers,
            num_converters=converters,
            batch_size=self._sampler.batch_size,
            buffer=count("buffer", buffer, most=MOST_BUFFER),
            ordered=flag("ordered", ordered),
            compat=None,
            start_method=choice("start_method", start_method, (None, *start_methods())),
            on_error=choice("on_error", on_error, ("raise", "skip")),
            max_restarts=count("max_restarts", max_restarts, least=0),
            timeout=seconds("timeout", timeout),
            on_timeout=choice("on_timeout", on_timeout, ("raise", "restart")),
            memory_limit=memory_limit_of(memory_limit),
        )
        if self._processes and start_method != "fork":
            payload.check(worker)
        self._state = State.IDLE
        self._lock = threading.RLock()  # around changes of state
        self._run: Run[Pool] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._epoch = 0
        self._begun = False  # _epoch has begun, so the next iter() takes the one after it
        self._consumed = 0  # where in _epoch the next iter() begins, if it has not begun
        self._stats = Stats()  # of the last run, when nothing runs
        self._skipped: list[tuple[int, int, str]] = []
        self._position = 0  # samples of _epoch so far, when it has begun and nothing runs

    @staticmethod
    def _count_converters(workers: int, converters: int | None) -> int:
        """Check `num_converters`."""
        if converters is None:
            return converter.default_converters(workers)
        number = count("num_converters", converters)
        if number > workers:
            raise ValueError(
                f"num_converters={number} exceeds num_workers={workers}; give at most as many, "
                "or None"
            )
        return number

    # -- what it is

    def __len__(self) -> int:
        """Batches in an epoch, for this rank."""
        return self._sampler.length

    @property
    def length(self) -> int:
        """Batches in an epoch, for this rank."""
        return self._sampler.length

    @property
    def dset_size(self) -> int:
        """Samples in an epoch, over all ranks."""
        return self._sampler.dset_size

    @property
    def batch_size(self) -> int:
        """Samples in a batch."""
        return self._job.batch_size

    @property
    def seed(self) -> int:
        """The seed, given or drawn."""
        return self._job.seed

    @property
    def use_cuda(self) -> bool:
        """Whether batches are tensors on a CUDA device (this machine may lack one)."""
        return converter.resolve(self._output).use_cuda

    @property
    def epoch(self) -> int:
        """The epoch that the latest ``iter()`` began, or else the one the next begins."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin this epoch, whatever the last one was."""
        self._epoch = count("epoch", epoch, least=0, most=MOST_EPOCH)
        self._begun = False
        self._consumed = 0

    # -- start, iterate, finish

    def start(self, compat: bool | None = None) -> Self:  # noqa: FBT001 - its position is fixed
        """Start the workers; interrupts what was started before.

        Parameters
        ----------
        compat : bool, optional
            Convert for CUDA in threads instead of processes. None: where the system wants it.

        Raises
        ------
        OSError
            Inside the manager's own ``with``.
        """
        if compat is not None:
            compat = flag("compat", compat)
        return self._start(
            "start", self._output, "process" if self._processes else "thread", compat
        )

    def start_test(self, test_mode: str = "default") -> Self:
        """Make every batch in the loop itself: same order, same results, nothing in parallel.

        Parameters
        ----------
        test_mode : {'default', 'cpu', 'numpy'}
            Batches as `start` gives them, CPU tensors, or what the indexer returned.

        Raises
        ------
        OSError
            Inside the manager's own ``with``.
        ValueError
            `test_mode` is unknown.
        """
        output = converter.for_test(self._output, test_mode)
        return self._start("start_test", output, "inline", None)

    def _start(
        self,
        verb: str,
        output: converter.Output,
        kind: str,
        compat: bool | None,  # noqa: FBT001
    ) -> Self:
        """End what runs, and start a pool."""
        with self._lock:
            self._refuse_inside_with(verb)
            make = pool_of(kind)
            self._end()
            resolved = converter.resolve(output)
            converters = self._job.num_converters if resolved.use_cuda else 0
            job = self._job._replace(output=resolved, num_converters=converters, compat=compat)
            try:
                self._run = Run(make(job))
                self._finalizer = weakref.finalize(self, Run.close, self._run)
                self._run.pool.open()  # not before: a signal handler may raise anywhere
                self._change(State.RUNNING)
            except BaseException:
                self._end()
                raise
        return self

    def finish(self) -> None:
        """End the workers; returns within a bounded time. Twice is fine.

        Raises
        ------
        OSError
            Inside the manager's own ``with``, whose end does this.
        """
        with self._lock:
            self._refuse_inside_with("finish")
            self._end()

    def _end(self) -> None:
        """End what runs, if anything does."""
        if self._run is not None:
            pool = self._run.pool
            self._position = pool.position
            self._stats, self._skipped = pool.stats(), pool.skipped
            self._run.close()
            self._run = None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        self._change(State.IDLE)

    def _refuse_inside_with(self, verb: str) -> None:
        """Refuse what would pull the rug from under a ``with`` block."""
        if self._state is State.ENTERED:
            raise OSError(
                f"{verb}() inside the manager's own 'with': its end finishes the manager; leave "
                "the block first"
            )

    def _change(self, state: State) -> None:
        """Change the state: the one place where that is done."""
        if state not in ALLOWED[self._state]:
            raise RuntimeError(f"a manager cannot go from {self._state} to {state}")
        self._state = state

    def __enter__(self) -> Self:
        with self._lock:
            if self._state is not State.RUNNING:
                raise OSError(
                    f"'with' needs a manager that was just started, this one is "
                    f"{self._state.value}; write: with manager.start() as m:"
                )
            self._change(State.ENTERED)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._end()

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch; an iterator of an earlier one is interrupted."""
        with self._lock:
            if self._run is None:
                warnings.warn(
                    "iterating a manager that was not started starts it; call start() first, "
                    "or write: with manager.start() as m:",
                    UserWarning,
                    stacklevel=2,
                )
                self.start()
            run = self._run
            assert run is not None
            if not run.is_ours:
                raise OSError(
                    "this manager was started by the process that forked this one; call start() "
                    "here, or make a manager of its own"
                )
            epoch = self._epoch + 1 if self._begun else self._epoch
            run.interrupt()
            self._epoch, self._begun = epoch, False  # until it has
            with run.turn:
                run.pool.begin(epoch, self._consumed)
            self._begun, self._consumed = True, 0
            return Epoch(run, run.pool.consumer, run.pool.next, self)

    # -- leave off and resume

    def state_dict(self) -> dict[str, Any]:
        """Say where the loop is, after the last batch delivered to it.

        A handful of JSON values, the same on every rank, constant in size and time.

        Raises
        ------
        ValueError
            In the middle of an epoch with ``ordered=False``, whose place no number says.
        """
        with self._lock:
            epoch, consumed = self._place()
            job = self._job
            return {
                "version": STATE_VERSION,
                "algorithm": ALGORITHM,
                "seed": job.seed,
                "shuffle": self._sampler.shuffle,
                "dset_size": self.dset_size,
                "batch_size": job.batch_size,
                "world_size": self._sampler.world_size,
                "drop_last": self._sampler.drop_last,
                "epoch": epoch,
                "consumed": consumed,
            }

    def _place(self) -> tuple[int, int]:
        """Return the epoch, and the samples of it that all ranks together have had."""
        if not self._begun:
            return self._epoch, self._consumed
        position = self._position if self._run is None else self._run.pool.position
        if position == self._sampler.position(len(self._sampler)):
            return self._epoch + 1, 0
        if position != self._sampler.position(0) and not self._job.ordered:
            raise ValueError(
                "ordered=False delivers batches as they are finished, so a place in the middle of "
                "an epoch cannot be resumed; take the state between epochs, or use ordered=True"
            )
        return self._epoch, position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` go on where `state_dict` was taken.

        Number and kind of workers, `batch_size` and the number of ranks may be others: what is
        left of the epoch is dealt anew. A seed that was drawn gives way to the state's.

        Raises
        ------
        ValueError
            The state is of another data set size, seed, order or version; both are named.
        """
        with self._lock:
            epoch, consumed = self._check_state(state)
            if state["seed"] != self._job.seed:
                self._refuse_inside_with("load_state_dict")
            if self._run is not None:
                self._run.interrupt()  # what is under way is not the place any more
            if state["seed"] != self._job.seed:
                self._sampler = self._sampler.reseeded(state["seed"])
                self._job = self._job._replace(sampler=self._sampler, seed=state["seed"])
                self._end()
            self._epoch, self._consumed, self._begun = epoch, consumed, False

    def _check_state(self, state: dict[str, Any]) -> tuple[int, int]:
        """Refuse a state of something else; return its epoch and its place in it."""
        ours = {
            "version": STATE_VERSION,
            "algorithm": ALGORITHM,
            "dset_size": self.dset_size,
            "shuffle": self._sampler.shuffle,
        }
        if not self._drawn:
            ours["seed"] = self._job.seed
        missing = {*ours, "seed", "epoch", "consumed"} - state.keys()
        if missing:
            raise ValueError(f"the state lacks {sorted(missing)}; give what state_dict() returned")
        for name, value in ours.items():
            if state[name] != value:
                raise ValueError(
                    f"the state has {name}={state[name]!r}, this manager has {name}={value!r}; "
                    "make it with the same, or do not load this state"
                )
        epoch = count("epoch", state["epoch"], least=0)
        consumed = count("consumed", state["consumed"], least=0)
        if consumed > self.dset_size:
            raise ValueError(f"the state has consumed={consumed} of {self.dset_size} samples")
        return epoch, consumed

    # -- what it did

    def stats(self) -> Stats:
        """Count what was done since the last start, and tell who waits for whom."""
        with self._lock:
            return self._stats if self._run is None else self._run.pool.stats()

    @property
    def skipped(self) -> list[tuple[int, int, str]]:
        """Batches that ``on_error='skip'`` left out since the last start: epoch, batch, error."""
        with self._lock:
            return list(self._skipped if self._run is None else self._run.pool.skipped)


class MPSequence(MSequence):
    """An `MSequence` of worker processes: for indexers that compute in Python.

    Takes the parameters of `MSequence` but ``thread_type``.
    """

    def __init__(
        self,
        worker: Any,
        dset_size: Any,
        num_workers: int = 4,
        num_converters: int | None = None,
        batch_size: int = 32,
        buffer: int = 10,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - the position is fixed
        out_type: Any = "cuda",
        seed: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            worker, dset_size, num_workers, num_converters, batch_size, buffer, shuffle,
            "proc", out_type, seed, **options,
        )  # fmt: skip


class MTSequence(MSequence):
    """An `MSequence` of threads: for indexers that read, wait, or compute without the GIL.

    Takes the parameters of `MSequence` but ``thread_type``.
    """

    def __init__(
        self,
        worker: Any,
        dset_size: Any,
        num_workers: int = 4,
        num_converters: int | None = None,
        batch_size: int = 32,
        buffer: int = 10,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - the position is fixed
        out_type: Any = "cuda",
        seed: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            worker, dset_size, num_workers, num_converters, batch_size, buffer, shuffle,
            "thread", out_type, seed, **options,
        )  # fmt: skip


def _signature_without(name: str) -> inspect.Signature:
    """Return the signature of `MSequence` without one parameter, for help and completion."""
    signature = inspect.signature(MSequence)
    return signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name != name]
    )


for _kind in (MPSequence, MTSequence):
    setattr(_kind, "__signature__", _signature_without("thread_type"))  # noqa: B010 - for mypy
