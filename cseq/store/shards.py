"""What all readers of shards have in common."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import pickle
import shutil
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cseq.check import integer, seconds
from cseq.order._readers import ArrayReader
from cseq.order.blocks import Blocks
from cseq.store import folder as folders
from cseq.store.client import Client
from cseq.store.format import Format, Spec
from cseq.store.place import located
from cseq.system import memory_limit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cseq._core import Reader
    from cseq.order.base import Ints, Order, Read

__all__ = ["ShardStats", "Shards"]

# Of a cache folder.
VERSION = 1


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
    retried : int
        Requests that were made again after a connection was cut or stalled. obstore makes others
        again, which are not counted.
    """

    shards: int
    kept: int
    nbytes: int
    limit: int
    fetched: int
    fetched_nbytes: int
    retried: int


class Shards:
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
        obstore or pyarrow is missing.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        format: Format,  # noqa: A002 - of the shards
        *,
        cache: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
        ahead: int = 4,
        store: Any = None,
        timeout: float = 30.0,
    ) -> None:
        _refuse_what_is_missing()
        place = located(urls, format.suffix, in_store=store is not None)
        # As JSON has it, to be compared.
        where = [place.root, list(place.names), place.pattern]
        about = {"version": VERSION, "urls": where, **format.about()}
        folder, most = _folder_of(cache, about, limit)
        spec = Spec(
            folder,
            place,
            format,
            store,
            most,
            integer("ahead", ahead),
            seconds("timeout", timeout) or 0.0,
            cache is not None,
        )
        self._begin(folder, _pickled(spec), spec._replace(store=None), about)
        self._client.ask({"hello": 1}, begins=True)
        self._load()
        largest = int(self._format.nbytes.max())
        if largest > most:
            raise ValueError(
                f"limit={most} is too small: a shard takes {largest} bytes; give a larger one"
            )

    def _begin(self, folder: str, pickled: bytes, spec: Spec, about: dict[str, Any]) -> None:
        self._folder, self._pickled, self._spec, self._about = folder, pickled, spec, about
        self._format = spec.format
        # The shards that were told last.
        self._latest: list[int] = []
        self._client = _client_of(folder, pickled, about, is_kept=spec.is_kept)

    def _load(self) -> None:
        self._format.load(self._folder)
        self.sizes: Ints = self._format.rows
        self._ends = self.sizes.cumsum()

    def __reduce__(self) -> Any:
        return _opened, (type(self), self._folder, self._pickled, self._spec, self._about)

    def __len__(self) -> int:
        """Samples in all shards."""
        return int(self._ends[-1])

    def __repr__(self) -> str:
        place = self._spec.place
        where = place.root + (place.pattern or f"… ({len(place.names)} objects)")
        return (
            f"<{type(self).__name__}: {len(self):,} samples in {len(self.sizes):,} shards of "
            f"{where}, kept in {self._folder}>"
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
        ahead, limit = self._spec.ahead, self._spec.limit
        largest = np.sort(self._format.nbytes)[::-1][: 2 * order.window + ahead]
        if int(largest.sum()) > limit:
            raise ValueError(
                f"limit={limit} is too small for window={window}: two windows, and ahead={ahead} "
                f"shards that are fetched, take up to {largest.sum()} bytes; give such a limit, or "
                "a smaller window or ahead"
            )
        return order

    def stats(self) -> ShardStats:
        """Return what the cache has, and what was fetched."""
        return ShardStats(len(self.sizes), **self._client.ask({"stats": 1}))

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, or for a slice, list or array of indices a batch."""
        if isinstance(index, slice):
            return self._batch(np.arange(len(self))[index])
        if np.ndim(index):
            return self._batch(np.asarray(index))
        return self._format.pick(self._batch(np.array([range(len(self))[index]])), 0)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of some indices, as data loaders ask for them."""
        batch = self._batch(np.asarray(indices))
        return [self._format.pick(batch, k) for k in range(len(indices))]

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
        files: dict[int, int] = {}
        try:
            self._open(np.unique(shards).tolist(), files)
            return self._format.gather(files, shards, rows)
        finally:
            for fd in files.values():
                os.close(fd)

    def _open(self, shards: list[int], files: dict[int, int]) -> None:
        """Open the files of shards; wait for those that are not there."""

        def found(number: int) -> bool:
            try:
                path = f"{self._folder}/shards/{number}"
                files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            return True

        there = [found(number) for number in shards]
        if not all(there):
            nbytes, limit = int(self._format.nbytes[shards].sum()), self._spec.limit
            if nbytes > limit:
                raise ValueError(
                    f"limit={limit} is too small: the {len(shards)} shards of this batch take "
                    f"{nbytes} bytes; give a larger limit, or read by order=photos.order()"
                )
            self._client.fetch(shards, files, found)
        elif shards != self._latest:
            self._client.tell({"use": shards})
        self._latest = shards

    def _reads(self, window: int, seed: int, epoch: int, unit: int) -> None:
        """Say where an order is read."""
        self._client.tell({"plan": [window, seed, epoch, unit]})


class Windows(Blocks):
    """The order of a reader, which says where it is read."""

    def __init__(self, shards: Shards, window: int) -> None:
        super().__init__(shards.sizes, window)
        self._shards = shards

    def reader(self, seed: int) -> Reader:
        """Return what reads the order."""
        inner: Any = super().reader(seed)

        def read(epoch: int, units: Ints) -> Read:
            self._shards._reads(self.window, seed, epoch, int(units[0]))
            found: Read = inner.call(epoch, units)
            return found

        return ArrayReader(self, seed, read)

    def batches(self, *args: Any, **options: Any) -> list[list[int]]:
        """Return batches, as `Order.batches` does; nothing is fetched for who looks at them."""
        return Blocks(self._shards.sizes, self.window).batches(*args, **options)


_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
_opening = threading.RLock()


def _client_of(folder: str, pickled: bytes, about: dict[str, Any], *, is_kept: bool) -> Client:
    """Return this process's connections to a folder, of which it has one object."""
    with _opening:
        client = _clients.get(folder)
        if client is None:
            client = _clients[folder] = Client(folder, pickled, is_kept=is_kept)
        folders.check(folder, about, "cache")
        return client


def _opened(kind: type[Shards], folder: str, pickled: bytes, spec: Spec, about: Any) -> Shards:
    """Open a reader of which a pickle has come to this process."""
    shards = kind.__new__(kind)
    shards._begin(folder, pickled, spec, about)
    # On another machine.
    if not os.path.exists(f"{folder}/index"):
        shards._client.ask({"hello": 1}, begins=True)
    shards._load()
    return shards


def _folder_of(cache: Any, about: dict[str, Any], limit: Any) -> tuple[str, int]:
    """Return the cache's folder, made if it is not there, and its limit."""
    most = None if limit is None else memory_limit_of(limit, "limit")
    if cache is not None:
        folder = os.path.abspath(os.fspath(cache))
        os.makedirs(folder, 0o700, exist_ok=True)
    else:
        start = f"{folders.base(most or 0)}/cseq-store-{os.getuid()}-"
        for path in glob.glob(f"{start}*"):
            # Of processes that were killed.
            folders.remove_unused(path)
        name = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]
        folder = start + name
    if most is None:
        most = shutil.disk_usage(os.path.dirname(folder)).free // 2
    return folder, most


def _pickled(spec: Spec) -> bytes:
    """Pickle what the process that fetches needs, such as a store with the user's functions."""
    if spec.store is None:
        return pickle.dumps(spec)
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(spec)
    return pickled


def _refuse_what_is_missing() -> None:
    if os.name == "nt":
        raise OSError("cseq.store needs fcntl's locks, which Windows does not have")
    missing = [name for name in ("obstore", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"cseq.store needs {' and '.join(missing)}: pip install 'cseq-loader[store]'",
            name=missing[0],
        )
