"""Base class for readers."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import pickle
import shutil
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq.check import integer, seconds
from cseq.order._readers import ArrayReader
from cseq.order.blocks import Blocks
from cseq.store.client import Client
from cseq.store.folder import shared_folder
from cseq.store.objects import located
from cseq.store.reader import Reader
from cseq.system import memory_limit_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from cseq._core import Reader as Units
    from cseq.order.base import Ints, Order, Read

__all__ = ["ShardStats", "Shards"]

VERSION = 3


class ShardStats(NamedTuple):
    """Statistics on a reader's cache and fetches.

    Attributes
    ----------
    shards, kept : int
        The number of shards in the store and in the cache.
    nbytes, limit : int
        The current and the maximum size of the cached shards in bytes.
    fetched, fetched_nbytes : int
        The number of shards and bytes fetched since the fetcher started.
    """

    shards: int
    kept: int
    nbytes: int
    limit: int
    fetched: int
    fetched_nbytes: int


class Shards(Reader):
    """Base class for readers that read samples from shards by index.

    Parameters
    ----------
    urls : str, path, or list of these
        A folder such as ``"s3://bucket/train/"``, a pattern such as
        ``"gs://bucket/train-*.tar"``, or individual objects. Paths and URLs that start with ``s3``,
        ``gs``, ``az``, ``http``, ``https`` or ``file`` are supported. Over HTTP, files cannot be
        listed: pass the URL of each shard.
    cache : str or path, optional
        A folder on a local disk in which to keep shards between runs. By default, shards stay in
        shared memory (or in a temporary folder if ``/dev/shm`` is smaller than `limit`) until the
        last process exits.
    limit : int or str, optional
        The maximum size of the cached shards in bytes, such as ``"64 GB"``. Defaults to half of
        the free space.
    ahead : int
        The number of shards to fetch in advance, concurrently. Larger values help if shards are
        small or the store's latency is high.
    store : optional
        An obstore store with credentials and options. `urls` are then paths in this store.
    timeout : float, optional
        Seconds to wait for data before a request is retried. With None, there is no limit.

    Attributes
    ----------
    sizes : array of int
        The number of samples in each shard.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, if shards are inconsistent or have changed since the index was
        created, or if the cache belongs to different shards.
    OSError
        If the store cannot be read. Errors in later fetches are raised in the training loop.
    ImportError
        If obstore is not installed.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        cache: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
        ahead: int = 4,
        store: Any = None,
        timeout: float | None = 30.0,
    ) -> None:
        _refuse_what_is_missing()
        self.place = located(urls, self.suffix, in_store=store is not None)
        about = {"version": VERSION, "kind": type(self).__name__, "urls": [*self.place]}
        self.about = about | {name: getattr(self, name) for name in self.settings}
        most = None if limit is None else memory_limit_of(limit, "limit")
        self.is_kept = cache is not None
        if cache is None:
            self.folder = shared_folder("store", self.about, most or 0)
        else:
            self.folder = os.path.abspath(os.fspath(cache))
            os.makedirs(self.folder, 0o700, exist_ok=True)
        if most is None:
            most = shutil.disk_usage(os.path.dirname(self.folder)).free // 2
        self.limit, self.ahead = most, integer("ahead", ahead)
        self.store, self.timeout = _pickled(store), seconds("timeout", timeout)
        self._open(dict(vars(self)))
        largest = int(self.nbytes.max())
        if largest > most:
            raise ValueError(
                f"limit={most} is too small: the largest shard takes {largest} bytes; pass a "
                "larger limit"
            )

    def __reduce__(self) -> Any:
        return _opened, (type(self), self._state)

    def _open(self, state: dict[str, Any]) -> None:
        """Open the cache. The fetcher creates the index if necessary."""
        self._state, self._start = state, pickle.dumps((type(self), state))
        # The mapped shards of the latest batch.
        self._mapped: dict[int, Any] = {}
        self._client = Client.opened(self.folder, self.about, is_kept=self.is_kept)
        self._ask("stats")
        self.load()
        self._ends = self.sizes.cumsum()

    def _ask(self, *message: Any, **options: Any) -> Any:
        return self._client.ask(self._start, *message, **options)

    # -- reader methods that run in workers

    def mapped(self, number: int, view: mmap.mmap) -> Any:
        """Return a mapped shard in the form that `gather` expects."""
        raise NotImplementedError

    def gather(self, mapped: Mapping[int, Any], shards: Ints, rows: Ints) -> Any:
        """Return a batch of rows from several shards."""
        raise NotImplementedError

    def pick(self, batch: Any, number: int) -> Any:
        """Return one sample from a batch."""
        return batch[number]

    def __len__(self) -> int:
        """Return the number of samples in all shards."""
        return int(self._ends[-1])

    def __repr__(self) -> str:
        root, names, pattern = self.place
        where = root + (pattern or f"… ({len(names)} objects)")
        return (
            f"<{type(self).__name__}: {len(self):,} samples in {len(self.sizes):,} shards of "
            f"{where}, kept in {self.folder}>"
        )

    def order(self, window: int = 4) -> Order:
        """Return an order that mixes samples from a few shards at a time.

        Pass it to a sequence as ``order=`` or to `cseq.DataLoader` as ``sampler=``. Shards are then
        fetched before a batch needs them.

        Parameters
        ----------
        window : int
            The number of shards to mix, as in `cseq.Blocks`.

        Raises
        ------
        ValueError
            If `limit` is too small for two windows plus the `ahead` shards fetched in advance.
        """
        order = Windows(self, window)
        largest = np.sort(self.nbytes)[::-1][: 2 * order.window + self.ahead]
        if int(largest.sum()) > self.limit:
            raise ValueError(
                f"limit={self.limit} is too small for window={window}: two windows and the "
                f"ahead={self.ahead} shards that are fetched in advance take up to {largest.sum()} "
                "bytes; pass a limit of at least this size, or a smaller window or ahead"
            )
        return order

    def stats(self) -> ShardStats:
        """Return statistics on the cache and the fetches."""
        return ShardStats(len(self.sizes), *self._ask("stats"))

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, or a batch for a slice, list or array."""
        if isinstance(index, slice):
            return self._batch(np.arange(len(self))[index])
        if np.ndim(index):
            return self._batch(np.asarray(index))
        return self.pick(self._batch(np.array([range(len(self))[index]])), 0)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a list of samples, for loaders that read several at once."""
        batch = self._batch(np.asarray(indices))
        return [self.pick(batch, k) for k in range(len(indices))]

    def _batch(self, indices: NDArray[Any]) -> Any:
        if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
            raise TypeError(f"indices={indices!r} is not a one-dimensional array of integers")
        total = len(self)
        where = np.where(indices < 0, indices + total, indices).astype(np.int64)
        if len(where) and not 0 <= where.min() <= where.max() < total:
            wrong = indices[(where < 0) | (where >= total)][0]
            raise IndexError(f"index {wrong} is out of range for {total} samples")
        shards = self._ends.searchsorted(where, "right")
        rows = where - (self._ends - self.sizes)[shards]
        return self.gather(self._map(np.unique(shards).tolist()), shards, rows)

    def _map(self, shards: list[int]) -> Mapping[int, Any]:
        """Map a batch's shards, waiting for missing ones."""
        before = self._mapped
        mapped = {number: before[number] for number in shards if number in before}
        if len(mapped) == len(shards):
            return mapped
        self._map_there([number for number in shards if number not in mapped], mapped)
        if len(mapped) < len(shards):
            nbytes = int(self.nbytes[shards].sum())
            if nbytes > self.limit:
                raise ValueError(
                    f"limit={self.limit} is too small: the {len(shards)} shards of this batch take "
                    f"{nbytes} bytes; pass a larger limit, or use the order from order()"
                )
        while missing := [number for number in shards if number not in mapped]:
            self._ask("need", missing, use=partial(self._map_there, mapped=mapped))
        self._ask("use", shards, threading.get_native_id(), answers=False)
        self._mapped = mapped
        return mapped

    def _map_there(self, numbers: list[int], mapped: dict[int, Any]) -> None:
        """Map the given shards that are in the cache."""
        for number in numbers:
            with (
                contextlib.suppress(FileNotFoundError),
                open(f"{self.folder}/shards/{number}", "rb", buffering=0) as file,
            ):
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                mapped[number] = self.mapped(number, view)


class Windows(Blocks):
    """An order that reports its position to the fetcher."""

    def __init__(self, shards: Shards, window: int) -> None:
        super().__init__(shards.sizes, window)
        self._shards = shards

    def reader(self, seed: int) -> Units:
        """Return a reader that reports its position to the fetcher."""
        inner: Any = super().reader(seed)
        shards = self._shards

        def read(epoch: int, units: Ints) -> Read:
            found: Read = inner.call(epoch, units)
            first = int(shards._ends.searchsorted(found[0][0], "right"))
            shards._ask("plan", self.window, seed, epoch, first, answers=False)
            return found

        return ArrayReader(self, seed, read)

    def batches(self, *args: Any, **options: Any) -> list[list[int]]:
        """Return the batches without fetching shards."""
        return Blocks(self._shards.sizes, self.window).batches(*args, **options)


def _opened(kind: type[Shards], state: dict[str, Any]) -> Shards:
    shards = kind.__new__(kind)
    vars(shards).update(state)
    shards._open(state)
    return shards


def _pickled(store: Any) -> bytes | None:
    """Pickle a store, which may contain user functions."""
    if store is None:
        return None
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(store)
    return pickled


def _refuse_what_is_missing() -> None:
    if os.name == "nt":
        raise OSError("cseq.store does not work on Windows, because it needs file locks (fcntl)")
    if importlib.util.find_spec("obstore") is None:
        raise ImportError(
            "cseq.store needs obstore: pip install 'cseq-loader[store]'", name="obstore"
        )
