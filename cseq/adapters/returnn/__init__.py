"""A replacement for RETURNN's `MultiProcDataset` with cseq's worker processes.

It wraps any `RETURNN <https://github.com/rwth-i6/returnn>`_ dataset. Each worker process creates
its own copy. Worker 0 determines each epoch's order, each worker prefetches its share, and the
sequences are delivered in order.

::

    MultiProcDataset ── order? ──► worker 0: get_current_seq_order() ──► order
        │  begin: order[w::N], to each worker w
        ▼
    worker 0: seq 0, seq N, …   ──┐
    worker 1: seq 1, seq N+1, … ──┼── round robin ──► load_seqs, get_data, …
        ⋮                         │
    worker N-1: …               ──┘

With ``sharding_method='dedicated'``, each worker's dataset is one of N shards, and the round robin
skips exhausted workers.
"""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from cseq.errors import WorkerDied, WorkerTimeout
from cseq.options import MAX_RESTARTS
from cseq.stream import Streams

try:
    from returnn.datasets import basic
    from returnn.datasets.basic import DatasetSeq, extend_dataset_dict_from_parent_dataset
    from returnn.datasets.cached2 import CachedDataset2
    from returnn.util import NumbersDict
except ModuleNotFoundError as missing:
    if missing.name != "returnn":
        raise
    raise ModuleNotFoundError(
        "cseq.adapters.returnn needs RETURNN; install it with: pip install 'cseq-loader[returnn]'",
        name="returnn",
    ) from missing

from cseq.adapters.returnn.worker import CONFIGURATION, OrderRequest, SequenceProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cseq.adapters.returnn.worker import Loaded
    from cseq.engine.tickets.items import Items
    from cseq.measure.stats import Stats
    from cseq.runs import Run

__all__ = ["MultiProcDataset", "install"]

SHARDING_METHODS = ("seq_order", "dedicated")

# `install` itself once it has been called, so that workers also call it.
_installed: Callable[[], None] | None = None


def install() -> None:
    """Register this class as RETURNN's ``"MultiProcDataset"``.

    Call this before the first dataset is created. It applies to this process and its workers.
    """
    global _installed
    from returnn.datasets import multi_proc

    multi_proc.MultiProcDataset = MultiProcDataset
    # RETURNN fills this cache on the first lookup.
    if basic._dataset_classes:
        basic._dataset_classes["MultiProcDataset"] = MultiProcDataset
    _installed = install


class MultiProcDataset(CachedDataset2):  # type: ignore[misc]
    """A dataset whose sequences are loaded by worker processes.

    It replaces ``returnn.datasets.multi_proc.MultiProcDataset``, with the same arguments, sequences
    and order.

    Parameters
    ----------
    dataset : dict
        The configuration of the dataset that every worker creates.
    num_workers : int
        The number of worker processes.
    buffer_size : int
        The number of sequences that each worker prefetches.
    sharding_method : {'seq_order', 'dedicated'}
        'seq_order' keeps the order of the wrapped dataset, if it supports `get_current_seq_order`.
        With 'dedicated', each worker's dataset is one of `num_workers` shards, and the order
        depends on the number of workers.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How to start the workers. Defaults to cseq's default on this system.
    max_restarts : int
        The maximum number of workers to replace per epoch. The next death raises `cseq.WorkerDied`.
    timeout : float or None
        The time limit in seconds for loading a sequence, answering a query or creating the dataset.
    on_timeout : {'raise', 'restart'}
        Whether to raise `cseq.WorkerTimeout`, or to replace the worker and try again.
    **kwargs
        General dataset arguments (``name``, ``seq_ordering``, …) for the wrapped dataset. Entries
        in `dataset` take precedence.

    Raises
    ------
    AssertionError
        If `num_workers` or `buffer_size` is less than 1.
    ValueError
        If `sharding_method` is unknown.

    Notes
    -----
    Workers start on first use. Exceptions in a worker are raised in this process, with the worker's
    traceback. Dead workers are replaced, and their prefetched sequences are loaded again.

    Workers seed the global generators of Python, NumPy and torch before every sequence, based on
    `random_seed_offset`, the epoch and the position. With 'seq_order', augmentation is therefore
    the same for any number of workers. The ``rng`` of a `PostprocessingDataset` is seeded in the
    same way.

    Any exception in `load_seqs` ends the epoch, even one from a signal handler.
    """

    num_inputs: Any
    num_outputs: Any
    labels: Any
    expected_load_seq_start: int
    _num_seqs: int | float | None

    def __init__(
        self,
        dataset: dict[str, Any],
        num_workers: int,
        buffer_size: int,
        sharding_method: str = "seq_order",
        _meta_info_cache: dict[str, Any] | None = None,
        *,
        start_method: str | None = None,
        max_restarts: int = MAX_RESTARTS,
        timeout: float | None = None,
        on_timeout: str = "raise",
        **kwargs: Any,
    ) -> None:
        self._streams: Streams | None = None
        super().__init__(**kwargs)
        assert num_workers > 0, f"num_workers={num_workers!r} is below 1; pass at least 1"
        assert buffer_size > 0, f"buffer_size={buffer_size!r} is below 1; pass at least 1"
        if sharding_method not in SHARDING_METHODS:
            raise ValueError(
                f"invalid sharding_method {sharding_method!r}, must be seq_order or dedicated"
            )
        self.dataset = extend_dataset_dict_from_parent_dataset(
            {**kwargs, **dataset}, parent_dataset=self
        )
        self.num_workers = num_workers
        self.buffer_size = buffer_size
        # `Dataset.__reduce__` looks up the arguments under these names.
        self._sharding_method = sharding_method
        self._start_method = start_method
        self._max_restarts = max_restarts
        self._timeout = timeout
        self._on_timeout = on_timeout
        # Cached answers from the wrapped dataset.
        self._meta = dict(_meta_info_cache or {})
        if self._meta:
            self._describe()
        # The latest `init_seq_order` call: its serial number, arguments and order (if known).
        self._serial = 0
        self._asked: OrderRequest | None = None
        self._order: Sequence[int] | None = None
        # The epoch: whether it is running, its remaining items, and how many have been taken.
        self._is_under_way = False
        self._items: Iterator[Loaded] = iter(())
        self._taken = 0
        # The largest `complete_frac` and each data key's frame count in the epoch so far.
        self._complete = 0.0
        self._frames: dict[str, int] = {}

    # -- copies ---------------------------------------------------------------------------------

    @property
    def _meta_info_cache(self) -> dict[str, Any] | None:
        """The cached answers, for copies of this object to reuse."""
        return dict(self._meta) if self.num_outputs else None

    def __reduce__(self) -> Any:
        make, (cls, arguments, state) = super().__reduce__()
        # The copy's `__init__` adds all arguments of `Dataset` to `dataset`, so restore the dict.
        state |= {"dataset": self.dataset, "_asked": self._asked}
        return make, (cls, arguments, state)

    # -- properties of the wrapped dataset ------------------------------------------------------

    def initialize(self) -> None:
        """Start the workers and query the properties of the wrapped dataset."""
        self._describe()
        super().initialize()

    def _describe(self) -> None:
        self.num_inputs, self.num_outputs, self.labels = map(
            self._answer, ("num_inputs", "num_outputs", "labels")
        )

    def _answer(self, question: str) -> Any:
        """Return a constant property of the dataset. May raise NotImplementedError."""
        if question not in self._meta:
            with self._guarded() as streams:
                self._meta[question] = streams.ask("answer", question, worker=0)
        answer = self._meta[question]
        if isinstance(answer, NotImplementedError):
            raise type(answer)(*answer.args)
        return answer

    def get_data_keys(self) -> list[str]:
        """Return the data keys in the wrapped dataset's order."""
        return list(self._answer("get_data_keys"))

    def get_data_dtype(self, key: str) -> str:
        """Return the dtype of a data key as a string."""
        return str(self._answer("data_dtypes")[key])

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Return the total number of sequences, regardless of ``partition_epoch``.

        Raises NotImplementedError if it is unknown. With `fast`, no worker is started.
        """
        if fast and "get_total_num_seqs" not in self._meta and not self._is_running():
            raise NotImplementedError(f"{self}: cannot count sequences without a running worker")
        answer: int = self._answer("get_total_num_seqs")
        return answer

    def get_all_tags(self) -> list[str]:
        """Return the tags of all sequences, regardless of ``partition_epoch``."""
        return list(self._answer("get_all_tags"))

    def supports_sharding(self) -> bool:
        """Return True if the wrapped dataset supports sharding."""
        return bool(self._answer("supports_sharding"))

    def supports_seq_order_sorting(self) -> bool:
        """Return True if the wrapped dataset can sort by length."""
        return bool(self._answer("supports_seq_order_sorting"))

    def have_corpus_seq_idx(self) -> bool:
        """Return True if `get_corpus_seq_idx` is supported."""
        return bool(self._answer("have_corpus_seq_idx"))

    def get_corpus_seq_idx(self, seq_idx: int) -> int:
        """Return the corpus index of a sequence in the epoch."""
        if self.have_corpus_seq_idx():
            return int(self.get_current_seq_order()[seq_idx])
        return int(super().get_corpus_seq_idx(seq_idx))

    def set_sharding(self, *, num_shards: int, shard_index: int) -> None:
        """Restrict subsequent epochs to a shard."""
        super().set_sharding(num_shards=num_shards, shard_index=shard_index)
        self.dataset["_num_shards"] = num_shards
        self.dataset["_shard_index"] = shard_index

    # -- the workers ----------------------------------------------------------------------------

    def _is_running(self) -> bool:
        return self._streams is not None and self._streams._run.is_ours

    def _workers(self) -> Streams:
        """Return the workers. The first call in each process starts them."""
        if self._streams is None or not self._is_running():
            self._is_under_way = False
            plan = CONFIGURATION, self.dataset, self._sharding_method, self.name, _installed
            self._streams = Streams(
                partial(SequenceProducer, *plan),
                self.num_workers,
                prefetch=self.buffer_size,
                start_method=self._start_method,
                max_restarts=self._max_restarts,
                timeout=self._timeout,
                on_timeout=self._on_timeout,
            )
        return self._streams

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[Streams]:
        """Yield the workers. Close them after a fatal worker error."""
        streams = self._workers()
        try:
            yield streams
        except (WorkerDied, WorkerTimeout):
            self.close()
            raise

    def close(self) -> None:
        """Stop the workers now. The next use restarts them."""
        streams, self._streams = self._streams, None
        self._is_under_way, self._items = False, iter(())
        # In a forked process, this does not stop the parent's workers.
        if streams is not None:
            streams.close()

    def stats(self) -> Stats | None:
        """Return statistics since the workers started, or None if there are no workers."""
        return self._streams.stats() if self._streams is not None else None

    @property
    def _run(self) -> Run[Items] | None:
        return self._streams._run if self._streams is not None else None

    # -- an epoch -------------------------------------------------------------------------------

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: list[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Start an epoch and begin prefetching its sequences.

        Parameters
        ----------
        epoch : int or None
            The epoch number, starting at 1. If all arguments are None, no epoch is started.
        seq_list : list of str, optional
            The tags of the sequences to load, in order.
        seq_order : sequence of int, optional
            The corpus indices of the sequences to load, in order.
        """
        # An interrupted call must not leave an epoch running.
        self._is_under_way = False
        self._taken, self._complete, self._frames = 0, 0.0, {}
        super().init_seq_order(epoch=epoch, seq_list=seq_list, seq_order=seq_order)
        self._order = None
        self._serial += 1
        if epoch is None and seq_list is None and seq_order is None:
            self._asked = None
            self._num_seqs = 0
            return True
        shards = self.dataset["_num_shards"], self.dataset["_shard_index"]
        self._asked = OrderRequest(self._serial, epoch, seq_list, seq_order, *shards)
        requests = [self._asked] * self.num_workers
        if self._sharding_method == "seq_order":
            order = self.get_current_seq_order()
            shares = (order[number :: self.num_workers] for number in range(self.num_workers))
            requests = [self._asked._replace(seq_list=None, seq_order=share) for share in shares]
        with self._guarded() as streams:
            lengths = streams.begin(requests)
            self._items = iter(streams)
        self._num_seqs = None if None in lengths else sum(lengths)
        self.reached_final_seq = self._num_seqs == 0
        self._is_under_way = True
        return True

    def get_current_seq_order(self) -> Sequence[int]:
        """Return the order of the latest epoch. Raises NotImplementedError if it is unknown."""
        if self._asked is None:
            return []
        if self._order is None:
            self._order = self._ask_order()
        return self._order

    def _ask_order(self) -> Sequence[int]:
        """Ask worker 0 for the full order, or each worker for the order of its shard."""
        with self._guarded() as streams:
            if self._sharding_method == "seq_order":
                order: Sequence[int] = streams.ask("order", self._asked, worker=0)
                return order
            orders = streams.ask("order", self._asked)
        for answer in orders:
            if isinstance(answer, NotImplementedError):
                raise type(answer)(*answer.args)
        rounds = zip_longest(*(np.asarray(order, np.int64).tolist() for order in orders))
        return [index for turn in rounds for index in turn if index is not None]

    def finish_epoch(self, *, free_resources: bool = False) -> None:
        """Finish the epoch. With `free_resources`, workers also drop their datasets."""
        super().finish_epoch(free_resources=free_resources)
        self._is_under_way = False
        if self._is_running():
            with self._guarded() as streams:
                streams.interrupt()
                streams.ask("finish", free_resources)

    # -- sequences ------------------------------------------------------------------------------

    def is_less_than_num_seqs(self, n: int) -> bool:
        """Return True if sequence `n` exists. This may load the sequences up to `n`."""
        if n < self.expected_load_seq_start:
            return True
        if self.epoch is None:
            return False
        if self._num_seqs is None:
            self._load_seqs(self.expected_load_seq_start, n + 1)
        return self._num_seqs is None or n < self._num_seqs

    def _load_seqs(self, start: int, end: int) -> None:
        assert start >= self.expected_load_seq_start, (
            f"{self}: sequence {start} was dropped when sequence {self.expected_load_seq_start} "
            "was loaded"
        )
        if self._asked is not None and not (self._is_under_way and self._is_running()):
            raise RuntimeError(f"{self}: no epoch is in progress; call init_seq_order first")
        if start > self.expected_load_seq_start:
            self._cleanup_old_seqs(start)
            self.expected_load_seq_start = start
        # Any exception ends the epoch, even one from a signal handler.
        self._is_under_way = False
        try:
            while self._taken < (end if self._num_seqs is None else min(end, self._num_seqs)):
                self._take(start)
        except StopIteration:
            self._check_length()
        except (WorkerDied, WorkerTimeout):
            self.close()
            raise
        self._is_under_way = True

    def _take(self, start: int) -> None:
        tag, fraction, features = next(self._items)
        number, self._taken = self._taken, self._taken + 1
        if fraction is not None:
            fraction = self._complete = max(fraction, self._complete)
        for key, value in features.items():
            self._frames[key] = self._frames.get(key, 0) + (len(value) if value.ndim else 1)
        if number >= start:
            loaded = DatasetSeq(number, features, seq_tag=tag, complete_frac=fraction)
            self.added_data.append(loaded)
        self.reached_final_seq = self._taken == self._num_seqs

    def _check_length(self) -> None:
        if self._num_seqs is not None:
            raise RuntimeError(
                f"{self}: the wrapped dataset returned {self._taken} sequences in this epoch, "
                f"but its num_seqs was {self._num_seqs}"
            )
        self.reached_final_seq = True
        self._num_seqs = self._taken

    def get_num_timesteps(self) -> Any:
        """Return the number of frames per data key. Call this after the last sequence."""
        assert self.reached_final_seq
        return NumbersDict(self._frames)
