"""What all readers of shards have in common."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import pickle
import shutil
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

# Of a cache folder.
VERSION = 2


class ShardStats(NamedTuple):
    """What a reader's cache has, and what was fetched for it since its process began.

    Attributes
    ----------
    shards, kept : int
        In the store, and in the cache.
    nbytes, limit : int
        Bytes that the shards in the cache take, and may take.
    fetched, fetched_nbytes : int
        Shards, and the bytes that came for them.
    """

    shards: int
    kept: int
    nbytes: int
    limit: int
    fetched: int
    fetched_nbytes: int


class Shards(Reader):
    """Samples in shards of a store, read by their indices.

    Parameters
    ----------
    urls : str, path, or list of these
        A folder, such as ``"s3://bucket/train/"``; a pattern, such as
        ``"gs://bucket/train-*.tar"``; or objects. ``s3``, ``gs``, ``az``, ``http``, ``https`` and
        ``file`` are known, and paths. Over http, which lists nothing, give a list of all shards.
    cache : str or path, optional
        A folder on a local disk, where shards are kept from one run to the next. Without it, they
        are in shared memory (in a temporary folder, where that is smaller than `limit`), until
        the last process ends.
    limit : int or str, optional
        The most bytes that shards take there, such as ``"64 GB"``. Without it, half of what is
        free there now.
    ahead : int
        How many shards are fetched at once, before a batch needs them. More help where shards are
        small, or the store is far away.
    store : optional
        A store of obstore's, with your credentials and options. `urls` are then paths in it.
    timeout : float
        Seconds without a byte after which a request is made again.

    Attributes
    ----------
    sizes : array of int
        Samples of each shard.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; shards differ in kind, or have changed since the index was made; or
        the cache is of other shards.
    OSError
        The store cannot be read. The message names the shard, the store and the cause. What a
        later fetch meets is raised in the loop.
    ImportError
        obstore is missing.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        cache: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
        ahead: int = 4,
        store: Any = None,
        timeout: float = 30.0,
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
        self.store, self.timeout = _pickled(store), seconds("timeout", timeout) or 0.0
        self._open(dict(vars(self)))
        largest = int(self.nbytes.max())
        if largest > most:
            raise ValueError(
                f"limit={most} is too small: a shard takes {largest} bytes; give a larger one"
            )

    def __reduce__(self) -> Any:
        return _opened, (type(self), self._state)

    def _open(self, state: dict[str, Any]) -> None:
        """Open the cache, and read the index, which is made if it is not there."""
        self._state, self._start = state, pickle.dumps((type(self), state))
        # The shards of the latest batch, mapped.
        self._mapped: dict[int, Any] = {}
        self._client = Client.opened(self.folder, self.about, is_kept=self.is_kept)
        self._ask("stats")
        self.load()
        self._ends = self.sizes.cumsum()

    def _ask(self, *message: Any, answers: bool = True) -> Any:
        return self._client.ask(self._start, *message, answers=answers)

    # -- what readers do in a worker

    def mapped(self, number: int, view: mmap.mmap) -> Any:
        """Return what `gather` gets of a shard."""
        raise NotImplementedError

    def gather(self, mapped: Mapping[int, Any], shards: Ints, rows: Ints) -> Any:
        """Return the batch of some rows of shards."""
        raise NotImplementedError

    def pick(self, batch: Any, number: int) -> Any:
        """Return one sample of a batch."""
        return batch[number]

    # --

    def __len__(self) -> int:
        """Samples in all shards."""
        return int(self._ends[-1])

    def __repr__(self) -> str:
        root, names, pattern = self.place
        where = root + (pattern or f"… ({len(names)} objects)")
        return (
            f"<{type(self).__name__}: {len(self):,} samples in {len(self.sizes):,} shards of "
            f"{where}, kept in {self.folder}>"
        )

    def order(self, window: int = 4) -> Order:
        """Return an order that mixes the samples of some shards at a time.

        Give it as ``order=`` to a sequence, or as ``sampler=`` to `cseq.DataLoader`. The shards
        that it needs next are then fetched before a batch needs them.

        Parameters
        ----------
        window : int
            How many shards are mixed, as in `cseq.Blocks`.

        Raises
        ------
        ValueError
            The cache's limit has no room for the shards of two windows and those fetched ahead.
        """
        order = Windows(self, window)
        largest = np.sort(self.nbytes)[::-1][: 2 * order.window + self.ahead]
        if int(largest.sum()) > self.limit:
            raise ValueError(
                f"limit={self.limit} is too small for window={window}: two windows, and "
                f"ahead={self.ahead} shards that are fetched, take up to {largest.sum()} bytes; "
                "give such a limit, or a smaller window or ahead"
            )
        return order

    def stats(self) -> ShardStats:
        """Return what the cache has, and what was fetched."""
        return ShardStats(len(self.sizes), *self._ask("stats"))

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, or for a slice, list or array of indices a batch."""
        if isinstance(index, slice):
            return self._batch(np.arange(len(self))[index])
        if np.ndim(index):
            return self._batch(np.asarray(index))
        return self.pick(self._batch(np.array([range(len(self))[index]])), 0)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of some indices, as data loaders ask for them."""
        batch = self._batch(np.asarray(indices))
        return [self.pick(batch, k) for k in range(len(indices))]

    def _batch(self, indices: NDArray[Any]) -> Any:
        """Return a batch; waits for shards that are not in the cache."""
        if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
            raise TypeError(f"indices={indices!r}: give one-dimensional integers")
        total = len(self)
        where = np.where(indices < 0, indices + total, indices).astype(np.int64)
        if len(where) and not 0 <= where.min() <= where.max() < total:
            wrong = indices[(where < 0) | (where >= total)][0]
            raise IndexError(f"index {wrong} is out of range: there are {total} samples")
        shards = self._ends.searchsorted(where, "right")
        rows = where - (self._ends - self.sizes)[shards]
        return self.gather(self._map(np.unique(shards).tolist()), shards, rows)

    def _map(self, shards: list[int]) -> Mapping[int, Any]:
        """Map the shards of a batch; wait for those that are not there."""
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
                    f"{nbytes} bytes; give a larger limit, or read in the order of order()"
                )
        while missing := [number for number in shards if number not in mapped]:
            self._map_there(self._ask("need", missing), mapped)
        self._ask("use", shards, answers=False)
        self._mapped = mapped
        return mapped

    def _map_there(self, numbers: list[int], mapped: dict[int, Any]) -> None:
        """Map shards, if they are there."""
        for number in numbers:
            with (
                contextlib.suppress(FileNotFoundError),
                open(f"{self.folder}/shards/{number}", "rb", buffering=0) as file,
            ):
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                mapped[number] = self.mapped(number, view)


class Windows(Blocks):
    """The order of a reader, which says where it is read."""

    def __init__(self, shards: Shards, window: int) -> None:
        super().__init__(shards.sizes, window)
        self._shards = shards

    def reader(self, seed: int) -> Units:
        """Return what reads the order."""
        inner: Any = super().reader(seed)
        shards = self._shards

        def read(epoch: int, units: Ints) -> Read:
            found: Read = inner.call(epoch, units)
            first = int(shards._ends.searchsorted(found[0][0], "right"))
            shards._ask("plan", self.window, seed, epoch, first, answers=False)
            return found

        return ArrayReader(self, seed, read)

    def batches(self, *args: Any, **options: Any) -> list[list[int]]:
        """Return batches, as `Order.batches` does; nothing is fetched for who looks at them."""
        return Blocks(self._shards.sizes, self.window).batches(*args, **options)


def _opened(kind: type[Shards], state: dict[str, Any]) -> Shards:
    """Open a reader of which a pickle has come to this process."""
    shards = kind.__new__(kind)
    vars(shards).update(state)
    shards._open(state)
    return shards


def _pickled(store: Any) -> bytes | None:
    """Pickle a store, which may have functions of the user's."""
    if store is None:
        return None
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(store)
    return pickled


def _refuse_what_is_missing() -> None:
    if os.name == "nt":
        raise OSError("cseq.store needs fcntl's locks, which Windows does not have")
    if importlib.util.find_spec("obstore") is None:
        raise ImportError(
            "cseq.store needs obstore: pip install 'cseq-loader[store]'", name="obstore"
        )
