"""The workers of a DataLoader. They fetch and collate batches.

Without workers, the trainer uses `FetcherHere`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import sys
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from cseq._lock import check_depth
from cseq._memory import fork_depth
from cseq.adapters.torch import names
from cseq.adapters.torch.collate import collating, stack_in_slots
from cseq.adapters.torch.stateful import DatasetState
from cseq.encoding import failure
from cseq.encoding.pickling import dumps
from cseq.encoding.survey import Partial
from cseq.indexing import context
from cseq.indexing.context import Numbers
from cseq.indexing.leaving import Leaving, none_text
from cseq.indexing.seeding import Seeds, call_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Left = tuple[tuple[object, str], ...]

__all__ = ["FetcherEpoch", "FetcherHere", "Fetching", "Item", "modes_here", "samples_of"]

END = object()


class Item(NamedTuple):
    """A batch with additional data, or an error.

    `state` is the pickled state of the data set after the batch, and `left` lists skipped samples.
    `is_over` is True if the worker is exhausted. `error` is packed if it comes from a worker.
    `name` and `key` identify the batch. After an error with `is_setup`, all later batches fail too.
    """

    batch: object = None
    state: bytes | None = None
    is_over: bool = False
    left: Left = ()
    error: bytes | BaseException | None = None
    name: str = ""
    is_setup: bool = False
    key: object = None


def samples_of(key: Any) -> int:
    """Return the number of samples in the batch for a key."""
    try:
        return len(key)
    # The key is a number or a scalar tensor.
    except TypeError:
        return 1


# Contexts that stay open until the process exits.
_entered = contextlib.ExitStack()


def _infer(mode: bool) -> None:  # noqa: FBT001 - as torch's own
    if mode:
        _entered.enter_context(torch.inference_mode())


def _push_all(modes: list[Any]) -> None:
    for mode in modes:
        names.push_mode(mode)


def _modes() -> Iterator[tuple[Callable[[], object], Callable[[Any], object]]]:
    """Yield a getter and a setter for each of torch's thread-local modes."""
    autocast: tuple[tuple[Callable[[str], object], Callable[[str, Any], object]], ...] = (
        (torch.is_autocast_enabled, torch.set_autocast_enabled),
        (torch.get_autocast_dtype, torch.set_autocast_dtype),
    )
    yield torch.is_inference_mode_enabled, _infer
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    # A default device is also a function mode.
    yield names.function_modes, _push_all
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone"):
        # Older versions of torch lack some devices.
        with contextlib.suppress(RuntimeError):
            torch.is_autocast_enabled(device)
            for ask, enter in autocast:
                yield partial(ask, device), partial(enter, device)


MODES = tuple(_modes())


def modes_here() -> list[Any]:
    """Return the torch modes of this thread, for workers forked by another thread."""
    return [ask() for ask, _ in MODES]


class Fetching(NamedTuple):
    """The loader settings that its workers need.

    If `skips` is True, samples that raise are skipped. `modes` contains the trainer's torch modes
    for forked workers. `pins` contains a setup function and a device for threads that pin batches.
    """

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], object]
    drop_last: bool
    skips: bool
    batch_seeds: bool
    init_fn: Callable[[int], object] | None
    modes: list[Any]
    is_thread: bool = False
    pins: tuple[Callable[[], object], str | None] | None = None

    def __call__(self, number: int, num_workers: int) -> Fetcher:
        """Create the producer for worker `number`."""
        kind = ThreadFetcher if self.is_thread else Fetcher
        return kind(self, number, num_workers, context.here.batch_context)


class FetcherEpoch(NamedTuple):
    """A worker's parameters for an epoch.

    `first` is the number of batches already delivered. For an IterableDataset, `first` counts only
    this worker's batches, `is_over` is True if the worker is exhausted, and `index` is the key of
    every batch. A new process restores the data set from `state`. Workers send a state every
    `snapshot_every` batches (0 for never). Seeds depend on `rank`, a (rank, world size) pair.
    """

    base_seed: int
    index: Any = None
    first: int = 0
    state: bytes | None = None
    snapshot_every: int = 0
    is_over: bool = False
    rank: tuple[int, int] = (0, 1)


class Fetcher:
    """A worker's producer; see `cseq.indexing.producer.Producer`."""

    IN_WORKER = True

    def __init__(self, setup: Fetching, number: int, num_workers: int, batch_context: Any) -> None:
        self._setup, self._number, self._num_workers = setup, number, num_workers
        self._is_stream = setup.kind == names.ITERABLE
        self._collate = setup.collate_fn
        self._context: context.BatchContext = batch_context
        self._seeds = Seeds(batch_context) if setup.batch_seeds else None
        self._epoch = FetcherEpoch(0)
        self._fetcher: Any = None
        self._key: Any = ()
        # The packed exception from `get_ready`, if any.
        self._broken: bytes | None = None
        # `_is_open` is True once this epoch's fetcher has been created, or could not be.
        self._is_set_up = self._is_open = False
        self._made = 0
        self._state: DatasetState | None = None
        self._depth = fork_depth()

    def close(self) -> None:
        """Drop the references to the data set if this version of torch does the same.

        In a forked worker, the data set belongs to the parent process and is not deleted.
        """
        if names.GIVES_BACK and not self._setup.is_thread:
            names.forget_worker_info()
            self._fetcher = self._state = None

    def begin(self, epoch: FetcherEpoch) -> None:
        """Start an epoch. No user code runs before the first batch."""
        self._epoch = epoch
        self._is_open = False

    def make(self, key: object) -> object:
        """Return the batch for a key, or an `Item`."""
        self.get_ready()
        return self._next(key, self._epoch.first + self._context.item)

    def items(self, start: int) -> Iterator[object]:
        """Yield the batches of an IterableDataset. Exceptions count as batches."""
        self.get_ready()
        if self._broken is not None:
            yield self._raised()
            return
        if self._epoch.is_over or not self._drop(self._epoch.first + start):
            return
        while (item := self._next_item()) is not END:
            yield item
            # Do not keep this batch alive while the next one is being made.
            del item
        if self._state:
            yield self._stated(is_over=True)

    def _drop(self, count: int) -> bool:
        """Skip the first `count` batches of an IterableDataset. Return False if there are fewer."""
        return all(self._next_item() is not END for _ in range(self._made, count))

    # -- setup

    def get_ready(self) -> None:
        """Set up the worker if it is new, and create the fetcher for this epoch."""
        if self._is_open:
            return
        self._is_open = True
        self._fetcher = self._broken = None
        try:
            is_new = not self._is_set_up
            if is_new:
                self._is_set_up = True
                self._set_up()
            self._open(is_new=is_new)
        except BaseException as error:  # noqa: BLE001 - it is raised in the trainer
            self._broken = _packed(error)

    def _set_up(self) -> None:
        setup = self._setup
        multiprocessing.current_process().name = f"DataLoader-{self._number}"
        torch.set_num_threads(1)
        self._collate = collating(self._collate)
        for (_, enter), mode in zip(MODES, setup.modes, strict=False):
            enter(mode)
        base_seed = self._epoch.base_seed
        seed = base_seed + self._number
        random.seed(seed)
        # torch records a stack trace for each unused device. With the default traceback limit,
        # this would read source files.
        limit, sys.tracebacklimit = getattr(sys, "tracebacklimit", 1000), 0
        try:
            torch.manual_seed(seed)
        finally:
            sys.tracebacklimit = limit
        np.random.seed(names.numpy_seed(base_seed, self._number))  # noqa: NPY002 - the global one
        self._set_info(seed)
        stack_in_slots()
        if setup.init_fn is not None:
            setup.init_fn(self._number)

    def _set_info(self, seed: int) -> None:
        if self.IN_WORKER:
            names.set_worker_info(self._number, self._num_workers, seed, self._setup.dataset)

    def _open(self, *, is_new: bool) -> None:
        """Create the fetcher. A new worker restores the data set first."""
        epoch = self._epoch
        # The `iter` of an IterableDataset may draw random numbers.
        if self._seeds is not None:
            self._seed(self._number)
        state = {} if epoch.state is None or not is_new else pickle.loads(epoch.state)
        self._made = state.get("made", 0)
        self._fetcher = self._fetcher_from(state)
        asks = epoch.snapshot_every
        self._state = DatasetState(self._setup.dataset, self._fetcher) if asks else None

    def _seed(self, number: int) -> int:
        """Seed the global generators and return torch's seed."""
        assert self._seeds is not None
        self._set_ticket(number)
        self._seeds.seed_present()
        return torch.default_generator.initial_seed()

    def _set_ticket(self, number: int) -> None:
        """Set the current batch for `cseq.rng` and `cseq.worker_info`."""
        rank, ranks = self._epoch.rank
        self._context.set_ticket(Numbers(self._epoch.base_seed, 0, number, number * ranks + rank))

    def _fetcher_from(self, state: dict[str, Any]) -> Any:
        """Create a fetcher from a saved state (see `DatasetState`)."""
        kind, dataset, auto_collation, function, drop_last, skips, *_ = self._setup
        if state.get("dataset") is not None:
            dataset.load_state_dict(state["dataset"])
        collates = auto_collation and not self._is_stream
        if collates and skips:
            leaving = Leaving(dataset, skips=True, refuses_none=function is default_collate)
            return SimpleNamespace(
                fetch=lambda key: leaving.whole(self._collate([*leaving.fetch(key)]))
            )
        collate = self._collate_key if collates else self._collate
        fetcher = names.make_fetcher(kind, dataset, auto_collation, collate, drop_last)
        if state.get("iterator") is not None:
            fetcher.dataset_iter.load_state_dict(state["iterator"])
        if state.get("ended"):
            fetcher.ended = True
        return fetcher

    def _collate_key(self, samples: Sequence[object]) -> object:
        """Collate samples. On failure, report the first sample that is None."""
        try:
            return self._collate(samples)
        except Exception as error:
            gone = (index for index, one in zip(self._key, samples, strict=False) if one is None)
            for index in islice(gone, 1):
                failure.annotate(error, f"cseq: {none_text(index, self._setup.dataset)}")
            raise

    # -- batches

    def _next_item(self) -> object:
        return self._next(self._epoch.index, self._made * self._num_workers + self._number)

    def _next(self, key: object, number: int) -> object:
        """Return a batch, an `Item`, or END.

        Seeds are derived from `number`.
        """
        if self._broken is not None:
            return self._raised()
        if self._seeds is not None:
            self._set_info(self._seed(number))
        self._made += 1
        self._key = key
        try:
            batch = self._fetcher.fetch(key)
        except BaseException as error:
            # The data set may call `fork`, so this process may be a copy of the worker.
            is_copy = fork_depth() != self._depth
            if is_copy or not (self.IN_WORKER or isinstance(error, Exception)):
                raise
            if self._is_stream and isinstance(error, StopIteration):
                return END
            packed = _packed(error) if self.IN_WORKER else failure.ordinary(error)
            key, name = None if self._is_stream else key, self._name(key)
            return Item(error=packed, name=name, key=key)
        left: Left = ()
        if type(batch) is Partial:
            batch, left = batch
        if self._state and not self._made % self._epoch.snapshot_every:
            return self._stated(batch, left=left)
        return Item(batch, left=left) if left else batch

    def _stated(self, batch: object = None, *, is_over: bool = False, left: Left = ()) -> Item:
        assert self._state is not None
        return Item(batch, dumps(self._state.after(self._made)), is_over, left)

    def _raised(self) -> Item:
        name = f"its data set ready in worker {self._number}"
        return Item(error=self._broken, name=name, is_setup=True)

    def _name(self, key: object) -> str:
        of = f"batch {self._made - 1}" if self._is_stream else f"the batch of {failure.listed(key)}"
        return f"{of} in worker {self._number}" if self.IN_WORKER else of


class ThreadFetcher(Fetcher):
    """The producer of a worker thread. All threads share the data set.

    Threads do not seed the global generators. `cseq.rng` is seeded for each batch with
    ``rng="batch"``, and otherwise once per thread, like NumPy's generator in torch's workers.
    """

    def _set_up(self) -> None:
        setup = self._setup
        torch.set_num_threads(1)
        stack_in_slots(tensors=False)
        if setup.pins is not None:
            settle, device = setup.pins
            settle()
            collate = self._collate
            self._collate = lambda samples: names.pin(collate(samples), device)
        if self._seeds is None:
            words = names.numpy_seed(self._epoch.base_seed, self._number)
            self._context.drawn = np.random.default_rng(words)
        if setup.init_fn is not None:
            setup.init_fn(self._number)

    def _set_info(self, seed: int) -> None:
        """Do nothing: `get_worker_info` is the same in all threads."""

    def _seed(self, number: int) -> int:
        self._set_ticket(number)
        return 0


class FetcherHere(Fetcher):
    """A producer that runs in the trainer, without `Streams`."""

    IN_WORKER = False
    latest = 0

    def __init__(self, setup: Fetching) -> None:
        super().__init__(setup, 0, 1, context.BatchContext(0, 0))
        self._keys: Iterator[tuple[int, object]] | None = None

    def begin_with(self, epoch: FetcherEpoch, keys: Iterator[object] | None) -> DatasetState | None:
        """Start an epoch. `keys` is None for an IterableDataset."""
        self.begin(epoch)
        self._is_open, self._keys = True, None if keys is None else enumerate(keys)
        self._call(partial(self._open, is_new=True))
        if keys is None:
            self._call(self._drop, epoch.first)
        # The trainer reads the state of the data set on demand.
        state, self._state = self._state, None
        return state

    def __iter__(self) -> FetcherHere:
        return self

    def __next__(self) -> object:
        # A RecursionError below could exhaust the sampler, so check the depth first.
        check_depth()
        if self._keys is not None:
            self._context.item, key = next(self._keys)
            return self._call(self.make, key)
        item = self._call(self._next_item)
        if item is END:
            raise StopIteration
        return item

    def _call(self, function: Callable[..., object], *args: object) -> object:
        """Call a function. If batches are seeded, restore the trainer's generators afterwards."""
        if self._seeds is None:
            return function(*args)
        return call_here(partial(function, *args), self._context, self._seeds)


def _packed(error: BaseException) -> bytes:
    """Pack an exception. Replace SystemExit and KeyboardInterrupt with torch's RuntimeError.

    In the trainer, they would end the program silently or look like Ctrl-C.
    """
    if isinstance(error, Exception):
        return failure.pack(error)
    text = f"DataLoader worker (pid(s) {os.getpid()}) exited unexpectedly: {failure.line_of(error)}"
    ended = RuntimeError(text).with_traceback(error.__traceback__)
    ended.__cause__ = error
    return failure.pack(ended)
