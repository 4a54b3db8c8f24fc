"""RETURNN's `MultiProcDataset`, its sequences loaded by cseq's worker processes.

The dataset of another `RETURNN <https://github.com/rwth-i6/returnn>`_ configuration, spread over
worker processes that each hold one. Worker 0 says in which order the sequences of an epoch come;
each worker loads its share of them, ahead of the loop; they arrive in that order.

::

    MultiProcDataset ── order? ──► worker 0: get_current_seq_order() ──► order
        │  begin: order[w::N], to each worker w
        ▼
    worker 0: seq 0, seq N, …   ──┐
    worker 1: seq 1, seq N+1, … ──┼── round robin ──► load_seqs, get_data, …
        ⋮                         │
    worker N-1: …               ──┘

With ``sharding_method='dedicated'`` the order is not asked for: each worker's dataset is one of N
shards, and workers that end first are left out of the round.
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

# `install`, once it was called.
_installed: Callable[[], None] | None = None


def install() -> None:
    """Make this class RETURNN's ``"MultiProcDataset"``.

    Call it before the first dataset is made. It holds for this process and for the workers of this
    module's datasets; other processes that RETURNN starts get datasets as objects, which remember
    their class. It stays until the process ends.
    """
    global _installed
    from returnn.datasets import multi_proc

    multi_proc.MultiProcDataset = MultiProcDataset
    # Filled at the first look-up; until then, the line above is enough.
    if basic._dataset_classes:
        basic._dataset_classes["MultiProcDataset"] = MultiProcDataset
    _installed = install


class MultiProcDataset(CachedDataset2):  # type: ignore[misc]
    """A dataset whose sequences are loaded by worker processes.

    Takes the place of ``returnn.datasets.multi_proc.MultiProcDataset``: same arguments, same order.

    Parameters
    ----------
    dataset : dict
        The dataset that every worker makes, as in a RETURNN configuration.
    num_workers : int
    buffer_size : int
        Sequences of each worker that are loaded ahead.
    sharding_method : {'seq_order', 'dedicated'}
        'seq_order': the order of the wrapped dataset, whatever the number of workers; it has to
        know that order (`get_current_seq_order`). 'dedicated': each worker's dataset is one of
        `num_workers` shards, of any sizes, known or not; the same sequences in an order that
        depends on the number of workers.
    start_method : {None, 'forkserver', 'spawn', 'fork'}
        How workers are started, by default as cseq does it on this system.
    max_restarts : int
        Worker processes that may die and be replaced in an epoch before `cseq.WorkerDied`.
    timeout : float or None
        Seconds that a sequence, an answer, or making the dataset may take.
    on_timeout : {'raise', 'restart'}
        Raise `cseq.WorkerTimeout`, or replace the worker, which tries again.
    **kwargs
        What every dataset takes (``name``, ``seq_ordering``, ``partition_epoch``, …). They are
        passed on to `dataset`, whose own entries win.

    Raises
    ------
    AssertionError
        `num_workers` or `buffer_size` below 1.
    ValueError
        Unknown `sharding_method`.

    Notes
    -----
    Workers start when they are first needed. An exception of the wrapped dataset in a worker is
    raised here, as itself, with the worker's traceback. A worker that dies is replaced, and the
    sequences that it had loaded ahead are loaded again.

    In a worker, Python's, NumPy's and torch's global generators are seeded for each sequence from
    `random_seed_offset`, the epoch and the sequence's position in it, so that augmentation that
    draws from them differs between sequences and is the same for any number of workers
    ('seq_order'). The same holds for the ``rng`` of a `PostprocessingDataset`.

    An exception in `load_seqs` ends the epoch: of a sequence, or of a signal handler (Ctrl-C).
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
        assert num_workers > 0, f"num_workers={num_workers!r}; give at least 1"
        assert buffer_size > 0, f"buffer_size={buffer_size!r}; give at least 1"
        if sharding_method not in SHARDING_METHODS:
            raise ValueError(
                f"invalid sharding_method {sharding_method!r}, must be seq_order or dedicated"
            )
        self.dataset = extend_dataset_dict_from_parent_dataset(
            {**kwargs, **dataset}, parent_dataset=self
        )
        self.num_workers = num_workers
        self.buffer_size = buffer_size
        # Under these names, `Dataset.__reduce__` finds the arguments again.
        self._sharding_method = sharding_method
        self._start_method = start_method
        self._max_restarts = max_restarts
        self._timeout = timeout
        self._on_timeout = on_timeout
        # What the wrapped dataset has answered.
        self._meta = dict(_meta_info_cache or {})
        if self._meta:
            self._describe()
        # What the last `init_seq_order` asked for, and the order, once it is known.
        self._serial = 0
        self._asked: OrderRequest | None = None
        self._order: Sequence[int] | None = None
        # The epoch: whether one is under way, its items, and how many of these were taken.
        self._is_under_way = False
        self._items: Iterator[Loaded] = iter(())
        self._taken = 0
        # Greatest `complete_frac` so far; frames so far, by key of the data.
        self._complete = 0.0
        self._frames: dict[str, int] = {}

    # -- copies ---------------------------------------------------------------------------------

    @property
    def _meta_info_cache(self) -> dict[str, Any] | None:
        """Answers that copies of this object need not ask for again."""
        return dict(self._meta) if self.num_outputs else None

    def __reduce__(self) -> Any:
        make, (cls, arguments, state) = super().__reduce__()
        # The copy gets all arguments of `Dataset`, even defaults; it must not pass them on.
        state |= {"dataset": self.dataset, "_asked": self._asked}
        return make, (cls, arguments, state)

    # -- what is known of the wrapped dataset ---------------------------------------------------

    def initialize(self) -> None:
        """Ask the wrapped dataset for its description, for which the workers are started."""
        self._describe()
        super().initialize()

    def _describe(self) -> None:
        self.num_inputs, self.num_outputs, self.labels = map(
            self._answer, ("num_inputs", "num_outputs", "labels")
        )

    def _answer(self, question: str) -> Any:
        """Ask for a constant property; NotImplementedError if the wrapped dataset lacks it."""
        if question not in self._meta:
            with self._guarded() as streams:
                self._meta[question] = streams.ask("answer", question, worker=0)
        answer = self._meta[question]
        if isinstance(answer, NotImplementedError):
            raise type(answer)(*answer.args)
        return answer

    def get_data_keys(self) -> list[str]:
        """Return the keys of the data, in the wrapped dataset's order."""
        return list(self._answer("get_data_keys"))

    def get_data_dtype(self, key: str) -> str:
        """Return the dtype of a key's data, as a string."""
        return str(self._answer("data_dtypes")[key])

    def get_total_num_seqs(self, *, fast: bool = False) -> int:
        """Return how many sequences there are, all parts of the epoch together.

        Raises NotImplementedError where the wrapped dataset does not know. `fast` changes nothing,
        except that no worker is started for the answer.
        """
        if fast and "get_total_num_seqs" not in self._meta and not self._is_running():
            raise NotImplementedError(f"{self}: no worker is running that could be asked")
        answer: int = self._answer("get_total_num_seqs")
        return answer

    def get_all_tags(self) -> list[str]:
        """Return the tags of all sequences, all parts of the epoch together."""
        return list(self._answer("get_all_tags"))

    def supports_sharding(self) -> bool:
        """Whether the wrapped dataset can be one of several shards."""
        return bool(self._answer("supports_sharding"))

    def supports_seq_order_sorting(self) -> bool:
        """Whether the wrapped dataset can sort by length."""
        return bool(self._answer("supports_seq_order_sorting"))

    def have_corpus_seq_idx(self) -> bool:
        """Whether `get_corpus_seq_idx` can be called."""
        return bool(self._answer("have_corpus_seq_idx"))

    def get_corpus_seq_idx(self, seq_idx: int) -> int:
        """Return a sequence's number in the corpus from its number in the epoch."""
        if self.have_corpus_seq_idx():
            return int(self.get_current_seq_order()[seq_idx])
        return int(super().get_corpus_seq_idx(seq_idx))

    def set_sharding(self, *, num_shards: int, shard_index: int) -> None:
        """Make this dataset one of several shards at the next `init_seq_order`."""
        super().set_sharding(num_shards=num_shards, shard_index=shard_index)
        self.dataset["_num_shards"] = num_shards
        self.dataset["_shard_index"] = shard_index

    # -- the workers ----------------------------------------------------------------------------

    def _is_running(self) -> bool:
        return self._streams is not None and self._streams._run.is_ours

    def _workers(self) -> Streams:
        """Return the workers; start them at the first call, and again in a forked process."""
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
        """In this context, use the workers; end them after errors that they do not survive."""
        streams = self._workers()
        try:
            yield streams
        except (WorkerDied, WorkerTimeout):
            # The next use starts new ones.
            self.close()
            raise

    def close(self) -> None:
        """End the workers now rather than with this object; a later use starts new ones."""
        streams, self._streams = self._streams, None
        self._is_under_way, self._items = False, iter(())
        # In a forked process, that does nothing.
        if streams is not None:
            streams.close()

    def stats(self) -> Stats | None:
        """Return counts and times since the workers started; None without workers."""
        return self._streams.stats() if self._streams is not None else None

    @property
    def _run(self) -> Run[Items] | None:
        """The running workers, for `cseq.testing`."""
        return self._streams._run if self._streams is not None else None

    # -- an epoch -------------------------------------------------------------------------------

    def init_seq_order(
        self,
        epoch: int | None = None,
        seq_list: list[str] | None = None,
        seq_order: Sequence[int] | None = None,
    ) -> bool:
        """Begin an epoch: sequences are loaded ahead now.

        Parameters
        ----------
        epoch : int or None
            From 1. With None, and no order given, nothing begins.
        seq_list : list of str, optional
            Tags of the sequences to load, in order.
        seq_order : sequence of int, optional
            Numbers in the corpus of the sequences to load, in order.
        """
        # First: if the rest is interrupted, no epoch is under way.
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
        """Return the order of the epoch that `init_seq_order` began last, even if it has ended.

        Raises NotImplementedError where the wrapped dataset does not know it.
        """
        if self._asked is None:
            return []
        if self._order is None:
            self._order = self._ask_order()
        return self._order

    def _ask_order(self) -> Sequence[int]:
        """Ask worker 0 for the order of all sequences, or each worker for its shard's."""
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
        """End the epoch; `free_resources`: the workers' datasets are dropped until the next one."""
        super().finish_epoch(free_resources=free_resources)
        self._is_under_way = False
        if self._is_running():
            with self._guarded() as streams:
                streams.interrupt()
                streams.ask("finish", free_resources)

    # -- sequences ------------------------------------------------------------------------------

    def is_less_than_num_seqs(self, n: int) -> bool:
        """Whether there is a sequence `n`; loads up to it where the number is not known."""
        if n < self.expected_load_seq_start:
            return True
        if self.epoch is None:
            return False
        if self._num_seqs is None:
            self._load_seqs(self.expected_load_seq_start, n + 1)
        return self._num_seqs is None or n < self._num_seqs

    def _load_seqs(self, start: int, end: int) -> None:
        assert start >= self.expected_load_seq_start, (
            f"{self}: sequence {start} was dropped when {self.expected_load_seq_start} was loaded"
        )
        if self._asked is not None and not (self._is_under_way and self._is_running()):
            raise RuntimeError(f"{self}: no epoch is under way; begin one with init_seq_order")
        if start > self.expected_load_seq_start:
            self._cleanup_old_seqs(start)
            self.expected_load_seq_start = start
        # An exception ends the epoch, even a signal handler's.
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
                f"{self}: the wrapped dataset has {self._taken} sequences in this epoch, "
                f"but its num_seqs was {self._num_seqs}"
            )
        self.reached_final_seq = True
        self._num_seqs = self._taken

    def get_num_timesteps(self) -> Any:
        """Return how many frames there were, after the last sequence."""
        assert self.reached_final_seq
        return NumbersDict(self._frames)
