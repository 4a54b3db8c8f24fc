"""MSequence: its arguments, epochs and states."""

from __future__ import annotations

import typing
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic

from cseq import arguments
from cseq.check import choice, flag, integer
from cseq.converter import output as outputs
from cseq.engine import remake as remaking
from cseq.engine._feed import FeedIterator
from cseq.manager import Manager, pool_of
from cseq.options import WorkerOptions
from cseq.order import checkpoint
from cseq.order import shard as shards
from cseq.order.base import kind
from cseq.order.place import Now, Place
from cseq.order.sampler import RankSampler, Sampler
from cseq.order.shuffled import Sequential, Shuffled
from cseq.order.tally import Tally

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from typing import Literal

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self, TypeVar

    from cseq.converter.output import Output
    from cseq.engine.remake import Remade
    from cseq.order.base import Order
    from cseq.order.shard import Given

    # The type of a batch.
    B_co = TypeVar("B_co", covariant=True, default=Any)
else:
    B_co = typing.TypeVar("B_co", covariant=True)

__all__ = ["MSequence"]

MOST_EPOCH = 2**64 - 1


class MSequence(Manager, Generic[B_co]):
    """Base class for managers, which deliver batches from workers to a loop in order.

    By default, each epoch contains every sample once.

    Parameters
    ----------
    worker : class, callable or indexer
        Creates an indexer: an object with ``__getitem__(indices) -> batch``, where `indices` is a
        new one-dimensional ``int64`` array. A class or other callable is called without
        arguments once per worker process or thread (one thread at a time). An object that already
        has ``__getitem__``, such as an array, is used as the indexer: each process gets a copy, and
        threads share the object. A torch ``Dataset`` or Dataset class is passed to `from_dataset`.
        If the indexer has a ``close()`` method, the method is called when the worker exits.
    dset_size : int or one-dimensional array or list of int, optional
        The number of samples, or an array of their indices (never modified). Defaults to
        ``len(worker)`` or the number of samples in `order`.
    num_workers : int or 'auto'
        The number of worker processes or threads. With 0, `start` behaves like `start_test`. With
        'auto', cseq adjusts the number during the run (docs/how-to/auto.md).
    num_converters : int, optional
        The number of threads that move batches to CUDA, at most `num_workers`, or 0 without CUDA.
        Defaults to 1 for processes, otherwise ``max(num_workers // 4, min(num_workers, 4))``.
    batch_size : int
        The number of samples per batch. The last batch may be smaller.
    buffer : int, 'auto' or None
        The number of batches to prefetch, from 1 to 16384. With 'auto', cseq adjusts the number
        during the run. Defaults to 10, or to 'auto' on a Ray cluster.
    shuffle : bool or 'feistel'
        True shuffles each epoch differently, depending only on the seed, the epoch and the number
        of samples. 'feistel' needs no table: use it for more than about 10**9 samples. False keeps
        the samples in order. The equivalents for ``order=`` are `Shuffled` and `Sequential`.
    thread_type : 'proc', 'thread' or 'ray'
        Whether workers are processes, threads, or processes on a Ray cluster.
    out_type : str, None, torch.device or callable
        ``'cuda'`` or ``'cuda:1'`` returns tensors on that device, or on the CPU without CUDA.
        ``'cpu'`` or None returns CPU tensors, or arrays if torch is not installed. ``'null'``
        returns the indexer's result unchanged. A callable is applied to every array.
    seed : int, optional
        An integer in [0, 2**64). By default, cseq draws a seed, available as the property `seed`.
    dtype : data type, 'auto' or None
        The type for numeric arrays with ``'cpu'`` and ``'cuda'``. None keeps each array's type, as
        needed for integer labels. 'auto' means None if `worker` comes from `from_dataset` or has
        its own order, and 'float32' otherwise.
    drop_last : bool
        Whether to drop the last batch if it is smaller than the others.
    ordered : bool
        Whether to deliver batches in order. If False, batches are delivered as they become ready.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How to start processes. Defaults to 'forkserver', or to 'spawn' on macOS and Windows.
    shard : (rank, world_size), process group, DeviceMesh, 'auto' or None
        This rank's part of every global batch of ``batch_size * world_size`` samples. All ranks get
        the same number of samples, so up to ``world_size - 1`` samples from the start of an epoch
        are repeated at its end. A torch process group or a one-dimensional DeviceMesh determines
        the rank of this process. 'auto' detects the shard at the first `start` or ``len`` from a
        Ray Train worker, an initialized torch process group, JAX, or the environment variables set
        by torchrun, Lightning, Open MPI, MPICH or srun. Later detections must agree with the first.
        If several ranks share a model, 'auto' raises an error; pass ``mesh["dp"]`` instead.
    on_error : 'raise' or 'skip'
        With 'raise', the loop raises the indexer's exception. With 'skip', cseq logs the exception
        and skips the batch, or only the sample with `from_dataset`. See `skipped` for a list.
    max_restarts : int
        The maximum number of dead worker processes to replace per epoch.
    timeout : float, optional
        The time limit for a batch in seconds, after which `on_timeout` applies. A worker can take
        ten times as long to start.
    on_timeout : 'raise' or 'restart'
        Whether to raise `WorkerTimeout`, or to replace the worker process and retry the batch.
    memory_limit : int, str or None
        The maximum amount of shared memory for batches that are still referenced, in bytes or as
        '2GiB'. Beyond the limit, batches are copied. ``buffer='auto'`` also stays within the limit.
        Defaults to a quarter of the memory of the machine or container, divided by the number of
        ranks on the machine.
    pad : bool
        If False, no samples are repeated, and some ranks may have one batch or one sample fewer
        than others.
    threads : int or None
        The number of threads that torch, OpenMP, OpenBLAS, MKL, numexpr and OpenCV use in each
        worker process. Environment variables such as ``OMP_NUM_THREADS`` take precedence. None
        keeps each library's default, usually all cores. Ignored with ``thread_type='thread'``.
    preload : bool
        Whether the fork server imports the modules that `worker` refers to, once for all workers.
        If one of these modules starts threads, opens files or initializes CUDA on import, or if
        `preload` is False, each worker imports the modules itself.
    order : Order, optional
        The order to use instead of `shuffle`. Defaults to the `order` attribute of `worker` if
        `worker` is an indexer and has this attribute. If the units of the order are batches
        (`Buckets`), omit `batch_size`. If the units are rows (`Packed`), `batch_size` counts rows.
    repeat : int or True
        The number of epochs in one ``iter()``. True means no limit. Workers start the next epoch
        while the loop uses the last batches of the current one. `max_restarts` covers all epochs.
    seed_globals : bool
        Whether to seed `random`, ``numpy.random`` and torch's CPU generator before each batch, from
        the same inputs as `rng`. Applies to worker processes and test mode, and only to modules
        already imported. Worker threads share these generators with the loop and do not seed them.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid. The message names the argument, its value, and the remedy.

    Examples
    --------
    >>> manager = cseq.MPSequence(np.arange(6), batch_size=4, shuffle=False, out_type="null")
    >>> with manager.start() as batches:
    ...     for batch in batches:
    ...         print(batch)
    [0 1 2 3]
    [4 5]
    """

    @arguments.explained
    def __init__(
        self,
        worker: arguments.Worker,
        dset_size: Any = None,
        num_workers: int | Literal["auto"] = 4,
        num_converters: int | None = None,
        batch_size: int = 32,
        buffer: int | Literal["auto"] | None = None,
        shuffle: arguments.Shuffle = True,  # noqa: FBT002
        thread_type: arguments.ThreadType = "proc",
        out_type: arguments.OutType = "cuda",
        seed: int | None = None,
        *,
        dtype: Any = "auto",
        drop_last: bool = False,
        ordered: bool = True,
        start_method: arguments.StartMethod | None = None,
        shard: Given = None,
        on_error: arguments.OnError = "raise",
        max_restarts: int = 100,
        timeout: float | None = None,
        on_timeout: arguments.OnTimeout = "raise",
        memory_limit: int | str | None = None,
        pad: bool = True,
        threads: int | None = 1,
        preload: bool = True,
        seed_globals: bool = True,
        order: Order | None = None,
        repeat: int | Literal[True] = 1,
    ) -> None:
        worker, fleet = arguments.fleet_of(worker, thread_type)
        self._thread_type: arguments.ThreadType = thread_type
        # The other ranks cannot know a seed that this rank draws.
        self._drawn = self._own_seed = seed is None
        self._shard = shards.check_shard(shard)
        self._automatic = self._shard is None
        part = self._shard or shards.ALONE
        order = arguments.order_of(worker, order, shuffle)
        sampler = arguments.sampler_of(
            worker, dset_size, order, batch_size, seed, drop_last, ordered, part, pad, repeat
        )
        options = WorkerOptions(
            start_method, max_restarts, timeout, on_timeout, memory_limit, threads, preload
        ).checked()
        if thread_type == "ray":
            arguments.refuse(options, seed_globals=seed_globals, given=fleet is not None)
        start, most, auto = arguments.sizes_of(num_workers, buffer, thread_type, sampler.words)
        self._job = arguments.Job(
            worker=worker,
            sampler=sampler,
            output=outputs.parse(out_type, arguments.dtype_of(worker, dtype)),
            num_workers=most.num_workers,
            num_converters=arguments.converters_of(start.num_workers, num_converters, thread_type),
            buffer=most.buffer,
            ordered=flag("ordered", ordered),
            on_error=choice("on_error", on_error, ("raise", "skip")),
            seed_globals=flag("seed_globals", seed_globals),
            options=options,
            start=start,
            auto=auto,
            fleet=fleet,
        )
        if self._own_seed:
            part.check_drawn(sampler.order)
        super().__init__()

    @property
    def _sampler(self) -> Sampler:
        return self._job.sampler

    def _settle_shard(self) -> None:
        """Resolve shard='auto'. Raise an error if the result differs from an earlier one."""
        if not self._automatic:
            return
        with self._lock.hold():
            shard = shards.agree(self._shard)
            if shard is self._shard:
                return
            if self._own_seed:
                shard.check_drawn(self._sampler.order)
            if shard.world_size > 1:
                changed = self._sampler.changed(rank=shard.rank, world_size=shard.world_size)
                self._job = self._job._replace(sampler=changed)
            self._shard = shard

    def __len__(self) -> int:
        """Return the number of batches in an epoch for this rank."""
        return self.length

    @property
    def length(self) -> int:
        """The number of batches in an epoch for this rank."""
        self._settle_shard()
        return self._sampler.length

    def __repr__(self) -> str:
        shown = ", ".join(
            value if name in ("shard", "place", "state") else f"{name}={value}"
            for name, value in self._facts()
        )
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        from cseq.report.page import in_notebook

        return in_notebook(self.stats(), [(type(self).__name__, ""), *self._facts()])

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield the names and values that `repr` shows."""
        with self._look():
            auto, run, sampler = self._job.auto, self._run, self._sampler
            order = sampler.order
            yield "samples", f"{self.dset_size:,}"
            if self._shard is not None:
                yield "batches", f"{sampler.length:,}"
            yield "batch_size", "the order's" if order.is_batch else f"{self.batch_size:,}"
            if not isinstance(order, (Sequential, Shuffled)):
                yield "order", repr(order)
            if sampler.drop_last and self._shard is not None:
                yield (
                    "drop_last",
                    f"{order.units - sampler.end():,} of {order.units:,} {kind(order)}",
                )
            workers, buffer = run.pool.tickets.size if run and any(auto) else self._job.start
            text = f"{workers} {arguments.KINDS[self._thread_type]}" if workers else "0"
            yield "workers", f"auto: {text}" if auto[0] else text
            if auto[1]:
                yield "buffer", f"auto: {buffer}"
            yield "seed", f"{self.seed} (drawn)" if self._own_seed else f"{self.seed}"
            if self._shard is None:
                yield "shard", "shard='auto'"
            elif self._shard.world_size > 1:
                yield "shard", f"rank {self._shard.rank} of {self._shard.world_size}"
            epoch, position, _ = self._place.now(sampler)
            yield "epoch", f"{epoch}"
            if position:
                yield "place", f"{position:,} {kind(order)} in"
            yield "state", self._state

    @property
    def dset_size(self) -> int:
        """The number of samples across all ranks. An epoch of an `order` may omit some of them."""
        return self._sampler.dset_size

    @property
    def batch_size(self) -> int:
        """The number of samples or rows per batch, or 1 if the units of the order are batches."""
        return self._sampler.batch_size

    @property
    def seed(self) -> int:
        """The seed that was passed or drawn."""
        return self._sampler.seed

    @property
    def use_cuda(self) -> bool:
        """Whether batches are tensors on a CUDA device. Always False if there is no CUDA device."""
        return outputs.resolve(self._job.output).use_cuda

    @property
    def epoch(self) -> int:
        """The epoch of the latest iterator.

        Before the first ``iter()``, and after `set_epoch` or `load_state_dict`, this is the next
        epoch.
        """
        return self._place.now(self._sampler).epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator, or of the latest one if it has yielded no batch yet.

        If `load_state_dict` set a position in this epoch, it is kept. A loop in the middle of this
        epoch continues, and if it has not finished by the next ``iter()``, the epoch starts over.

        Parameters
        ----------
        epoch : int
            An integer in [0, 2**64).

        Raises
        ------
        TypeError, ValueError
            If `epoch` is not an integer or is out of range.
        """
        number = integer("epoch", epoch, least=0, most=MOST_EPOCH)
        with self._alone():
            run, place = self._run, self._place
            now = place.now(self._sampler)
            if number == now.epoch and not now.is_over:
                place.again = place.begun
            elif run is None or not run.is_ours or place.progress is not run.pool.feed:
                self._place = place.moved(self._sampler, number)
            else:
                # If another thread holds the lock to fetch the first batch, keep its iterator.
                with run.lock.hold(0) as hold:
                    if place.begun or not hold.has:
                        self._place = place.moved(self._sampler, number)
                    else:
                        pool = run.pool
                        pool.tickets.begin_epoch(place, number, 0, pool.feed.generation)

    @property
    def sampler(self) -> RankSampler:
        """A sampler for frameworks, with `len` and `set_epoch` as in ``DistributedSampler``."""
        return RankSampler(self._count_samples, self.set_epoch)

    def _count_samples(self) -> int:
        self._settle_shard()
        return self._sampler.units

    @property
    def batch_sampler(self) -> None:
        """None, so that frameworks use `sampler`."""
        return

    def indices(self, epoch: int, batch: int) -> NDArray[np.int64]:
        """Return the sample indices of a batch from any epoch. See `remake` for the arguments."""
        sampler, consumed = self._any(epoch)
        return remaking.locate(sampler, epoch, batch, consumed)[0].samples(0)[0]

    def remake(self, epoch: int, batch: int) -> Remade:
        """Recreate a batch from any epoch in the calling thread, exactly as the loop received it.

        Use this to examine a slow or skipped batch with a debugger or profiler. The call creates a
        new indexer and does not affect the run.

        Parameters
        ----------
        epoch, batch : int
            The epoch and batch number, as in messages, `skipped` and `worker_info`. In a resumed
            epoch, earlier batches are counted as if they had the current batch size.

        Returns
        -------
        Remade
            `batch`, `indices`, `seconds`.

        Raises
        ------
        IndexError
            If `batch` is out of range for the epoch.
        Exception
            If the indexer raises an exception. The loop would raise the same exception.

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(8), batch_size=2, seed=1, out_type="null")
        >>> with manager.start() as batches:
        ...     got = list(batches)
        >>> manager.remake(0, 2).batch.tolist() == got[2].tolist()
        True
        """
        _, consumed = self._any(epoch)
        return remaking.remake(self._job, epoch, batch, consumed)

    def _any(self, epoch: int) -> tuple[Sampler, int]:
        """Return the sampler and the position where the epoch started (0 unless it was resumed)."""
        self._settle_shard()
        place = self._place
        return self._sampler, place.consumed if place.first == epoch else 0

    def start(
        self,
        compat: bool | None = None,  # noqa: FBT001 - its position is fixed
        *,
        trace: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Start the workers and return the manager. If a run is in progress, interrupt it.

        Parameters
        ----------
        compat : bool, optional
            If False, CUDA converters are processes instead of threads. This is slower, because the
            loop waits for the device whenever it opens a converter's memory.
        trace : str or path, optional
            The file to which to write a trace of every batch until `finish`. See `cseq.trace`.

        Returns
        -------
        MSequence
            The manager. Iterate over it, or use it in a ``with`` statement that calls `finish` on
            exit. The loop raises the indexer's exceptions, `WorkerDied` and `WorkerTimeout`.

        Raises
        ------
        TypeError
            If `worker` cannot be pickled for worker processes. The message says which part.
        OSError
            If the method is called inside the manager's own ``with``.
        """
        compat = None if compat is None else flag("compat", compat)
        with self._alone():
            self._start("start", self._job.output, self._kind, compat, trace)
        return self._started()

    @property
    def _kind(self) -> str:
        return self._thread_type if self._job.num_workers else "inline"

    def start_test(self, test_mode: arguments.TestMode = "default") -> Self:
        """Start test mode. The calling thread makes each batch on demand.

        Test mode uses no workers. The order and the results are the same as with `start`. The
        method returns the manager.

        Parameters
        ----------
        test_mode : {'default', 'cpu', 'numpy'}
            The type of batches: the same as with `start`, CPU tensors, or the indexer's results.

        Raises
        ------
        OSError
            If the method is called inside the manager's own ``with``.
        ValueError
            If `test_mode` is unknown.

        Examples
        --------
        >>> manager = cseq.MPSequence(np.arange(6), batch_size=4, shuffle=False, out_type="null")
        >>> with manager.start_test() as batches:
        ...     print(*batches)
        [0 1 2 3] [4 5]
        """
        output = outputs.for_test(self._job.output, test_mode)
        with self._alone():
            self._start("start_test", output, "inline", None)
        return self._started()

    def _start(
        self,
        verb: str,
        output: Output,
        kind: str,
        compat: bool | None,  # noqa: FBT001
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """End the current run, and start a pool."""
        self._refuse_inside_with(verb)
        self._settle_shard()
        self._end()
        resolved = outputs.resolve(output)
        converters = self._job.num_converters if resolved.use_cuda else 0
        job = self._job._replace(output=resolved, num_converters=converters, compat=compat)
        pool = pool_of(kind, job)
        self._begin_trace(trace, (self._shard or shards.find_shard()).rank)
        self._open(pool)

    def __iter__(self) -> Iterator[B_co]:
        """Return an iterator over the next epoch. Earlier iterators are interrupted.

        Before the first batch of an epoch, another ``iter()`` returns the same epoch and keeps
        prefetched batches.

        Raises
        ------
        OSError
            If the manager was started by a parent process that forked this one.
        """
        with self._alone():
            if self._run is None or self._run.is_ended:
                warnings.warn(
                    "iterating a manager that was not started starts it; call start() first, "
                    "or write: with manager.start() as m:",
                    UserWarning,
                    stacklevel=2,
                )
                self._start("start", self._job.output, self._kind, None)
            run = self._present()
            self._settle_shard()
            generation = run.interrupt()
            # While the lock is held, no batch can be delivered.
            with run.lock.hold():
                self._place = place = self._place.next(self._sampler)
                run.pool.tickets.begin_epoch(place, place.first, place.consumed, generation)
            return FeedIterator(run.pool.feed, generation, self)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Change the weights of the manager's `Mixture`, starting with the next batch.

        The weights apply until the next change. The epoch size stays the same, each source
        continues from its position, and prefetched batches are remade. With several ranks, call
        this method on every rank after the same batch. A state includes the weights. To load it,
        create the mixture with the same initial weights.

        Parameters
        ----------
        weights : dict of str to number
            The share of each source. Only the ratios matter, and 0 excludes a source.

        Raises
        ------
        TypeError
            If the order is neither a `Mixture` nor a `Balanced` order.
        ValueError
            If the weights do not match the sources, a step or window of `Balanced` is incomplete,
            or the next batch is undefined because of `repeat` or ``ordered=False``.

        Examples
        --------
        >>> mixture = cseq.Mixture(
        ...     {"a": cseq.Sequential(99), "b": cseq.Sequential(99)}, {"a": 1, "b": 0}, epoch_size=8
        ... )
        >>> manager = cseq.MPSequence(np.arange(198), order=mixture, batch_size=4, out_type="null")
        >>> with manager.start() as batches:
        ...     for batch in batches:
        ...         print(batch)
        ...         manager.reweigh({"a": 0, "b": 1})
        [0 1 2 3]
        [ 99 100 101 102]
        """
        from cseq.order.balanced import Balanced
        from cseq.order.mixture import Mixture

        with self._alone():
            self._settle_shard()
            job, run, place = self._job, self._run, self._place
            order = job.sampler.order
            if not isinstance(order, (Balanced, Mixture)):
                raise TypeError(f"order={order!r} has no weights; pass a cseq.Mixture")
            for name, value, plain in (
                ("ordered", job.ordered, True),
                ("repeat", job.sampler.repeat, 1),
            ):
                if value != plain:
                    raise ValueError(f"reweigh() does not support {name}={value!r}; omit {name}")
            pool = None
            if run is not None and run.is_ours and place.progress is run.pool.feed:
                pool = run.pool
            with nullcontext() if run is None or pool is None else run.lock.hold():
                epoch, position, is_over = place.now(job.sampler)
                at = (epoch + 1, 0) if is_over else (epoch, position)
                place.count_tokens(job.sampler, Now(epoch, position, is_over))
                sampler = job.sampler.changed(order=order.reweighed(weights, self.seed, *at))
                self._job = job._replace(sampler=sampler)
                if pool is not None:
                    pool.tickets.replan(sampler, place, is_over=is_over, position=position)

    def _count_tokens(self) -> dict[str, int]:
        return self._place.count_tokens(self._sampler, self._place.now(self._sampler))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop after the last batch that it received.

        Returns
        -------
        dict
            A few JSON values, identical on every rank. Batches that are ready but not yet
            delivered are not counted, so a resumed loop receives them.

        Raises
        ------
        ValueError
            If the method is called in the middle of an epoch with ``ordered=False``.
        """
        with self._look():
            place = self._place
            now = epoch, position, is_over = place.now(self._sampler)
            if is_over:
                epoch, position = epoch + 1, 0
            elif position != place.consumed and not self._job.ordered:
                raise ValueError(
                    "ordered=False delivers batches as they become ready, so a run cannot be "
                    "resumed in the middle of an epoch; save the state between epochs, or pass "
                    "ordered=True"
                )
            world_size = (self._shard or shards.find_shard()).world_size
            tokens = place.count_tokens(self._sampler, now)
            return checkpoint.make(self._sampler, world_size, epoch, position, tokens)

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Make the next ``iter()`` continue from a saved position.

        The number and kind of workers, `batch_size` and the number of ranks can differ: the current
        ranks share the rest of the epoch. A manager created without a seed uses the state's seed.

        Parameters
        ----------
        state : dict
            A result of `state_dict`, possibly saved as JSON or with `torch.save`. The manager keeps
            no reference to the dict.
        strict : bool
            If False, the data or the order can be different. The epoch then continues at the same
            position in the current order, and some samples may be repeated or missing.

        Raises
        ------
        TypeError
            If `state` is not a result of `state_dict`.
        ValueError
            If the state has a different seed, order or version. The message gives both values.
        OSError
            If the seed or the order would change inside the manager's own ``with``.

        Examples
        --------
        >>> def manager(workers):
        ...     return cseq.MPSequence(np.arange(8), num_workers=workers, batch_size=2,
        ...                            shuffle=False, out_type="null")
        >>> first = manager(1)
        >>> with first.start_test() as batches:
        ...     print(next(iter(batches)))
        ...     state = first.state_dict()
        [0 1]
        >>> second = manager(2)
        >>> second.load_state_dict(state)
        >>> with second.start_test() as batches:
        ...     print(*batches)
        [2 3] [4 5] [6 7]
        """
        with self._alone():
            sampler, epoch, consumed = checkpoint.load(
                state, self._sampler, any_seed=self._drawn, strict=flag("strict", strict)
            )
            tokens = checkpoint.tokens_of(state)
            if sampler is not self._sampler:
                self._refuse_inside_with("load_state_dict")
                self._end()
            elif self._run is not None:
                self._run.interrupt()
            job, place = self._job._replace(sampler=sampler), Place(epoch, consumed, Tally(tokens))
            # Assign both in one statement. A signal handler could run between two statements.
            self._place, self._job = place, job
            self._own_seed = False
