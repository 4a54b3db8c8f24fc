"""The order of an epoch: the keys of the index sampler, drawn one by one.

An index sampler is what a loader takes its keys from: its batch sampler, or its sampler if it does
not batch. What has to be kept of one, so that its keys can be drawn again, depends on its type:

============================================  =====================================================
torch's RandomSampler                         the seed that it draws at the beginning of an epoch
the same with a generator; torch's others     the generator's state at the beginning, or that of
that draw (`DRAWING`), with one and without;  torch's global one
any in a BatchSampler that has a generator
a sampler, or iterator, with ``state_dict``   its state behind the key of the last batch delivered
one with ``epoch`` and ``set_epoch``          that number (torch's DistributedSampler)
any other                                     the states of the global generators that it draws
                                              from with its first key, if any: its keys are drawn
                                              again from there, and dropped
============================================  =====================================================

Behind the end of an epoch it is what the next one begins with: the sampler's state, or that of its
generator. What is drawn from torch's global one is the trainer's.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy.random
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cseq.adapters.torch.stateful import is_stateful

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "OWN",
    "Order",
    "behind",
    "generator_of",
    "inner_of",
    "leaves_no_trace",
    "order_of",
    "states_before",
]

log = logging.getLogger("cseq")

State = dict[str, Any]

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
OWN = (*DRAWING, DistributedSampler)


def inner_of(index_sampler: Any) -> Any:
    """Return the sampler that torch's own BatchSampler has; of any other, itself."""
    return index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler


def generator_of(index_sampler: Any) -> torch.Generator | None:
    """Return the generator that a sampler has of its own, if any."""
    generator = getattr(inner_of(index_sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _with_generator(sampler: Any, generator: torch.Generator) -> Any:
    """Return a sampler as if it had been given this generator."""
    sampler = copy.copy(sampler)
    sampler.generator = generator
    return sampler


def _draw_seed(generator: torch.Generator) -> int:
    """Draw a seed, as a RandomSampler does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def behind(index_sampler: Any) -> State:
    """Return what is kept of a sampler between epochs: the state of its own generator, now."""
    generator = generator_of(index_sampler)
    return {} if generator is None else {"generator": generator.get_state()}


def leaves_no_trace(index_sampler: Any) -> bool:
    """Whether keys can be drawn before workers are forked, and no worker can tell.

    torch forks first. Its own samplers change nothing but torch's generator, which every worker
    seeds anew, and a generator that they were given: the data set may have that one. They ask the
    data set for its length, which a SequentialSampler has not done before.
    """
    inner = inner_of(index_sampler)
    return type(inner) in OWN and getattr(inner, "generator", None) is None


def global_states() -> State:
    """Return the states of the global generators: numbers, texts, and a tensor."""
    numbers = numpy.random.get_state()  # noqa: NPY002 - the global one is meant
    return {
        "random": random.getstate(),
        "numpy": _as_lists(numbers),
        "torch": torch.default_generator.get_state(),
    }


def states_before(index_sampler: Any) -> State | None:
    """Return the `global_states`, if `iter` of the sampler may draw: that of torch's does not."""
    is_torchs = type(index_sampler) in (BatchSampler, SequentialSampler, *OWN)
    return None if is_torchs else global_states()


def _as_lists(value: Any) -> Any:
    """Return a state of numpy's with lists for its arrays, which `set_state` takes as well."""
    if isinstance(value, dict):
        return {name: _as_lists(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_as_lists, value))
    return value.tolist() if isinstance(value, numpy.ndarray) else value


def _set_global(states: State) -> None:
    """Set those of the global generators of which there is a state."""
    if "random" in states:
        version, words, gauss = states["random"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        numpy.random.set_state(states["numpy"])  # noqa: NPY002 - the global one is meant
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])


def _drawn_from(before: State, after: State) -> State:
    """Return the states before, of those global generators that were drawn from since."""
    drawn = {name: before[name] for name in ("random", "numpy") if before[name] != after[name]}
    if not torch.equal(before["torch"], after["torch"]):
        drawn["torch"] = before["torch"]
    return drawn


def order_of(
    index_sampler: Any, iterator: Any, ahead: int | None, begun: State | None = None
) -> Order:
    """Choose how the keys of a sampler are kept track of.

    Parameters
    ----------
    iterator : iterator
        ``iter(index_sampler)``.
    ahead : int, optional
        The most keys that are drawn ahead of the batches delivered. None: no state is asked for.
    begun : dict, optional
        What `states_before` returned before that call.
    """
    if ahead is None:
        return Order(index_sampler, iterator)
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
    # The BatchSampler asks it for an iterator with the first key: it has drawn nothing before.
    if inner is not index_sampler and generator_of(index_sampler) is not None:
        return RandomOrder(index_sampler, iterator, inner)
    if type(inner) is SequentialSampler:
        return Order(index_sampler, iterator)
    return ReplayedOrder(index_sampler, iterator, begun)


class Order:
    """An epoch's keys, of a sampler that draws from nothing, or of which no state is asked for.

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
        return behind(self._index_sampler) if finished else {}


class ReplayedOrder(Order):
    """An epoch's keys, of a sampler of which nothing is known; it may draw from global generators.

    Most that do draw all at once, in `iter` or with the first key: the states from before that are
    kept. A resume draws the keys again from there, and sets the generators back to what they were,
    since they are the trainer's. What is drawn with later keys cannot be drawn again: the trainer
    may have drawn in between.
    """

    def __init__(self, index_sampler: Any, iterator: Any, begun: State | None) -> None:
        super().__init__(index_sampler, iterator)
        self._begun = begun
        self._state: State | None = None
        self._late: State = {}  # what was drawn from with a later key
        self._is_told = False

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        self._state = state.get("generators")
        if self._state is not None:
            return chain.from_iterable(self._parts_again(yielded, self._state))
        keys = chain.from_iterable(self._parts())
        return islice(keys, yielded, None) if yielded else keys

    def _parts(self) -> Iterator[Iterable[Any]]:
        """Yield the first key, the second, and the iterator with all others.

        What the iterator raises is raised by a part: so it can be asked for more, as it could here.
        """
        for _ in range(2):
            key: list[Any] = []
            try:
                before = global_states()
                key.extend(islice(self._iterator, 1))
                self._note(before, global_states())
            except Exception as error:  # noqa: BLE001 - of any type
                yield map(_raise, (error,))
            else:
                if not key:
                    return
            yield key
        yield self._iterator

    def _note(self, before: State, after: State) -> None:
        """Note what a key was drawn from."""
        drawn = _drawn_from(before, after)
        if self._state is not None:
            self._late.update(drawn)
            return
        in_iter = {} if self._begun is None else _drawn_from(self._begun, before)
        self._state = {"iter": in_iter, "first": drawn}

    def _parts_again(self, yielded: int, state: State) -> Iterator[Iterable[Any]]:
        """Yield the key behind so many that begin from these states, and the iterator."""
        own = global_states()
        try:
            _set_global(state["iter"])
            self._iterator = iter(self._index_sampler)
            _set_global(state["first"])
            key = list(islice(self._iterator, 1))
            before = global_states()
            if yielded:
                key = list(islice(self._iterator, yielded - 1, yielded))
            self._note(before, global_states())
        finally:
            _set_global(own)
        self._tell()
        yield key
        yield self._iterator

    def _tell(self) -> None:
        """Say that a resume is not exact, if it is not."""
        if self._late and not self._is_told:
            self._is_told = True
            log.warning(
                "%s draws from a global generator (%s) with later keys than its first: a resume "
                "in the middle of an epoch cannot draw the same again, so samples may come twice "
                "or not at all; have it draw all at once, or from a generator of its own, or give "
                "it state_dict and load_state_dict",
                type(inner_of(self._index_sampler)).__name__,
                ", ".join(self._late),
            )

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the states; as they would be if the first key came now."""
        if finished:
            return super().state(yielded, finished=True)
        self._tell()
        state = self._state
        if state is None:
            now = global_states()
            begun = {} if self._begun is None else _drawn_from(self._begun, now)
            state = {"iter": begun, "first": now}
        return {"generators": dict(state)} if state["iter"] or state["first"] else {}


def _raise(error: Exception) -> None:
    raise error


class RandomOrder(Order):
    """An epoch's keys, of one of torch's own samplers that draw from a generator.

    Without one of its own it draws from torch's global one with its first key: a RandomSampler a
    seed, which is drawn here for it, at the same moment; the others all that they need.
    """

    def __init__(self, index_sampler: Any, iterator: Any, sampler: Any) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = sampler
        self._draws_seed = type(sampler) is RandomSampler and sampler.generator is None
        self._given: State = {}
        self._state: State = {}

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        self._given = {name: state[name] for name in ("seed", "generator") if name in state}
        keys = self._draw(yielded, self._given)
        return islice(keys, yielded, None) if yielded else keys

    def _draw(self, yielded: int, state: State) -> Iterator[Any]:
        """Yield the keys; with the first, the seed or the generator's state is noted."""
        own, given = self._sampler.generator, state.get("generator")
        if own is None and given is not None:
            self._state = {"generator": given}
            yield from self._with(torch.Generator().set_state(given))
        elif self._draws_seed or (yielded and "seed" in state):
            seed = state.get("seed")
            if own is None and (seed is None or not yielded):  # drawn as ever, also if it is known
                drawn = _draw_seed(torch.default_generator)
                seed = drawn if seed is None else seed
            assert seed is not None
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
        sampler = _with_generator(self._sampler, generator)
        if self._sampler is self._index_sampler:
            return iter(sampler)
        batches = copy.copy(self._index_sampler)
        batches.sampler = sampler
        return iter(batches)

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the seed, or the generator's state; as they would be if the first key came now."""
        if finished:
            return super().state(yielded, finished=True)
        if self._state or self._given:
            return dict(self._state or self._given)
        now = (self._sampler.generator or torch.default_generator).get_state()
        if not self._draws_seed:
            return {"generator": now}
        return {"seed": _draw_seed(torch.Generator().set_state(now))}


class EpochOrder(Order):
    """An epoch's keys, of a sampler that is told the epoch's number.

    The number of the state goes before what the sampler was told: Lightning tells a loader that
    goes on the epoch when its first keys are drawn.
    """

    def __init__(self, index_sampler: Any, iterator: Any, sampler: Any) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = sampler
        self._given: int | None = None
        self._epoch: int | None = None

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        self._given = state.get("epoch")
        keys = self._draw(self._given)
        return islice(keys, yielded, None) if yielded else keys

    def _draw(self, epoch: int | None) -> Iterator[Any]:
        """Yield the keys; with the first, the epoch's number is noted."""
        if epoch is not None:
            self._sampler.set_epoch(epoch)
            self._iterator = iter(self._index_sampler)
        self._epoch = self._sampler.epoch
        yield from self._iterator

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the number; as it would be if the first key came now."""
        epoch = self._given if self._epoch is None else self._epoch
        number = {"epoch": self._sampler.epoch if epoch is None else epoch}
        return {**super().state(yielded, finished=finished), **number}


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
        self._batch_size = index_sampler.batch_size if type(index_sampler) is BatchSampler else 0
        self._is_last = False  # the key that was drawn last is a short batch

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        skip = yielded
        if state.get("sampler") is not None and self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])
            self._iterator = iter(self._index_sampler)
            skip = state.get("skip", 0)
        if state.get("iterator") is not None and is_stateful(self._iterator):
            self._iterator.load_state_dict(state["iterator"])
            skip = state.get("skip", 0)
        self._is_last = state.get("is_last", False)
        taken = self._take()
        if skip:  # it has to be drawn again behind a state that is taken now
            taken["skip"] = skip
        for name in taken.keys() & state.keys() & {"sampler", "iterator"}:
            if state[name] is not None:  # some say what they were given with their next key only
                taken[name] = copy.deepcopy(state[name])
        self._taken.append((yielded, taken))
        return self._draw(islice(self._iterator, skip, None), yielded)

    def _draw(self, keys: Iterator[Any], drawn: int) -> Iterator[Any]:
        for key in () if self._is_last else keys:
            drawn += 1
            self._is_last = self._is_short(len(key)) if self._batch_size else False
            self._taken.append((drawn, self._take()))
            yield key
        self._last = self._take()
        self._last.pop("is_last", None)

    def _is_short(self, samples: int | None) -> bool:
        """Whether the last key of so many samples is a short batch.

        The sampler came to its end for that: its state is that of its next epoch.
        """
        return bool(samples and self._batch_size and samples % self._batch_size)

    def _take(self) -> State:
        """Take the present state."""
        state: State = {}
        if self._is_last:
            state["is_last"] = True
        if self._sampler is not None:
            state["sampler"] = copy.deepcopy(self._sampler.state_dict())
        if is_stateful(self._iterator):
            state["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return state

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the state behind the key of the last batch delivered; drop earlier ones."""
        if finished and self._last is not None:
            if self._sampler is None:
                return super().state(yielded, finished=True)
            return copy.deepcopy(self._last)
        taken = self._taken
        while len(taken) > 1 and taken[0][0] < yielded:
            taken.popleft()
        return copy.deepcopy(taken[0][1])
