"""The arguments of MSequence."""

from __future__ import annotations

import functools
import inspect
import os
import typing
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from cseq._core import ALGORITHMS
from cseq.check import ELSEWHERE, MOST_WORKERS, OF_DATASET, flag, integer, unexpected
from cseq.indexing import indexer
from cseq.indexing.dataset import is_torchs, unasked
from cseq.measure.advice import MOST_READERS
from cseq.options import Size, WorkerOptions
from cseq.order.base import Order
from cseq.order.sampler import Sampler
from cseq.order.shuffled import Sequential, Shuffled
from cseq.system import share

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from numpy.typing import NDArray

    from cseq.converter.output import Output
    from cseq.indexing.indexer import Indexer
    from cseq.order.shard import Shard

    Worker: TypeAlias = Callable[[], Indexer[Any]] | Indexer[Any]
    Shuffle: TypeAlias = bool | Literal["feistel"]
    ThreadType: TypeAlias = Literal["proc", "thread", "ray"]
    StartMethod: TypeAlias = Literal["forkserver", "spawn", "fork"]
    OnError: TypeAlias = Literal["raise", "skip"]
    OnTimeout: TypeAlias = Literal["raise", "restart"]
    TestMode: TypeAlias = Literal["default", "cpu", "numpy"]

    class Device(Protocol):
        """A torch.device."""

        type: str
        index: int

    # 'cuda', 'cuda:1', 'cpu' or 'null'. A Literal could not list all device numbers.
    OutType: TypeAlias = str | Device | Callable[[NDArray[Any]], object] | None

__all__ = [
    "Job",
    "batch_size_of",
    "converters_of",
    "dtype_of",
    "explained",
    "fleet_of",
    "is_auto",
    "refuse",
    "sampler_of",
    "samples_of",
    "sizes_of",
    "workers_of_auto",
]

F = typing.TypeVar("F", bound="Callable[..., None]")

MOST_EPOCHS = 2**63
# Worker names shown in `repr`, keyed by `thread_type`.
KINDS = {"proc": "processes", "thread": "threads", "ray": "processes of a fleet"}
BATCH_SIZE = 32
AUTO = "auto"
# 'auto' starts with up to AUTO_START workers and at least FIRST_BUFFER batches. It can grow to
# MOST_READERS workers per core (between LEAST_READERS and AUTO_READERS, but at least one per core)
# and to AUTO_BUFFER batches or AUTO_WORDS indices, but at least two batches per worker.
AUTO_START, FIRST_BUFFER, LEAST_READERS, AUTO_READERS = 4, 10, 16, 64
AUTO_BUFFER, AUTO_WORDS = 1024, 2**20
# Each batch is mapped in two processes, and Linux allows about 65000 mappings per process.
MOST_BUFFER = 2**14
# A ticket stores its word count in 32 bits.
MOST_BATCH = 2**32 - 1


def explained(initialise: F) -> F:
    """Decorate a constructor to suggest the right keyword if an unknown one is passed."""
    signature = inspect.signature(initialise)

    @functools.wraps(initialise)
    def __init__(self: object, *values: object, **named: object) -> None:  # noqa: N807
        caller, (_, *names) = type(self).__name__, signature.parameters
        for name in named.keys() - signature.parameters.keys():
            is_dataset = indexer.takes_samples([*values, named.get("worker")][0])
            raise unexpected(caller, name, names, OF_DATASET if is_dataset else ELSEWHERE)
        try:
            signature.bind(self, *values, **named)
        except TypeError as error:
            raise TypeError(f"{caller}(): {error}") from None
        initialise(self, *values, **named)

    return typing.cast("F", __init__)


def sizes_of(
    num_workers: object, buffer: Any, thread_type: str, words: int
) -> tuple[Size, Size, tuple[bool, bool]]:
    """Validate `num_workers` and `buffer` for cells that hold `words` indices each.

    Return the initial size, the maximum size, and whether each argument is 'auto'.
    """
    if buffer is None:
        buffer = AUTO if thread_type == "ray" else 10
    auto = is_auto("num_workers", num_workers), is_auto("buffer", buffer)
    start, most = workers_of_auto()
    if not auto[1]:
        buffer = integer("buffer", buffer, most=MOST_BUFFER)
    if not auto[0]:
        number = integer("num_workers", num_workers, least=0, most=MOST_WORKERS)
        if thread_type == "proc" and number > most:
            warnings.warn(
                f"num_workers={number} is too high for {share()} cores: more than {most} worker "
                "processes slow down the start and the machine; num_workers='auto' chooses the "
                "number",
                # Point the warning at the line that creates the MPSequence.
                stacklevel=6,
            )
        start = most = number
    elif thread_type == "ray":
        raise ValueError(
            "num_workers='auto' cannot be combined with thread_type='ray', because cseq cannot "
            "know how many workers other machines can run; pass a number"
        )
    elif not auto[1]:
        # If there were more workers than buffered batches, some would be idle.
        start, most = min(start, buffer), min(most, buffer)
    if not auto[1]:
        return Size(start, buffer), Size(most, buffer), auto
    first = max(FIRST_BUFFER, 2 * start)
    cells = max(first, 2 * most, min(AUTO_BUFFER, AUTO_WORDS // words))
    return Size(start, min(first, MOST_BUFFER)), Size(most, min(cells, MOST_BUFFER)), auto


def is_auto(name: str, value: object) -> bool:
    """Return whether an argument is 'auto'. Reject other strings."""
    if isinstance(value, str) and value != AUTO:
        raise TypeError(f"{name}={value!r} is not an integer; pass an integer or 'auto'")
    return isinstance(value, str)


def workers_of_auto() -> tuple[int, int]:
    """Return the initial and the maximum number of workers for 'auto'.

    Initially, one core is left free for the loop. Workers that wait for a disk can outnumber cores.
    """
    cores = share()
    start = max(1, min(AUTO_START, cores - 1))
    return start, max(cores, min(max(MOST_READERS * cores, LEAST_READERS), AUTO_READERS))


class Job(NamedTuple):
    """Validated arguments for an `MSequence`.

    Attributes
    ----------
    output : Output
        The output for `out_type` and `dtype`.
    num_workers, buffer : int
        The maximum numbers of workers and of batches in progress or ready, respectively.
    num_converters : int
        The number of converters, or 0 without CUDA.
    start : Size
        The initial size of the pool.
    auto : (bool, bool)
        Whether `num_workers` and `buffer` are 'auto'.
    compat : bool or None
        If False, CUDA converters are processes. Otherwise, they are threads.
    fleet : RayFleet or None
        The fleet that was passed as `worker`.
    """

    worker: Any
    sampler: Sampler
    output: Output
    num_workers: int
    num_converters: int
    buffer: int
    ordered: bool
    on_error: str
    seed_globals: bool
    options: WorkerOptions
    start: Size
    auto: tuple[bool, bool] = (False, False)
    fleet: Any = None
    compat: bool | None = None

    def without_worker(self) -> Job:
        """Return a copy without the worker, to avoid a reference cycle."""
        return self._replace(worker=None, fleet=None)


def sampler_of(
    worker: Any, dset_size: Any, order: Order, batch_size: object, seed: Any, drop_last: Any,
    ordered: Any, shard: Shard, pad: Any, repeat: object,
) -> Sampler:  # fmt: skip
    """Validate the sampling arguments and create the sampler."""
    return Sampler(
        samples_of(worker, order) if dset_size is None else dset_size,
        order,
        batch_size=batch_size_of(batch_size, order),
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
        drop_last=flag("drop_last", drop_last),
        rank=shard.rank,
        world_size=shard.world_size,
        pad=flag("pad", pad),
        repeat=repeat_of(repeat, ordered=ordered, pad=pad, drop_last=drop_last),
        data=worker if hasattr(worker, "token_sums") else None,
    )


def refuse(options: WorkerOptions, *, seed_globals: bool, given: bool) -> None:
    """Reject options that Ray does not support, or that must be passed to the fleet."""
    given_options = {**options._asdict(), "memory_limit": None, "seed_globals": seed_globals}
    for name, value in given_options.items():
        own = name in ("timeout", "threads", "seed_globals")
        if value != WorkerOptions._field_defaults.get(name, True) and (given or not own):
            to_do = "pass it to the fleet" if own else "Ray starts them; see RayFleet"
            raise TypeError(f"{name}={value!r} has no effect on a fleet's workers: {to_do}")


def fleet_of(worker: Any, thread_type: str) -> tuple[Any, Any]:
    """Validate `worker`. Return the user's worker, and the fleet (None if none was passed)."""
    if thread_type not in KINDS:
        raise TypeError(f"thread_type={thread_type!r} is unknown; pass one of {[*KINDS]}")
    if not hasattr(worker, "ask") or not hasattr(worker, "handles"):
        indexer.check_worker(worker)
        is_dataset = is_torchs(worker) and not isinstance(worker, type)
        return unasked(worker) if is_dataset else worker, None
    if thread_type != "ray":
        raise TypeError(f"worker={worker!r} is a fleet; pass it to a RaySequence")
    return worker.worker, worker


def batch_size_of(batch_size: object, order: Order) -> int:
    """Validate `batch_size`. If the order's units are batches, return 1."""
    if batch_size is None:
        raise TypeError(
            "batch_size=None is not an integer; the indexer always receives an array of indices, "
            "so pass 1 to get one sample per batch"
        )
    most = MOST_BATCH if order.room == 1 else MOST_BATCH // (order.room + 1)
    size = integer("batch_size", batch_size, most=most)
    if order.is_batch:
        if size not in (1, BATCH_SIZE):
            raise ValueError(
                f"batch_size={size} cannot be combined with order={order!r}, whose units are "
                "batches; omit batch_size"
            )
        return 1
    return size


def own_order(worker: object) -> Order | None:
    """Return the indexer's own order, if any."""
    order = getattr(worker, "order", None) if indexer.is_indexer(worker) else None
    return order if isinstance(order, Order) else None


def order_of(worker: object, order: object, shuffle: object) -> Order:
    """Validate `order`, or choose one."""
    if order is None:
        order = own_order(worker)
    if order is None:
        if shuffle == "feistel":
            return Shuffled()
        if isinstance(shuffle, str):
            raise ValueError(f"shuffle={shuffle!r} is unknown; pass True, False or 'feistel'")
        return Shuffled(algorithm=ALGORITHMS[0]) if flag("shuffle", shuffle) else Sequential()
    if not isinstance(order, Order):
        if callable(getattr(order, "__iter__", None)):
            raise TypeError(
                f"order={order!r} is not a cseq.Order; pass torch samplers to cseq.DataLoader, or "
                "subclass cseq.Order to define your own order"
            )
        raise TypeError(f"order={order!r} is not a cseq.Order; pass a cseq.Order object or None")
    if shuffle is not True:
        raise ValueError(
            f"shuffle={shuffle!r} cannot be combined with order={order!r}; pass only one of them"
        )
    return order


def repeat_of(repeat: object, *, ordered: bool, pad: bool, drop_last: bool) -> int:
    """Validate `repeat`, and return the number of epochs."""
    number = MOST_EPOCHS if repeat is True else integer("repeat", repeat, most=MOST_EPOCHS)
    if number > 1 and not ordered:
        raise ValueError(
            f"repeat={repeat!r} cannot be combined with ordered=False, because batches from two "
            "epochs would be mixed; pass ordered=True, or call iter() for each epoch"
        )
    if number > 1 and not (pad or drop_last):
        raise ValueError(
            f"repeat={repeat!r} cannot be combined with pad=False, because ranks may have unequal "
            "numbers of batches in an epoch; pass pad=True or drop_last=True, or call iter() for "
            "each epoch"
        )
    return number


def converters_of(workers: int, converters: int | None, thread_type: ThreadType) -> int:
    """Validate or choose the number of converters.

    One converter is enough for worker processes, because their slots are page-locked. Batches from
    worker threads must first be copied to page-locked memory.
    """
    if converters is None:
        return min(workers, 1 if thread_type == "proc" else max(4, workers // 4))
    number = integer("num_converters", converters)
    if not workers:
        return 0
    if number > workers:
        raise ValueError(
            f"num_converters={number} exceeds num_workers={workers}; pass at most {workers}, or "
            "None"
        )
    return number


def dtype_of(worker: object, dtype: object) -> object:
    """Resolve 'auto': None if `worker` is a dataset or has its own order, else 'float32'."""
    if not isinstance(dtype, str) or dtype != "auto":
        return dtype
    is_kept = indexer.takes_samples(worker) or own_order(worker) is not None
    return None if is_kept else "float32"


def samples_of(worker: object, order: Order) -> int:
    """Return the default `dset_size`: the length of `worker` or the sample count of `order`."""
    length = indexer.length_of(worker)
    if length is None:
        length = order.samples
    if length is None:
        raise TypeError(
            f"dset_size is missing, and worker={worker!r} has no length; pass the number of "
            "samples or an array of their indices, or create the worker with "
            "cseq.from_dataset(dataset)"
        )
    return length
