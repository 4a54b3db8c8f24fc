"""The epoch: its samples in order, cut into batches, this rank's part of each.

The order is a pure function of (seed, epoch); see docs/inside/shuffle.md. Global batch ``t`` covers
its positions ``[t * G, (t + 1) * G)``, where ``G = batch_size * world_size``, and every rank takes
a contiguous part. With 20 samples, ``batch_size=3`` and ``world_size=2``::

    position  0  1  2  3  4  5 │ 6  7  8  9 10 11 │12 13 14 15 16 17 │18 19
    rank      0  0  0  1  1  1 │ 0  0  0  1  1  1 │ 0  0  0  1  1  1 │ 0  1
              global batch 0   │ global batch 1   │ global batch 2   │ tail

The tail is left out if `drop_last`. Otherwise its ``m`` samples are cut into `world_size`
contiguous parts of ``ceil(m / world_size)``; where samples are missing for that, those at the
beginning of the epoch's order are repeated. So every rank has the same number of batches and of
samples, and a batch has the same size on all ranks. This is the only padding: it repeats at most
``world_size - 1`` samples of an epoch, and none on one rank. Without `pad`, the parts of the tail
differ by one sample, and some ranks may have one batch less than others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from cseq._core import ALGORITHMS, Order
from cseq.check import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["RankSampler", "Sampler"]

Indices: TypeAlias = "NDArray[np.int64]"

MOST_SAMPLES = 2**48
MOST_SEED = 2**64 - 1


class Cut(NamedTuple):
    """How an epoch, or what is left of one, is cut into batches for one rank.

    The core reads the first six.
    """

    first: int  # how many batches of this size came before batch 0 in the epoch
    batches: int
    full: int  # batches with all samples; they come first
    start: int  # position of the first one's first sample
    stride: int  # positions from one to the next: samples of a global batch
    size: int  # samples of a full batch
    part: int  # samples of the batch after them; 0: there is none
    consumed: int  # samples that all ranks together have had before batch 0


class Sampler:
    """The samples of an epoch for one rank, batch by batch.

    Parameters
    ----------
    dset_size : int or sequence of int
        Number of samples, or the samples themselves: a one-dimensional array or list of integer
        indices, one at least. An integer array is neither copied nor written to.
    batch_size : int
        Samples of a batch, for each rank.
    shuffle : bool or 'feistel'
        False: in their natural order, in every epoch. True: ``fisher-yates-v1``; else
        ``feistel-v1``.
    seed : int
        In [0, 2**64).
    drop_last : bool
        Leave out the last batch if it is short.
    rank, world_size : int
        Which part of every global batch is ours, and how many parts there are.
    pad : bool
        False: no sample is repeated, so that ranks may have unequal parts of the tail.

    Raises
    ------
    TypeError, ValueError
        An argument is not an integer, or out of range.
    """

    def __init__(
        self,
        dset_size: object,
        *,
        batch_size: int,
        shuffle: bool | Literal["feistel"],
        seed: int,
        drop_last: bool,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
    ) -> None:
        self.dset_size, indices = _samples(dset_size)
        self.batch_size = count("batch_size", batch_size)
        self.shuffle = bool(shuffle)
        self.algorithm = ALGORITHMS[shuffle == "feistel"]
        if hasattr(seed, "initial_seed"):
            raise TypeError(f"seed={seed!r} is a generator; give an integer: initial_seed() of it")
        self.seed = count("seed", seed, 0, MOST_SEED)
        self.drop_last = drop_last
        self.world_size = count("world_size", world_size)
        self.rank = count("rank", rank, 0, self.world_size - 1)
        self.pad = pad
        self._stride = self.batch_size * self.world_size  # samples of a global batch
        self.order = Order(
            self.dset_size,
            shuffle=self.shuffle,
            seed=self.seed,
            indices=indices,
            feistel=shuffle == "feistel",
        )
        self.order.cut = self.cut_at(0)
        self.length = self.cut.batches

    def changed(
        self, *, seed: int | None = None, rank: int | None = None, world_size: int | None = None
    ) -> Sampler:
        """Return the same sampler with another seed, or another part of the global batches."""
        indices = self.order.indices
        return Sampler(
            self.dset_size if indices is None else indices,
            batch_size=self.batch_size,
            shuffle="feistel" if self.algorithm == ALGORITHMS[1] else self.shuffle,
            seed=self.seed if seed is None else seed,
            drop_last=self.drop_last,
            rank=self.rank if rank is None else rank,
            world_size=self.world_size if world_size is None else world_size,
            pad=self.pad,
        )

    def __len__(self) -> int:
        """Batches of the epoch that has begun, for this rank: fewer if it began in its middle."""
        return self.cut.batches

    @property
    def cut(self) -> Cut:
        """How the epoch that has begun is cut; it changes together with the order."""
        cut: Cut = self.order.cut
        return cut

    def begin(self, epoch: int, consumed: int = 0) -> None:
        """Begin an epoch, at once, also if the last one is not over.

        Parameters
        ----------
        epoch : int
            At least 0.
        consumed : int
            Samples that all ranks together have had of this epoch. The rest is cut into global
            batches from there, so `batch_size` and `world_size` may be others than before.

        Raises
        ------
        TypeError, ValueError
            An argument is not an integer, or out of range.
        """
        self.order.begin(count("epoch", epoch, 0, MOST_SEED), self.cut_at(consumed))

    def cut_at(self, consumed: int) -> Cut:
        """Cut the positions from `consumed` on into batches; nothing changes. See `begin`."""
        consumed = count("consumed", consumed, 0, self.dset_size)
        full, tail = divmod(self.dset_size - consumed, self._stride)
        part = self._share(tail)
        return Cut(
            first=consumed // self._stride,
            batches=full + (part > 0),
            full=full,
            start=consumed + self.rank * self.batch_size,
            stride=self._stride,
            size=self.batch_size,
            part=part,
            consumed=consumed,
        )

    def _share(self, tail: int) -> int:
        """Return how many of the last samples, fewer than a global batch, are ours."""
        if self.drop_last:
            return 0
        if self.pad:
            return -(-tail // self.world_size)
        return tail // self.world_size + (self.rank < tail % self.world_size)

    def position(self, batch: int) -> int:
        """Return how many samples of this epoch all ranks together had before a batch.

        Padding does not count. ``position(len(sampler))`` is what they have had when this rank
        has had its last batch; without `pad`, others may then have one more to come: see `end`.

        Raises
        ------
        IndexError
            There is no such batch.
        """
        cut = self.cut
        if not 0 <= batch <= cut.batches:
            raise IndexError(f"batch {batch} is not one of {cut.batches}")
        return min(cut.consumed + batch * cut.stride, self.dset_size)

    @property
    def end(self) -> int:
        """Samples of this epoch that all ranks together have had when it is over."""
        left_out = (self.dset_size - self.cut.consumed) % self._stride if self.drop_last else 0
        return self.dset_size - left_out

    @property
    def samples(self) -> int:
        """Samples of an epoch for this rank."""
        full, tail = divmod(self.dset_size, self._stride)
        return full * self.batch_size + self._share(tail)

    def start(self, batch: int) -> int:
        """Return the position of a batch's first sample in the order of the epoch."""
        cut = self.cut
        if batch < cut.full:
            return cut.start + batch * cut.stride
        if self.pad:
            return self.position(batch) + self.rank * cut.part
        size, more = divmod(self.dset_size - self.position(batch), self.world_size)
        return self.position(batch) + self.rank * size + min(self.rank, more)

    def size(self, batch: int) -> int:
        """Return the number of samples of a batch; nothing is shuffled for it.

        Raises
        ------
        IndexError
            There is no such batch.
        """
        cut = self.cut
        if 0 <= batch < cut.full:
            return cut.size
        if not 0 <= batch < cut.batches:
            raise IndexError(f"batch {batch} is not one of {cut.batches}")
        return cut.part

    def indices(self, batch: int) -> Indices:
        """Return the samples of a batch: a fresh array of shape (size,), the caller's to change.

        Raises
        ------
        IndexError
            There is no such batch.
        """
        cut = self.cut
        if 0 <= batch < cut.full:
            return self.order.read(cut.start + batch * cut.stride, cut.size)
        indices = np.empty(self.size(batch), np.int64)
        self.fill(batch, indices)
        return indices

    def fill(self, batch: int, out: Indices) -> int:
        """Write the samples of a batch to the beginning of `out`; return how many.

        Raises
        ------
        IndexError
            There is no such batch.
        ValueError
            `out` is too short.
        """
        cut = self.cut
        if 0 <= batch < cut.full:
            self.order.read_into(cut.start + batch * cut.stride, cut.size, out)
            return cut.size
        size = self.size(batch)
        if size > len(out):
            raise ValueError(f"out has room for {len(out)} samples, batch {batch} has {size}")
        self._fill_tail(self.start(batch), out[:size])
        return size

    def _fill_tail(self, start: int, out: Indices) -> None:
        """Write samples from position `start` on, past the end those from the beginning on."""
        done = 0
        while done < len(out):
            start %= self.dset_size
            size = min(len(out) - done, self.dset_size - start)
            self.order.read_into(start, size, out[done:])
            done += size
            start += size


def _samples(dset_size: object) -> tuple[int, NDArray[np.integer[Any]] | None]:
    """Return the number of samples, and their indices if they were given."""
    if isinstance(dset_size, Iterator):
        raise TypeError(
            f"dset_size is a {type(dset_size).__name__}, which has no length; give the number of "
            "samples, or numpy.fromiter(..., int) of it if it yields their indices"
        )
    if isinstance(dset_size, (bool, np.bool_, str, bytes)) or not hasattr(dset_size, "__len__"):
        return count("dset_size", dset_size, 1, MOST_SAMPLES), None
    if not _holds_numbers(dset_size):
        raise TypeError(
            f"dset_size is a {type(dset_size).__name__}; give len(...) of it, or a one-dimensional "
            "array of the samples' indices"
        )
    indices = _read_only(dset_size)
    if indices.ndim != 1:
        raise ValueError(
            f"dset_size has shape {indices.shape}; give a number, or a one-dimensional array"
        )
    if not len(indices):
        raise ValueError("dset_size is empty; give a number of at least 1, or one index at least")
    if indices.dtype.kind not in "iu":
        raise TypeError(f"dset_size has {indices.dtype} indices; give integers")
    if indices.dtype.itemsize == 8 and indices.dtype.kind == "u" and indices.max() >= 2**63:
        raise ValueError(f"dset_size has an index of {indices.max()}; give indices below 2**63")
    return len(indices), indices


def _holds_numbers(indices: object) -> bool:
    """Return whether an object is an array of numbers, and not a data set.

    numpy reads an object with ``__len__`` and ``__getitem__`` until IndexError, which a data set
    may never raise.
    """
    if isinstance(indices, (list, tuple)):
        return (
            not indices
            or not hasattr(type(indices[0]), "__getitem__")
            or _holds_numbers(indices[0])
        )
    return isinstance(indices, (range, array, memoryview)) or hasattr(indices, "__array__")


def _read_only(indices: object) -> NDArray[Any]:
    """Return a view of an array, or an array of a sequence, that cannot be written to."""
    try:
        view: NDArray[Any] = np.asarray(indices).view()
    except (TypeError, ValueError) as error:  # of lists of unequal length, for one
        raise TypeError(f"dset_size is no array of integers: {error}") from error
    view.flags.writeable = False
    return view


class RankSampler:
    """`MSequence.sampler`: `set_epoch` and a length, for frameworks that ask for them."""

    __slots__ = ("_count", "set_epoch")

    def __init__(self, count: Callable[[], int], set_epoch: Callable[[int], None]) -> None:
        self._count = count
        self.set_epoch = set_epoch

    def __len__(self) -> int:
        """Samples that this rank gets in an epoch."""
        return self._count()
