"""The kinds of `MSequence`, by what makes the batches."""

from __future__ import annotations

import inspect
import typing
from typing import TYPE_CHECKING, Any, Literal, overload

from cseq.sequence import MSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import TypeVar, Unpack

    from cseq.arguments import Keywords, Options, OutType, Shuffle, Worker
    from cseq.indexing.indexer import Indexer

    B_co = TypeVar("B_co", covariant=True, default=Any)
else:
    B_co = typing.TypeVar("B_co", covariant=True)

__all__ = ["MPSequence", "MTSequence", "RaySequence"]

BUFFER_AT = 5  # places among the arguments
THREAD_TYPE_AT = 7


class _Kind(MSequence[B_co]):
    """An `MSequence` whose class sets `thread_type`: the arguments after it move up by one."""

    _buffer: str | None = None  # the default of `buffer`, if it is another one

    @staticmethod
    def _parameters() -> Iterable[str]:
        return [name for name in MSequence._parameters() if name != "thread_type"]

    @overload
    def __init__(
        self,
        worker: Callable[[], Indexer[B_co]],
        dset_size: Any = ...,
        num_workers: int | Literal["auto"] = ...,
        *,
        out_type: Literal["null"],
        **options: Unpack[Keywords],
    ) -> None: ...

    @overload
    def __init__(
        self,
        worker: Indexer[B_co],
        dset_size: Any = ...,
        num_workers: int | Literal["auto"] = ...,
        *,
        out_type: Literal["null"],
        **options: Unpack[Keywords],
    ) -> None: ...

    @overload
    def __init__(
        self,
        worker: Worker,
        dset_size: Any = ...,
        num_workers: int | Literal["auto"] = ...,
        num_converters: int | None = ...,
        batch_size: int = ...,
        buffer: int | Literal["auto"] = ...,
        shuffle: Shuffle = ...,
        out_type: OutType = ...,
        seed: int | None = ...,
        **options: Unpack[Options],
    ) -> None: ...

    def __init__(self, *positions: Any, **options: Any) -> None:
        kind = self._thread_type
        if "thread_type" in options:
            name = type(self).__name__
            raise TypeError(f"{name}() has no argument 'thread_type', which is {kind!r} there")
        if self._buffer is not None and len(positions) <= BUFFER_AT:
            options.setdefault("buffer", self._buffer)
        before, after = positions[:THREAD_TYPE_AT], positions[THREAD_TYPE_AT:]
        initialise: Callable[..., None] = super().__init__
        if after:
            initialise(*before, kind, *after, **options)
        else:
            initialise(*before, thread_type=kind, **options)


class MPSequence(_Kind[B_co]):
    """An `MSequence` of worker processes: for indexers that compute in Python.

    Takes the parameters of `MSequence` but ``thread_type``.

    Examples
    --------
    >>> manager = cseq.MPSequence(np.arange(6), batch_size=3, shuffle=False, out_type="null")
    >>> with manager.start() as batches:
    ...     print(*batches)
    [0 1 2] [3 4 5]
    """

    _thread_type = "proc"


class MTSequence(_Kind[B_co]):
    """An `MSequence` of threads: for indexers that read, wait, or compute without the GIL.

    Takes the parameters of `MSequence` but ``thread_type``.

    Examples
    --------
    >>> manager = cseq.MTSequence(np.arange(6), batch_size=3, shuffle=False, out_type="null")
    >>> with manager.start() as batches:
    ...     print(*batches)
    [0 1 2] [3 4 5]
    """

    _thread_type = "thread"


class RaySequence(_Kind[B_co]):
    """An `MSequence` of worker processes on the nodes of a Ray cluster.

    Takes the parameters of `MSequence` but ``thread_type``; in the place of `worker` also a
    `RayFleet`, which then has the workers. Without one, `start` makes a fleet that `finish` ends:
    `num_workers` processes in all, of a CPU each, spread over the nodes, with `timeout`, `threads`
    and `seed_globals`. It connects to Ray as ``ray.init()`` does, where that has not been done.
    `buffer` is 'auto', which `memory_limit` bounds.

    Examples
    --------
    >>> manager = cseq.RaySequence(np.arange(6), batch_size=3, shuffle=False, out_type="null")
    >>> with manager.start_test() as batches:  # start() has Ray's nodes make the same ones
    ...     print(*batches)
    [0 1 2] [3 4 5]
    """

    _thread_type = "ray"
    _buffer = "auto"


def _sign() -> None:
    """Set the signatures of the classes that help and completion show."""
    signature = inspect.signature(MSequence.__init__)
    for kind in (MSequence, _Kind):
        shown = [signature.parameters[name] for name in ("self", *kind._parameters())]
        setattr(kind.__init__, "__signature__", signature.replace(parameters=shown))  # noqa: B010


_sign()
