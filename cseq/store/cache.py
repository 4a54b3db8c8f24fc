"""`cached`: wraps a data set so that each sample is created once per machine."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import sysconfig
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, overload

import numpy as np

from cseq.check import integer
from cseq.encoding.pickling import dump, dumps
from cseq.encoding.survey import batch_reducers
from cseq.store.entries import LINE, Entries
from cseq.store.folder import shared_folder
from cseq.system import memory_limit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["CacheStats", "Cached", "cached"]

T_co = TypeVar("T_co", covariant=True)

FORMAT = 2
REDUCERS = partial(batch_reducers, handles=False)


class Samples(Protocol[T_co]):
    """A data set that `cached` accepts."""

    def __getitem__(self, index: int, /) -> T_co: ...
    def __len__(self) -> int: ...


class CacheStats(NamedTuple):
    """Statistics on a cache, across all processes.

    Attributes
    ----------
    samples, kept : int
        The number of samples in the data set and in the cache.
    nbytes, limit : int
        The current size and the maximum size of the cache in bytes.
    hits : int
        The number of times a sample was found in the cache.
    made : int
        The number of times a sample was created and stored in the cache.
    others : int
        The number of times a sample was created but not stored, because the cache was full or
        another worker stored the sample.
    """

    samples: int
    kept: int
    nbytes: int
    limit: int
    hits: int
    made: int
    others: int


def cached(
    make: Samples[T_co], limit: int | str, *, folder: str | None = None, version: str | None = None
) -> Cached[T_co]:
    """Cache a data set so that each sample is created only once per machine.

    All workers, ranks and threads on a machine share one copy of each sample. `make` must be
    deterministic: apply random transforms after the cache. As a check, each process recreates one
    cached sample and raises an error if it differs.

    Parameters
    ----------
    make : data set
        ``make[index]`` returns a sample of arrays, CPU tensors, numbers, strings and containers.
        ``len(make)`` is the number of samples. Each worker process receives a pickled copy.
    limit : int or str
        The maximum size of the cache in bytes, such as ``4 * 2**30`` or ``'4 GB'``. Once the cache
        is full, further samples are created on every access.
    folder : str, optional
        A folder on a local disk in which to keep samples between runs, for this cache only. By
        default, samples stay in shared memory (or in a temporary folder if ``/dev/shm`` is smaller
        than `limit`) until the last process exits.
    version : str, optional
        Change this when `make` returns different samples. By default, `make` is identified by its
        pickle and its source code.

    Returns
    -------
    Cached
        A data set. Indexing with an integer returns a copy of a sample. A list or array returns a
        list of samples, whose arrays are read-only views of the cache.

    Raises
    ------
    ValueError
        If the folder was created for a different data set, version or limit.
    OSError
        If there is not enough space for the index, or on Windows.

    Examples
    --------
    >>> pictures = [np.full((8, 8), number, np.uint8) for number in range(100)]
    >>> samples = cseq.cached(pictures, "1 MB")
    >>> int(samples[3].sum()), int(samples[3].sum()), samples.stats().hits
    (192, 192, 1)
    """
    if os.name == "nt":
        raise OSError("cseq.cached does not work on Windows, because it needs file locks (fcntl)")
    for name in ("__getitem__", "__len__"):
        if not hasattr(make, name):
            raise TypeError(f"make={make!r} has no {name}; pass a data set that has one")
    about = {
        "format": FORMAT,
        "samples": integer("len(make)", len(make)),
        "limit": memory_limit_of(limit, "limit"),
        **_identity(make, version),
    }
    if folder is not None:
        return Cached(make, about, os.path.abspath(folder), is_kept=True)
    return Cached(make, about, shared_folder("cache", about, about["limit"]), is_kept=False)


class Cached(Generic[T_co]):
    """A data set with cached samples, returned by `cached`. Unpickled copies use the same cache."""

    def __init__(
        self,
        make: Samples[T_co],
        about: dict[str, Any],
        folder: str,
        is_kept: bool,  # noqa: FBT001
    ) -> None:
        self._make, self._about, self._folder, self._is_kept = make, about, folder, is_kept
        self._entries = Entries.opened(folder, about, is_kept=is_kept)
        self._is_checked = False

    def __reduce__(self) -> Any:
        return Cached, (self._make, self._about, self._folder, self._is_kept)

    def __len__(self) -> int:
        return int(self._about["samples"])

    def __repr__(self) -> str:
        have = self.stats()
        return (
            f"<Cached: {have.kept:,} of {have.samples:,} samples, {have.nbytes:,} of at most "
            f"{have.limit:,} bytes in {self._folder}; {have.hits:,} hits>"
        )

    def stats(self) -> CacheStats:
        """Return statistics on the cache, across all processes."""
        entries = self._entries
        there = len(self), entries.kept, entries.nbytes, entries.limit
        return CacheStats(*there, *entries.counts())

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: Sequence[int] | NDArray[np.integer[Any]]) -> list[T_co]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = range(len(self))[index]
        if isinstance(index, (list, tuple, range, np.ndarray)):
            return [self._read(number, copies=False) for number in index]
        return self._read(index, copies=True)

    def _read(self, index: int, *, copies: bool) -> Any:
        number = range(len(self))[index]
        entry = self._entries.find(number)
        if entry is None:
            return self._made(number)
        if not self._is_checked:
            self._check(number, entry)
        return _sample_of(entry, copies=copies)

    def _made(self, number: int) -> T_co:
        """Create a sample. Store it, unless another process or thread has claimed it."""
        if not self._entries.claim(number):
            return self._make[number]
        try:
            sample = self._make[number]
            self._entries.keep(number, _entry_of(sample))
        finally:
            self._entries.release(number)
        return sample

    def _check(self, number: int, entry: memoryview) -> None:
        """Recreate a sample. Raise ValueError if it differs from the cached one."""
        self._is_checked = True
        ours = b"".join(_entry_of(self._make[number]))
        if _arrays_of(memoryview(ours)) != _arrays_of(entry):
            raise ValueError(
                f"make[{number}] returned a sample that differs from the cached one. Samples must "
                "not depend on random numbers; apply random augmentation after the cache. If make "
                f"has changed, pass a different version= or delete {self._folder}"
            )


# An entry consists of words (number of buffers, pickle size, buffer sizes), a pickle, and buffers.


def _entry_of(sample: object) -> list[Any]:
    """Return the parts of an entry."""
    buffers: list[memoryview] = []
    data = dumps(sample, buffers, REDUCERS)
    words = np.array([len(buffers), len(data), *(buffer.nbytes for buffer in buffers)], np.int64)
    parts: list[Any] = [words.tobytes(), data]
    end = words.nbytes + len(data)
    for buffer in buffers:
        parts += [bytes(-end % LINE), buffer]
        end += -end % LINE + buffer.nbytes
    return parts


def _parts_of(entry: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle and the buffers of an entry."""
    number, nbytes = entry[:16].cast("q")
    end = 16 + 8 * number
    sizes, data = entry[16:end].cast("q").tolist(), entry[end : end + nbytes]
    end += nbytes
    buffers = []
    for size in sizes:
        end += -end % LINE
        buffers.append(entry[end : end + size])
        end += size
    return data, buffers


def _sample_of(entry: memoryview, *, copies: bool) -> Any:
    data, views = _parts_of(entry)
    return pickle.loads(data, buffers=[bytearray(view) for view in views] if copies else views)


def _arrays_of(entry: memoryview) -> list[memoryview] | memoryview:
    """Return the arrays of an entry or, if there are none, its pickle."""
    data, buffers = _parts_of(entry)
    return buffers or data


def _identity(make: Any, version: str | None) -> dict[str, Any]:
    """Identify a data set by its type and its version or, without one, by its data and code."""
    kind = type(make)
    named = f"{kind.__module__}.{kind.__qualname__}"
    if version is not None:
        return {"type": named, "version": version}
    modules = dump(make, name="make").modules
    buffers: list[memoryview] = []
    pickled = dumps(make, buffers, REDUCERS)
    # cloudpickle assigns a random number to each class that it pickles by value.
    if b"_make_skeleton_class" in pickled:
        raise ValueError(
            f"make={make!r} uses a class that is defined inside a function, and its pickle "
            "differs between processes; define the class in a module, or pass version="
        )
    data = hashlib.sha256(pickled)
    for buffer in buffers:
        data.update(buffer)
    code = hashlib.sha256()
    for path in sorted(filter(None, map(_source_of, {kind.__module__, *modules}))):
        with open(path, "rb") as file:
            code.update(file.read())
    return {"type": named, "data": data.hexdigest(), "code": code.hexdigest()}


def _source_of(name: str) -> str | None:
    """Return the path of a module's source, or None if it is installed or has no source."""
    path: str = getattr(sys.modules.get(name), "__file__", None) or ""
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    is_source = path.endswith(".py") and os.path.exists(path)
    return path if is_source and not path.startswith(installed) else None
