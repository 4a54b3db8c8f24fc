"""The subclasses of `MSequence`, one for each kind of worker."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

from cseq import arguments
from cseq.sequence import MSequence

if TYPE_CHECKING:
    from typing import Literal

    from typing_extensions import TypeVar

    from cseq.order.base import Order
    from cseq.order.shard import Given

    B_co = TypeVar("B_co", covariant=True, default=Any)
else:
    B_co = typing.TypeVar("B_co", covariant=True)

__all__ = ["MPSequence", "MTSequence", "RaySequence"]


class _Kind(MSequence[B_co]):
    """An `MSequence` whose `thread_type` is fixed."""

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
        MSequence.__init__(**locals(), thread_type=self._thread_type)


class MPSequence(_Kind[B_co]):
    """A manager that makes whole batches in worker processes, for indexers that run Python code.

    The parameters are the same as for `MSequence`, except that there is no ``thread_type``.

    Examples
    --------
    >>> manager = cseq.MPSequence(np.arange(6), batch_size=3, shuffle=False, out_type="null")
    >>> with manager.start() as batches:
    ...     print(*batches)
    [0 1 2] [3 4 5]
    """

    _thread_type = "proc"


class MTSequence(_Kind[B_co]):
    """A manager that makes whole batches in threads, for indexers that release the GIL.

    Such indexers read files, wait for a network, or compute in native code. The parameters are the
    same as for `MSequence`, except that there is no ``thread_type``.

    Examples
    --------
    >>> manager = cseq.MTSequence(np.arange(6), batch_size=3, shuffle=False, out_type="null")
    >>> with manager.start() as batches:
    ...     print(*batches)
    [0 1 2] [3 4 5]
    """

    _thread_type = "thread"


class RaySequence(_Kind[B_co]):
    """A manager that makes whole batches in worker processes on the nodes of a Ray cluster.

    The parameters are the same as for `MSequence`, except that there is no ``thread_type``.
    `worker` may be a `RayFleet`. Otherwise, `start` creates a fleet of `num_workers` processes with
    one CPU each, and `finish` shuts it down. If Ray is not connected yet, `start` calls
    ``ray.init()``. `buffer` defaults to 'auto', limited by `memory_limit`.

    Examples
    --------
    >>> manager = cseq.RaySequence(np.arange(6), batch_size=3, shuffle=False, out_type="null")
    >>> with manager.start_test() as batches:  # start() has Ray's nodes make the same ones
    ...     print(*batches)
    [0 1 2] [3 4 5]
    """

    _thread_type = "ray"
