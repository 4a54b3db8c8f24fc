"""A stateful batch sampler for using cseq orders with a DataLoader."""

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
    """A batch sampler over a `cseq.Order`, for `cseq.DataLoader` and torch's DataLoader.

    ``DataLoader(…, batch_sampler=order)`` creates a batch sampler. Each ``iter()`` starts the next
    epoch, even if the previous one is unfinished. Frameworks such as accelerate can divide the
    batches among ranks.

    Parameters
    ----------
    order : Order
        The order, with as many samples as the data set.
    batch_size : int
        The number of units per batch on each rank.
    seed : int, optional
        A seed in [0, 2**64), the same on all ranks. Defaults to the seed of a loaded state, or to
        torch's initial seed on rank 0.
    drop_last : bool
        Whether to drop an incomplete last batch.
    shard : (rank, world_size), process group, DeviceMesh, 'auto' or None
        Which part of every global batch to read; see `cseq.MSequence`. By default, every rank reads
        whole batches, because some frameworks divide the batches themselves.
    pad : bool
        If False, no units are repeated, and the last batch may differ in size between ranks.

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
            raise TypeError(f"order={order!r} is not a cseq.Order; pass a cseq.Order object")
        if order.samples is None:
            raise ValueError(
                f"order={order!r} was created without a number of samples; create it with one"
            )
        # `_takes_any`: whether a loaded state may replace the seed. `_is_drawn`: whether the seed
        # was drawn (None if it will be). `_is_agreed`: whether it is known to match rank 0's.
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
        # Positions (epoch, consumed units): `_next` is where the next `iter` starts. `_now` is the
        # position after the latest batch, or None if its epoch is over.
        self._next = 0, 0
        self._now: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank."""
        self._settle()
        return self._sampler.length

    @property
    def batch_size(self) -> int | None:
        """The number of samples per batch, or None if it varies. Frameworks read this."""
        order = self._sampler.order
        return None if order.is_batch or order.room > 1 else self._sampler.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is dropped."""
        return self._sampler.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next ``iter()``."""
        if integer("epoch", epoch, least=0) != self._next[0]:
            self._next = epoch, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Start the next epoch, or resume from a loaded state."""
        shard = self._settle()
        if self._is_drawn is not False:
            shard.check_drawn(self._sampler.order)
        self._agree()
        self._now = None
        return self._keys(self._next, self._sampler.source(*self._next, own=True))

    def _keys(self, begun: tuple[int, int], source: OrderSource) -> Iterator[list[int]]:
        """Yield the batches and track the position."""
        sampler, epoch, consumed = self._sampler, begun[0], source.consumed
        end, stride = sampler.end(consumed), sampler.batch_size * sampler.world_size
        # torch may call `__iter__` more than once per epoch, so advance the epoch here.
        if self._next == begun:
            self._next = epoch + 1, 0
        for batch in range(len(source)):
            self._now = epoch, min(consumed + (batch + 1) * stride, end)
            yield source.samples(batch)[0].tolist()
        self._now = None

    def _settle(self) -> shards.Shard:
        """Resolve shard='auto' on first use."""
        if self._shard is None:
            self._shard = shard = shards.resolve()
            self._sampler = self._sampler.changed(rank=shard.rank, world_size=shard.world_size)
        return self._shard

    def _agree(self) -> None:
        """Use the seed that rank 0 draws, or check that a given seed is the same as on rank 0."""
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
                f"order={order!r} has seed={own} on this rank but seed={seed} on rank 0, so ranks "
                "that divide its batches would miss samples; pass the same seed on all ranks (in "
                "a DataLoader, as generator=), or no seed"
            )
        self._is_agreed = True
        if seed != own and divider is None:
            log.warning(
                "order=%r uses rank 0's seed instead of this rank's torch.initial_seed()=%d: "
                "unless a framework divides the batches, all ranks read the same batches; to "
                "divide them, pass batch_sampler=cseq.adapters.torch.BatchSampler(order, "
                "seed=..., shard='auto')",
                order,
                own,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order after the latest batch."""
        self._agree()
        return checkpoint.make(self._sampler, self._sampler.world_size, *(self._now or self._next))

    def state_after(self, state: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return `state` as it would be `batches` batches later in its epoch."""
        sampler, consumed = self._sampler, state["consumed"]
        end, stride = sampler.end(consumed), sampler.batch_size * sampler.world_size
        consumed = min(consumed + batches * stride, end)
        return checkpoint.make(sampler, sampler.world_size, state["epoch"], consumed)

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Make the next ``iter()`` resume from a saved state; see `cseq.MSequence`."""
        self._sampler, epoch, consumed, *_ = checkpoint.load(
            state, self._sampler, any_seed=self._takes_any, strict=flag("strict", strict)
        )
        self._next, self._now = (epoch, consumed), None
        self._is_drawn = self._is_agreed = False
        self._loads += 1


def with_order(args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a DataLoader's arguments by name, with its order wrapped in a `BatchSampler`."""
    positions = inspect.signature(DataLoader).parameters
    given: dict[str, Any] = dict(zip(positions, args, strict=False)) | kwargs
    name, order = next((name, value) for name, value in given.items() if isinstance(value, Order))
    if name not in ("sampler", "batch_sampler"):
        raise TypeError(
            f"a DataLoader does not accept an order as {name}={order!r}; pass it as sampler=, or "
            "as batch_sampler= if it makes whole batches"
        )
    dataset = given.get("dataset")
    if dataset is None or isinstance(dataset, IterableDataset):
        what = "missing" if dataset is None else f"{dataset!r}, an IterableDataset"
        raise TypeError(
            f"{name}={order!r} is an order, which needs a data set that is read by index, but "
            f"dataset= is {what}; pass one with __getitem__(index) and __len__()"
        )
    order = order.over(len(dataset))
    del given[name]
    generator = given.get("generator")
    seed = None if generator is None else generator.initial_seed()
    for other in ("shuffle", "sampler", "batch_sampler"):
        value = given.pop(other, None)
        if value is not None and value is not False:
            raise ValueError(
                f"{other}={value!r} cannot be combined with {name}={order!r}; pass only one of them"
            )
    if name == "batch_sampler":
        if not order.is_batch and order.room == 1:
            raise ValueError(
                f"batch_sampler={order!r} yields single samples; pass it as sampler=, with a "
                "batch_size"
            )
        return given | {name: BatchSampler(order, seed=seed)}
    if order.is_batch or order.room > 1:
        raise ValueError(f"sampler={order!r} makes whole batches; pass it as batch_sampler=")
    size, drop_last = given.pop("batch_size", 1), given.pop("drop_last", False)
    if size is None:
        raise ValueError(
            f"batch_size=None cannot be combined with sampler={order!r}; pass a number"
        )
    batches = BatchSampler(order, size, seed=seed, drop_last=drop_last)
    return given | {"batch_sampler": batches}
