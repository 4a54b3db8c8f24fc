"""The order of an epoch: the keys of the index sampler, drawn one by one.

An index sampler is what a loader takes its keys from: its batch sampler, or its sampler if it does
not batch. What has to be kept of one, so that its keys can be drawn again, depends on its type:

============================================  =====================================================
torch's RandomSampler                         the seed that it draws at the beginning of an epoch
the same with a generator; torch's others     the generator's state at the beginning, or that of
that draw (`DRAWING`), with one and without   torch's global one
a sampler, or iterator, with ``state_dict``   its state behind the key of the last batch delivered
one with ``epoch`` and ``set_epoch``          that number (torch's DistributedSampler)
any other                                     nothing: keys are drawn and dropped
============================================  =====================================================
"""

from __future__ import annotations

import copy
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cseq.adapters.torch.stateful import is_stateful

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Order", "inner_of", "leaves_no_trace", "noted", "order_of"]

State = dict[str, Any]

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
OWN = (*DRAWING, DistributedSampler)


def inner_of(index_sampler: Any) -> Any:
    """Return the sampler that torch's own BatchSampler has; of any other, itself."""
    return index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler


def leaves_no_trace(index_sampler: Any) -> bool:
    """Whether keys can be drawn before workers are forked, and no worker can tell.

    torch forks first. Its own samplers change nothing but torch's generator, which every worker
    seeds anew, and a generator that they were given: the data set may have that one. They ask the
    data set for its length, which a SequentialSampler has not done before.
    """
    inner = inner_of(index_sampler)
    return type(inner) in OWN and getattr(inner, "generator", None) is None


def order_of(index_sampler: Any, iterator: Any, ahead: int) -> Order:
    """Choose how the keys of a sampler are kept track of.

    Parameters
    ----------
    iterator : iterator
        ``iter(index_sampler)``.
    ahead : int
        The most keys that are drawn ahead of the batches delivered.
    """
    inner = inner_of(index_sampler)
    if is_stateful(iterator) or is_stateful(index_sampler) or is_stateful(inner):
        sampler = index_sampler if is_stateful(index_sampler) else inner
        stateful = sampler if is_stateful(sampler) else None
        return StatefulOrder(index_sampler, iterator, stateful, ahead)
    if type(inner) in DRAWING:
        return RandomOrder(index_sampler, iterator, inner)
    if isinstance(getattr(inner, "epoch", None), int) and callable(
        getattr(inner, "set_epoch", None)
    ):
        return EpochOrder(index_sampler, iterator, inner)
    return Order(index_sampler, iterator)


class Order:
    """An epoch's keys, of a sampler of which nothing is known.

    Parameters
    ----------
    index_sampler : iterable
    iterator : iterator
        ``iter(index_sampler)``.
    """

    def __init__(self, index_sampler: Any, iterator: Any) -> None:
        self._index_sampler = index_sampler
        self._iterator = iterator

    def keys(self, yielded: int, state: State | None) -> Iterator[Any]:
        """Return the keys from the `yielded`-th on; `state` is that of the run that is resumed."""
        keys: Iterator[Any] = self._begin(yielded, state or {})
        return keys

    def _begin(self, yielded: int, state: State) -> Any:  # noqa: ARG002
        return islice(self._iterator, yielded, None) if yielded else self._iterator

    def state(self, yielded: int, *, finished: bool = False) -> State:  # noqa: ARG002
        """Return what has to be kept, when so many batches of this epoch have been delivered.

        `finished`: and the loop was told that the epoch is over.
        """
        return {}


class RandomOrder(Order):
    """An epoch's keys, of one of torch's own samplers that draw from a generator.

    Without one of its own it draws from torch's global one with its first key: a RandomSampler a
    seed, which is drawn here for it, at the same moment; the others all that they need.
    """

    def __init__(self, index_sampler: Any, iterator: Any, sampler: Any) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = sampler
        self._draws_seed = type(sampler) is RandomSampler and sampler.generator is None
        self._state: State = {}

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        keys = self._draw(yielded, state)
        return islice(keys, yielded, None) if yielded else keys

    def _draw(self, yielded: int, state: State) -> Iterator[Any]:
        """Yield the keys; with the first, the seed or the generator's state is noted."""
        own, given = self._sampler.generator, state.get("generator")
        if own is None and given is not None:
            self._state = {"generator": given}
            yield from self._with(torch.Generator().set_state(given))
        elif self._draws_seed:
            seed = state.get("seed")
            if seed is None or not yielded:  # drawn as ever, also if it is known
                drawn = _draw_seed(torch.default_generator)
                seed = drawn if seed is None else seed
            self._state = {"seed": seed}
            yield from self._with(torch.Generator().manual_seed(seed))
        else:
            generator = torch.default_generator if own is None else own
            if given is not None:
                generator.set_state(given)
            self._state = {"generator": generator.get_state()}
            yield from self._iterator

    def _with(self, generator: torch.Generator) -> Iterator[Any]:
        """Iterate over the sampler as if it had been given this generator."""
        sampler = copy.copy(self._sampler)
        sampler.generator = generator
        if self._sampler is self._index_sampler:
            return iter(sampler)
        batches = copy.copy(self._index_sampler)
        batches.sampler = sampler
        return iter(batches)

    def state(self, yielded: int, *, finished: bool = False) -> State:  # noqa: ARG002
        """Return the seed, or the generator's state; as they would be if the first key came now."""
        if self._state:
            return dict(self._state)
        now = (self._sampler.generator or torch.default_generator).get_state()
        if not self._draws_seed:
            return {"generator": now}
        return {"seed": _draw_seed(torch.Generator().set_state(now))}


def _draw_seed(generator: torch.Generator) -> int:
    """Draw a seed as a RandomSampler does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class EpochOrder(Order):
    """An epoch's keys, of a sampler that is told the epoch's number.

    The number of the state goes before what the sampler was told: Lightning tells a loader that
    goes on the epoch when its first keys are drawn.
    """

    def __init__(self, index_sampler: Any, iterator: Any, sampler: Any) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = sampler
        self._epoch: int | None = None

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        keys = self._draw(state.get("epoch"))
        return islice(keys, yielded, None) if yielded else keys

    def _draw(self, epoch: int | None) -> Iterator[Any]:
        """Yield the keys; with the first, the epoch's number is noted."""
        if epoch is not None:
            self._sampler.set_epoch(epoch)
            self._iterator = iter(self._index_sampler)
        self._epoch = self._sampler.epoch
        yield from self._iterator

    def state(self, yielded: int, *, finished: bool = False) -> State:  # noqa: ARG002
        """Return the number; as it would be if the first key came now."""
        return {"epoch": self._sampler.epoch if self._epoch is None else self._epoch}


class StatefulOrder(Order):
    """An epoch's keys, of a sampler or an iterator that has a state.

    Keys are drawn ahead of the batches delivered: a state is taken with each, and kept as long as
    its batch may be the last one delivered.
    """

    def __init__(self, index_sampler: Any, iterator: Any, sampler: Any, ahead: int) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = sampler  # the one that has a state, if any
        # By the number of keys drawn: of the last batch, the one that is taken, and those ahead.
        self._taken: deque[tuple[int, State]] = deque(maxlen=ahead + 2)
        self._last: State | None = None  # once it has no more keys: for the next epoch

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        skip = yielded
        if state.get("sampler") is not None and self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])
            self._iterator = iter(self._index_sampler)
            skip = state.get("skip", 0)
        if state.get("iterator") is not None and is_stateful(self._iterator):
            self._iterator.load_state_dict(state["iterator"])
            skip = state.get("skip", 0)
        self._taken.append((yielded, self._take()))
        return self._draw(islice(self._iterator, skip, None), yielded)

    def _draw(self, keys: Iterator[Any], drawn: int) -> Iterator[Any]:
        for key in keys:
            drawn += 1
            self._taken.append((drawn, self._take()))
            yield key
        self._last = self._take()

    def _take(self) -> State:
        """Take the present state."""
        state: State = {}
        if self._sampler is not None:
            state["sampler"] = copy.deepcopy(self._sampler.state_dict())
        if is_stateful(self._iterator):
            state["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return state

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the state behind the key of the last batch delivered; drop earlier ones."""
        if finished and self._last is not None:
            return copy.deepcopy(self._last)
        taken = self._taken
        while len(taken) > 1 and taken[0][0] < yielded:
            taken.popleft()
        return copy.deepcopy(taken[0][1])


def noted(keys: Iterator[Any], drawn: deque[tuple[int, Any]]) -> Iterator[Any]:
    """Yield keys, and note them with their numbers.

    Not a method: a bound generator would close a reference cycle through the streams.
    """
    for numbered in enumerate(keys):
        drawn.append(numbered)
        yield numbered[1]
