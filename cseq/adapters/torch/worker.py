"""A worker of the loader: is set up as torch's, fetches batches, collates them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import default_collate

from cseq._memory import fork_depth
from cseq.adapters.torch import names
from cseq.adapters.torch.collate import collating, stack_in_slots
from cseq.adapters.torch.seeds import BatchSeeds, seed_worker
from cseq.adapters.torch.stateful import DatasetState
from cseq.encoding import failure
from cseq.encoding.pickling import dumps
from cseq.indexing import context
from cseq.indexing.leaving import Leaving, Partial, none_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Batches", "Epoch", "Fetching", "Raised", "Stated", "Worker", "numbered",
    "unnumbered",
]  # fmt: skip

END = object()


class Raised(NamedTuple):
    """What a batch is where an exception was raised instead: the epoch goes on after it."""

    worker: int
    packed: bytes
    place: str  # names the batch
    is_setup: bool = False  # there is no data set to fetch it from: the next ones will raise, too
    key: Any = None  # of a map-style data set's batch


class Stated(NamedTuple):
    """A batch, its worker, and the state of the data set there after it, if that is wanted."""

    batch: Any
    worker: int
    state: bytes | None
    is_over: bool = False  # there is no batch: this worker's data set has come to its end
    left: tuple[tuple[Any, str], ...] = ()  # samples that are left out: see `Partial`


class LeavingFetcher:
    """Fetches the batches of a map-style data set, without samples that raise."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._collate = collate_fn
        is_plain = collate_fn is default_collate
        self._leaving = Leaving(dataset, skips=True, refuses_none=is_plain)

    def fetch(self, key: Any) -> Any:
        """Return the batch of a key, or a `Partial`."""
        return self._leaving.whole(self._collate([*self._leaving.fetch(key)]))


class NamingFetcher:
    """Fetches the batches of a map-style data set as torch's does; names a sample that is None."""

    def __init__(self, dataset: Any, collate_fn: Any, make: Callable[..., Any]) -> None:
        self._dataset, self._function = dataset, collate_fn
        self._fetch = make(collate_fn=self._collate).fetch
        self._key: Any = ()

    def fetch(self, key: Any) -> Any:
        """Return the batch of a key."""
        self._key = key
        return self._fetch(key)

    def _collate(self, samples: Any) -> Any:
        """Collate the samples of the present key."""
        try:
            return self._function(samples)
        except Exception as error:
            gone = (index for index, one in zip(self._key, samples, strict=False) if one is None)
            for index in islice(gone, 1):
                failure.annotate(error, f"cseq: {none_text(index, self._dataset)}")
            raise


class Fetching(NamedTuple):
    """How a batch is fetched: what is torch's own part of a loader."""

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Any
    drop_last: bool
    skips: bool  # leaves out what raises

    @classmethod
    def of(cls, iterator: Any) -> Fetching:
        """Return how an iterator of torch's fetches a batch."""
        return cls(
            iterator._dataset_kind,
            iterator._dataset,
            iterator._auto_collation,
            iterator._collate_fn,
            iterator._drop_last,
            iterator._skips_errors,
        )

    def open(self, state: dict[str, Any]) -> Any:
        """Make what fetches batches, from a state of the data set on (`DatasetState`).

        For an IterableDataset that calls `iter`.
        """
        if state.get("dataset") is not None:
            self.dataset.load_state_dict(state["dataset"])
        make = partial(
            names.make_fetcher,
            self.kind,
            self.dataset,
            auto_collation=self.auto_collation,
            drop_last=self.drop_last,
        )
        if self.auto_collation and self.kind != names.ITERABLE:
            if self.skips:
                return LeavingFetcher(self.dataset, self.collate_fn)
            return NamingFetcher(self.dataset, self.collate_fn, make)
        fetcher = make(collate_fn=self.collate_fn)
        if state.get("iterator") is not None:
            fetcher.dataset_iter.load_state_dict(state["iterator"])
        if state.get("ended"):
            fetcher.ended = True
        return fetcher


def numbered(keys: Iterator[Any], number: int) -> Iterator[Any]:
    """Yield keys with their numbers: in front, if a key is a list, which may be one of numbers."""
    for key in keys:
        yield [number, *key] if type(key) is list else (number, key)
        number += 1


def unnumbered(key: Any) -> Any:
    """Return the key that `numbered` has numbered."""
    return key[1:] if type(key) is list else key[1]


def count(key: Any) -> int:
    """Count the samples of the batch of a key."""
    try:
        return len(key)
    except TypeError:  # a number, also as a tensor
        return 1


def count_numbered(key: Any) -> int:
    """Count those of a key that `numbered` has numbered."""
    return count(unnumbered(key))


_entered = contextlib.ExitStack()  # of this process, for as long as it lives


class Modes(NamedTuple):
    """Modes of torch that the thread which calls `iter` is in, for a forked worker.

    That is forked by another thread.
    """

    grad: bool
    inference: bool
    autocast: tuple[bool, torch.dtype, bool]  # on the CPU; and whether casts are kept

    @classmethod
    def here(cls) -> Modes:
        """Return those of this thread."""
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        autocast = enabled, dtype, torch.is_autocast_cache_enabled()
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def enter(self) -> None:
        """Have this thread be in them, too."""
        torch.set_grad_enabled(self.grad)
        if self.inference:
            _entered.enter_context(torch.inference_mode())
        enabled, dtype, is_kept = self.autocast
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(is_kept)


class Worker(NamedTuple):
    """Makes the producer of a worker, in its process."""

    fetching: Fetching
    init_fn: Callable[[int], Any] | None
    batch_seeds: bool
    modes: Modes | None  # in the trainer, if the worker is forked

    def __call__(self, number: int, num_workers: int) -> Batches:
        """Make it."""
        return Batches(self, number, num_workers)


class Epoch(NamedTuple):
    """What a worker has to know of an epoch.

    Attributes
    ----------
    base_seed : int
    index : list of None, or None
        What an IterableDataset is asked with: one for each sample of a batch.
    made : int
        Batches of this worker that were made before, if that of an IterableDataset is.
    state : bytes or None
        Where the data set is to begin, from `Stated`, in a process that has just started.
    snapshot_every : int
        Send the data set's state after every so many batches; 0: never.
    tagged : bool
        Send each batch as `Stated`: the trainer has to know the worker.
    """

    base_seed: int
    index: Any = None
    made: int = 0
    state: bytes | None = None
    snapshot_every: int = 0
    tagged: bool = False


class Batches:
    """A worker's producer (see `cseq.indexing.producer.Producer`)."""

    def __init__(self, worker: Worker, number: int, num_workers: int) -> None:
        self._worker = worker
        self._number = number
        self._num_workers = num_workers
        self._dataset = worker.fetching.dataset
        collate_fn = collating(worker.fetching.collate_fn)
        self._fetching = worker.fetching._replace(collate_fn=collate_fn)
        self._epoch: Epoch | None = None
        self._fetcher: Any = None
        self._broken: bytes | None = None  # the exception that kept it from getting ready
        self._is_set_up = False
        self._is_open = False  # this epoch's fetcher is made, or something keeps it from that
        self._made = 0  # batches of the epoch
        self._state: DatasetState | None = None
        self._has_begun = False  # and the data set with it, where it was to
        self._seeds: BatchSeeds | None = None
        self._depth = fork_depth()

    def begin(self, epoch: Epoch) -> None:
        """Begin an epoch. What the user has written is called with the first batch of it."""
        self._epoch = epoch
        self._is_open = False

    def make(self, key: Any) -> Any:
        """Return the batch of a key, or `Raised`."""
        self.get_ready()
        number = 0
        if self._worker.batch_seeds:
            number, key = (key[0], key[1:]) if type(key) is list else key
        return self._next(key, number)

    def items(self, start: int) -> Iterator[Any]:
        """Return the batches of an iterable data set; an exception is one, too."""
        self.get_ready()
        if self._broken is not None:
            yield self._raised()
            return
        assert self._epoch is not None
        index = self._epoch.index
        while self._made < self._epoch.made + start:
            if self._next(index, self._number_of_next()) is END:
                return
        while True:
            item = self._next(index, self._number_of_next())
            if item is END:
                if self._state:
                    yield self._stated(None, is_over=True)
                return
            yield item
            del item  # or it would be there while the next one is made

    # -- getting ready

    def get_ready(self) -> None:
        """Make the fetcher of this epoch, unless it is there; in a new process, set that up."""
        epoch = self._epoch
        assert epoch is not None
        if self._is_open:
            return
        self._is_open = True
        self._fetcher = self._broken = None
        try:
            if not self._is_set_up:
                self._is_set_up = True
                self._set_up(epoch)
            self._open(epoch)
        except BaseException as error:  # noqa: BLE001 - it is raised in the trainer
            self._broken = _packed(error)

    def _set_up(self, epoch: Epoch) -> None:
        """Do what torch does at the beginning of a worker."""
        worker = self._worker
        multiprocessing.current_process().name = f"DataLoader-{self._number}"
        torch.set_num_threads(1)
        if worker.modes is not None:
            worker.modes.enter()
        seed = seed_worker(epoch.base_seed, self._number)
        names.set_worker_info(self._number, self._num_workers, seed, self._dataset)
        stack_in_slots()
        if worker.init_fn is not None:
            worker.init_fn(self._number)

    def _open(self, epoch: Epoch) -> None:
        """Make the fetcher, where the data set is to begin."""
        if self._worker.batch_seeds:
            batch_context = context.here.batch_context
            assert batch_context is not None
            self._seeds = BatchSeeds(batch_context, epoch.base_seed)
            self._seeds.seed_for(self._number)  # an IterableDataset may draw in `iter`
        state: dict[str, Any] = {}
        if epoch.state is not None and not self._has_begun:
            state = pickle.loads(epoch.state)
        self._has_begun = True
        self._made = state.get("made", 0)
        self._fetcher = self._fetching.open(state)
        self._state = DatasetState(self._dataset, self._fetcher) if epoch.snapshot_every else None

    # -- making

    def _number_of_next(self) -> int:
        """Number the next batch of an iterable data set, among those of all workers."""
        return self._made * self._num_workers + self._number

    def _next(self, key: Any, number: int) -> Any:
        """Return the next batch, with a state if it is time for one; `Raised`, or END."""
        if self._broken is not None:
            return self._raised()
        if self._seeds is not None:
            seed = self._seeds.seed_for(number)
            names.set_worker_info(self._number, self._num_workers, seed, self._dataset)
        self._made += 1
        try:
            batch = self._fetcher.fetch(key)
        except BaseException as error:
            if fork_depth() != self._depth:
                raise  # this process is a copy, which the data set has forked
            if isinstance(error, StopIteration) and self._worker.fetching.kind == names.ITERABLE:
                return END
            key = None if self._worker.fetching.kind == names.ITERABLE else key
            return Raised(self._number, _packed(error), self._place(key), key=key)
        epoch = self._epoch
        left: tuple[tuple[Any, str], ...] = ()
        assert epoch is not None
        if type(batch) is Partial:
            batch, left = batch
        if self._state and not self._made % epoch.snapshot_every:
            return self._stated(batch, left=left)
        return Stated(batch, self._number, None, left=left) if epoch.tagged or left else batch

    def _stated(self, batch: Any, *, is_over: bool = False, left: Any = ()) -> Stated:
        """Return a batch with the state after it."""
        assert self._state is not None
        state = dumps(self._state.take(self._made))
        return Stated(batch, self._number, state, is_over, left)

    def _raised(self) -> Raised:
        """Return what kept the worker from getting ready, in place of a batch."""
        assert self._broken is not None
        place = f"its data set ready in worker {self._number}"
        return Raised(self._number, self._broken, place, is_setup=True)

    def _place(self, key: Any) -> str:
        """Name a batch."""
        if self._worker.fetching.kind == names.ITERABLE:
            return f"batch {self._made - 1} of worker {self._number}"
        return f"the batch of {failure.listed(key)} in worker {self._number}"


def _packed(error: BaseException) -> bytes:
    """Pack an exception; `sys.exit` and the like as what torch's loader raises then.

    In the trainer SystemExit would end the program as if all were well, KeyboardInterrupt as if the
    user had pressed Ctrl-C.
    """
    if isinstance(error, Exception):
        return failure.pack(error)
    text = f"DataLoader worker (pid(s) {os.getpid()}) exited unexpectedly: {failure.line_of(error)}"
    ended = RuntimeError(text).with_traceback(error.__traceback__)
    ended.__cause__ = error
    return failure.pack(ended)
