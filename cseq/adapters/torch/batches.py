"""Orders of cseq in a DataLoader: as a batch sampler that has a state."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from cseq.adapters.torch import ranks
from cseq.arguments import batch_size_of
from cseq.check import flag, integer
from cseq.order import checkpoint
from cseq.order import shard as shards
from cseq.order.base import Order
from cseq.order.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.order._source import OrderSource
    from cseq.order.shard import Given

__all__ = ["BatchSampler", "with_order"]

log = logging.getLogger("cseq")


class BatchSampler:
    """A batch sampler for `cseq.DataLoader`, and torch's: the batches of a `cseq.Order`.

    ``DataLoader(…, batch_sampler=order)`` makes one. Each ``iter()`` is the next epoch, and
    one in the middle of an epoch leaves that. Frameworks that divide batches among ranks, such as
    accelerate, divide these, too.

    Parameters
    ----------
    order : Order
        Over as many samples as the data set has.
    batch_size : int
        Units of a batch, for each rank.
    seed : int, optional
        In [0, 2**64), the same on all ranks. By default torch's initial seed, or a state's; where
        there is a process group, its rank 0's.
    drop_last : bool
        Leave out the last batch if it is short.
    shard : (rank, world_size), process group, DeviceMesh, 'auto' or None
        This rank's part of every global batch, see `cseq.MSequence`. By default the whole batch,
        even if there are other ranks: some frameworks divide what they get.
    pad : bool
        False: no unit is repeated, so that ranks may have unequal parts.

    Examples
    --------
    >>> from cseq.adapters.torch import BatchSampler
    >>> list(BatchSampler(cseq.Sequential(7), 3, seed=0))
    [[0, 1, 2], [3, 4, 5], [6]]
    """

    def __init__(
        self,
        order: Order,
        batch_size: int = 1,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        shard: Given = None,
        pad: bool = True,
    ) -> None:
        if not isinstance(order, Order):
            raise TypeError(f"order={order!r} is not a cseq.Order; give one")
        if order.samples is None:
            raise ValueError(f"order={order!r} is over no number of samples; give it one")
        # Whether a state's seed replaces its own; whether that is drawn, or None before it is;
        # whether it is known to be rank 0's.
        self._takes_any = seed is None
        self._is_drawn = None if seed is None else False
        self._is_agreed = False
        self._number, self._loads = ranks.number_of(order), 0
        self._shard = shards.check_shard(shard)
        rank, world_size, _ = self._shard or shards.ALONE
        self._sampler = Sampler(
            order.samples,
            order,
            batch_size=batch_size_of(batch_size, order),
            seed=0 if seed is None else seed,
            drop_last=flag("drop_last", drop_last),
            rank=rank,
            world_size=world_size,
            pad=flag("pad", pad),
        )
        # An epoch and how much of it is over: where the next `iter` begins, and after the latest
        # batch, unless its epoch is over.
        self._next = 0, 0
        self._now: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Batches in an epoch, for this rank."""
        self._settle()
        return self._sampler.length

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch, for frameworks that divide batches; None if it varies."""
        order = self._sampler.order
        return None if order.is_batch or order.room > 1 else self._sampler.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the last batch is left out if it is short."""
        return self._sampler.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``; one that goes on stays in its own."""
        if integer("epoch", epoch, least=0) != self._next[0]:
            self._next = epoch, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Begin the next epoch, or go on in the one whose state was loaded."""
        shard = self._settle()
        if self._is_drawn is not False:
            shard.check_drawn(self._sampler.order)
        self._agree()
        self._now = None
        return self._keys(self._next, self._sampler.source(*self._next, own=True))

    def _keys(self, begun: tuple[int, int], source: OrderSource) -> Iterator[list[int]]:
        """Yield the batches; a state is as of the last one that was drawn."""
        sampler, epoch, consumed = self._sampler, begun[0], source.consumed
        end, stride = sampler.end(consumed), sampler.batch_size * sampler.world_size
        # Not by `iter`, which torch calls more than once for an epoch.
        if self._next == begun:
            self._next = epoch + 1, 0
        for batch in range(len(source)):
            self._now = epoch, min(consumed + (batch + 1) * stride, end)
            yield source.samples(batch)[0].tolist()
        self._now = None

    def _settle(self) -> shards.Shard:
        """Resolve shard='auto'; the first answer holds."""
        if self._shard is None:
            self._shard = shard = shards.resolve()
            self._sampler = self._sampler.changed(rank=shard.rank, world_size=shard.world_size)
        return self._shard

    def _agree(self) -> None:
        """Draw a seed, rank 0's; or compare a given one with rank 0's, if ranks divide batches."""
        divider = ranks.divider(self)
        is_drawn, is_divided = self._is_drawn is None, divider not in (None, self)
        if self._is_agreed or not (is_drawn or is_divided):
            return
        ranks.divisions(divider)
        order = self._sampler.order
        own = torch.initial_seed() if is_drawn else self._sampler.seed
        seed = ranks.agreed(own, order, self._number, self._loads)
        if is_drawn:
            self._sampler = self._sampler.changed(seed=seed)
            self._is_drawn = True
        elif seed != own:
            raise ValueError(
                f"seed={own} of order={order!r} is {seed} on rank 0, so ranks that divide its "
                "batches would miss samples; give all of them the same (generator= of a "
                "DataLoader), or none"
            )
        self._is_agreed = True
        if seed != own and divider is None:
            log.warning(
                "order=%r has rank 0's seed here, too, not torch.initial_seed()=%d: unless a "
                "framework divides its batches, all ranks read the same ones; give batch_sampler="
                "BatchSampler(order, seed=..., shard='auto') of cseq.adapters.torch",
                order,
                own,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return where the order is, after the last batch that was drawn."""
        self._agree()
        return checkpoint.make(self._sampler, self._sampler.world_size, *(self._now or self._next))

    def state_after(self, state: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return what `state_dict` says `batches` batches after a state of the same epoch."""
        sampler, consumed = self._sampler, state["consumed"]
        end, stride = sampler.end(consumed), sampler.batch_size * sampler.world_size
        consumed = min(consumed + batches * stride, end)
        return checkpoint.make(sampler, sampler.world_size, state["epoch"], consumed)

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Have the next ``iter()`` go on where a state was taken; see `cseq.MSequence`."""
        self._sampler, epoch, consumed, *_ = checkpoint.load(
            state, self._sampler, any_seed=self._takes_any, strict=flag("strict", strict)
        )
        self._next, self._now = (epoch, consumed), None
        self._is_drawn = self._is_agreed = False
        self._loads += 1


def with_order(args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a DataLoader's arguments by name, with a `BatchSampler` instead of an order."""
    positions = inspect.signature(DataLoader).parameters
    given: dict[str, Any] = dict(zip(positions, args, strict=False)) | kwargs
    name, order = next((name, value) for name, value in given.items() if isinstance(value, Order))
    if name not in ("sampler", "batch_sampler"):
        raise TypeError(
            f"{name}={order!r} of a DataLoader: give it as sampler=, or as batch_sampler= where it "
            "has batches of its own"
        )
    dataset = given.get("dataset")
    if dataset is None or isinstance(dataset, IterableDataset):
        what = "no data set" if dataset is None else f"dataset={dataset!r}, an IterableDataset"
        raise TypeError(
            f"{name}={order!r} beside {what}: an order needs a data set that is read by index; "
            "give dataset= with __getitem__(index) and __len__()"
        )
    order = order.over(len(dataset))
    del given[name]
    generator = given.get("generator")
    seed = None if generator is None else generator.initial_seed()
    for other in ("shuffle", "sampler", "batch_sampler"):
        value = given.pop(other, None)
        if value is not None and value is not False:
            raise ValueError(f"{other}={value!r} beside {name}={order!r}; give one of them")
    if name == "batch_sampler":
        if not order.is_batch and order.room == 1:
            raise ValueError(
                f"batch_sampler={order!r} has single samples; give sampler= and a batch_size"
            )
        return given | {name: BatchSampler(order, seed=seed)}
    if order.is_batch or order.room > 1:
        raise ValueError(f"sampler={order!r} has batches of its own; give batch_sampler=")
    size, drop_last = given.pop("batch_size", 1), given.pop("drop_last", False)
    if size is None:
        raise ValueError(f"batch_size=None beside sampler={order!r}; give a number")
    batches = BatchSampler(order, size, seed=seed, drop_last=drop_last)
    return given | {"batch_sampler": batches}
