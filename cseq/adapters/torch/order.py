"""The order of an epoch: the keys of the index sampler, drawn one by one.

An index sampler is what a loader takes its keys from: its batch sampler, or its sampler if it does
not batch. For a resume its keys are drawn again and dropped. One with ``state_dict``, or whose
iterator has it, is set to its state at the epoch's begin. Of any other, what it draws from with
``iter`` or its first key is noted (`sources_of`) and set to what it was. Of torch's RandomSampler
without a generator, that is the seed that it draws.

After the end of an epoch the state is what the next one begins with: the sampler's, or that of its
generator. What is drawn from a global generator is the trainer's.
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
    from collections.abc import Callable, Iterable, Iterator

    Source = tuple[Callable[[], Any], Callable[[Any], Any]]  # returns its state, and sets it

__all__ = [
    "OWN",
    "Order",
    "generator_of",
    "inner_of",
    "leaves_no_trace",
    "look",
    "order_of",
    "put",
    "state_between",
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


def state_between(index_sampler: Any) -> State:
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


# -- what a sampler draws from


def _numpy_state() -> Any:
    """Return the state of numpy's global generator, with lists for its arrays."""
    return _as_lists(numpy.random.get_state())  # noqa: NPY002 - the global one is meant


def _as_lists(value: Any) -> Any:
    """Return a state of numpy's with lists for its arrays, which `set_state` takes as well."""
    if isinstance(value, dict):
        return {name: _as_lists(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_as_lists, value))
    return value.tolist() if isinstance(value, numpy.ndarray) else value


def _set_python(state: Any) -> None:
    """Set the state of Python's global generator, which may have been saved with lists."""
    version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


GLOBAL: dict[str, Source] = {
    "random": (random.getstate, _set_python),
    "numpy": (_numpy_state, numpy.random.set_state),
    "torch": (torch.default_generator.get_state, torch.default_generator.set_state),
}


def look(sources: dict[str, Source] = GLOBAL) -> State:
    """Return the states of what is drawn from: numbers, texts, and tensors."""
    return {name: source[0]() for name, source in sources.items()}


def put(states: State, sources: dict[str, Source] = GLOBAL) -> None:
    """Set those of these of which there is a state."""
    for name in sources.keys() & states.keys():
        sources[name][1](states[name])


def sources_of(index_sampler: Any) -> dict[str, Source]:
    """Return what determines the keys of a sampler, and is not its own.

    ==============================  ===========================================================
    a generator that it has         torch's samplers that draw (`DRAWING`) draw from that alone
    its ``epoch``                   if it has ``set_epoch``; torch's DistributedSampler: alone
    torch's global generator        torch's samplers that draw, without one of their own
    all global generators           any other
    ==============================  ===========================================================
    """
    inner, generator = inner_of(index_sampler), generator_of(index_sampler)
    sources: dict[str, Source] = {}
    if generator is not None:
        sources["generator"] = generator.get_state, generator.set_state
    elif type(inner) in DRAWING:
        sources["torch"] = GLOBAL["torch"]
    set_epoch = getattr(inner, "set_epoch", None)
    if isinstance(getattr(inner, "epoch", None), int) and callable(set_epoch):
        sources["epoch"] = (lambda: inner.epoch), set_epoch
    return sources if type(inner) in OWN else {**GLOBAL, **sources}


def states_before(index_sampler: Any) -> State | None:
    """Return the states of `sources_of`, if `iter` of the sampler may draw: torch's does not."""
    is_torchs = type(index_sampler) in (BatchSampler, SequentialSampler, *OWN)
    return None if is_torchs else look(sources_of(index_sampler))


def _drawn_from(before: State, after: State) -> State:
    """Return the states before, of what was drawn from since."""
    return {
        name: state
        for name, state in before.items()
        if not (
            torch.equal(state, after[name])
            if isinstance(state, torch.Tensor)
            else state == after[name]
        )
    }


# -- orders


def order_of(
    index_sampler: Any,
    iterator: Any,
    begun: State | None = None,
    *,
    keeps_state: bool,
    seeded: bool = False,
) -> Order:
    """Choose how the keys of a sampler are kept track of.

    Parameters
    ----------
    iterator : iterator
        ``iter(index_sampler)``.
    begun : dict, optional
        What `states_before` returned before that call.
    keeps_state : bool
        Whether states may be asked for.
    seeded : bool
        A seed is given for the epoch; it goes before a generator.
    """
    inner = inner_of(index_sampler)
    if not keeps_state or type(inner) is SequentialSampler:
        return Order(index_sampler, iterator)
    if is_stateful(iterator) or is_stateful(index_sampler) or is_stateful(inner):
        sampler = index_sampler if is_stateful(index_sampler) else inner
        stateful = sampler if is_stateful(sampler) else None
        return StatefulOrder(index_sampler, iterator, stateful)
    if type(inner) is RandomSampler and (seeded or inner.generator is None):
        return SeededOrder(index_sampler, iterator)
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

    def keys(self, yielded: int, state: State) -> Iterator[Any]:
        """Return the keys from the `yielded`-th on; `state` is that of the run that is resumed."""
        keys: Iterator[Any] = self._begin(yielded, state)
        return keys

    def _begin(self, yielded: int, state: State) -> Any:  # noqa: ARG002
        return islice(self._iterator, yielded, None) if yielded else self._iterator

    def state(self, yielded: int, *, finished: bool = False) -> State:  # noqa: ARG002
        """Return what has to be kept, when so many batches of this epoch have been delivered.

        `finished`: and the loop was told that the epoch is over.
        """
        return state_between(self._index_sampler) if finished else {}


class ReplayedOrder(Order):
    """An epoch's keys, which are drawn again for a resume.

    Samplers draw all at once, in `iter` or with the first key: the states from before that are
    kept. A resume draws the keys again from there, and sets the global generators back to what they
    were, since they are the trainer's. What a sampler draws from these with later keys cannot be
    drawn again: the trainer may have drawn in between.

    The epoch's number of a state goes before what the sampler was told: Lightning tells a loader
    that goes on the epoch when its first keys are drawn.
    """

    def __init__(self, index_sampler: Any, iterator: Any, begun: State | None) -> None:
        super().__init__(index_sampler, iterator)
        self._begun = begun
        self._sources = sources_of(index_sampler)
        self._state: State = {}  # the states, before `iter` and before the first key
        self._is_noted = False
        self._late: State = {}  # what was drawn from with a later key
        self._is_told = False

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        first = {name: state[name] for name in ("epoch", "generator") if name in state}
        generators = state.get("generators", {"iter": {}, "first": {}})
        self._state = {**generators, "first": generators["first"] | first}
        if first or generators["first"] or generators["iter"]:
            self._is_noted = True
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
                before = look(self._sources)
                key.extend(islice(self._iterator, 1))
                self._note(before)
            except Exception as error:  # noqa: BLE001 - of any type
                yield map(_raise, (error,))
            else:
                if not key:
                    return
            yield key
        yield self._iterator

    def _note(self, before: State) -> None:
        """Note what a key was drawn from."""
        drawn = _drawn_from(before, look(self._sources))
        if self._is_noted:
            self._late.update((name, drawn[name]) for name in drawn.keys() & GLOBAL.keys())
            return
        self._is_noted = True
        own = {name: before[name] for name in before.keys() - GLOBAL.keys()}
        self._state = {"iter": _drawn_from(self._begun or {}, before), "first": drawn | own}

    def _parts_again(self, yielded: int, state: State) -> Iterator[Iterable[Any]]:
        """Yield the key after so many that begin from these states, and the iterator."""
        shared = {name: self._sources[name] for name in self._sources.keys() & GLOBAL.keys()}
        trainers = look(shared)
        try:
            put(state["first"] | state["iter"], self._sources)
            self._iterator = iter(self._index_sampler)
            put(state["first"], self._sources)
            key = list(islice(self._iterator, 1))
            before = look(self._sources)
            if yielded:
                key = list(islice(self._iterator, yielded - 1, yielded))
            self._note(before)
        finally:
            put(trainers, shared)
        self._tell()
        yield key
        yield self._iterator

    def _tell(self) -> None:
        """Say that a resume is not exact, if it is not."""
        if self._late and not self._is_told:
            self._is_told = True
            _tell_of_late(self._index_sampler, self._late)

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the states; as they would be if the first key came now."""
        if finished:
            return super().state(yielded, finished=True)
        self._tell()
        state = self._state
        if not self._is_noted:
            now = look(self._sources)
            state = {"iter": _drawn_from(self._begun or {}, now), "first": now}
        first = dict(state["first"])
        kept = {"epoch": first.pop("epoch")} if "epoch" in first else {}
        if first or state["iter"]:
            kept["generators"] = {"iter": state["iter"], "first": first}
        return kept


def _raise(error: Exception) -> None:
    raise error


def _tell_of_late(index_sampler: Any, drawn: State) -> None:
    log.warning(
        "%s draws from a global generator (%s) with later keys than its first: a resume in the "
        "middle of an epoch cannot draw the same again, so samples may come twice or not at all; "
        "have it draw all at once, or from a generator of its own",
        type(inner_of(index_sampler)).__name__,
        ", ".join(sorted(drawn)),
    )


class SeededOrder(Order):
    """An epoch's keys, of a RandomSampler that draws a seed with its first key.

    That is drawn here for it, at the same moment.
    """

    def __init__(self, index_sampler: Any, iterator: Any) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = inner_of(index_sampler)
        self._seed: int | None = None

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        self._seed = state.get("seed")
        keys = self._draw(yielded)
        return islice(keys, yielded, None) if yielded else keys

    def _draw(self, yielded: int) -> Iterator[Any]:
        """Yield the keys."""
        if self._seed is None or not yielded:  # drawn as ever, also if it is known
            drawn = _draw_seed(torch.default_generator)
            self._seed = drawn if self._seed is None else self._seed
        sampler = copy.copy(self._sampler)
        sampler.generator = torch.Generator().manual_seed(self._seed)
        if self._sampler is self._index_sampler:
            yield from sampler
            return
        batches = copy.copy(self._index_sampler)
        batches.sampler = sampler
        yield from batches

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the seed; as it would be if the first key came now."""
        if finished:
            return super().state(yielded, finished=True)
        if self._seed is not None:
            return {"seed": self._seed}
        now = torch.Generator().set_state(torch.default_generator.get_state())
        return {"seed": _draw_seed(now)}


def _draw_seed(generator: torch.Generator) -> int:
    """Draw a seed, as a RandomSampler does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class StatefulOrder(Order):
    """An epoch's keys, of a sampler or an iterator that has a state.

    It is asked for that before its first key, and once more after that key, with which many draw
    their order. A resume sets it to there, and drops keys.
    """

    def __init__(self, index_sampler: Any, iterator: Any, sampler: Any) -> None:
        super().__init__(index_sampler, iterator)
        self._sampler = sampler  # the one that has a state, if any
        self._base = 0  # the keys before `_state`
        self._state: State = {}
        self._first: State | None = None  # the state after the first key
        self._batch_size = index_sampler.batch_size if type(index_sampler) is BatchSampler else 0

    def _begin(self, yielded: int, state: State) -> Iterator[Any]:
        given: State = {name: state[name] for name in ("sampler", "iterator") if name in state}
        if self._sampler is None:
            given.pop("sampler", None)
        if "sampler" in given:
            self._sampler.load_state_dict(copy.deepcopy(given["sampler"]))
            self._iterator = iter(self._index_sampler)
        if not is_stateful(self._iterator):
            given.pop("iterator", None)
        if "iterator" in given:
            self._iterator.load_state_dict(copy.deepcopy(given["iterator"]))
        skip = state.get("skip", 0) if given else yielded
        # What was given goes first: some tell of it only after their next key.
        self._base, self._state = yielded - skip, {**self._take(), **copy.deepcopy(given)}
        return self._draw(skip)

    def _draw(self, skip: int) -> Iterator[Any]:
        keys = self._iterator if self._base else chain(self._begun(), self._iterator)
        if skip:  # what these draw from global generators is not drawn from the trainer's
            before = look()
            try:
                deque(islice(keys, skip), maxlen=0)
            finally:
                drawn = _drawn_from(before, look())
                put(drawn)
            if drawn:
                _tell_of_late(self._index_sampler, drawn)
        yield from keys

    def _begun(self) -> Iterator[Any]:
        """Yield the first key of the epoch, and take the state after it."""
        for key in islice(self._iterator, 1):
            # A short batch is one at which the sampler has come to its end: its state is another.
            if not self._batch_size or len(key) == self._batch_size:
                self._first = self._take()
            yield key

    def _take(self) -> State:
        """Take the present state."""
        state: State = {}
        if self._sampler is not None:
            state["sampler"] = copy.deepcopy(self._sampler.state_dict())
        if is_stateful(self._iterator):
            state["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return state

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return a state, and how many keys come between it and the last batch delivered."""
        if finished:
            if self._sampler is None:
                return super().state(yielded, finished=True)
            return {"sampler": copy.deepcopy(self._sampler.state_dict())}
        base, state = self._base, self._state
        if yielded > base and self._first is not None:
            base, state = base + 1, self._first
        after = getattr(self._index_sampler, "state_after", None)
        if after is not None:  # of cseq's BatchSampler, which need not draw what comes before
            return {"sampler": after(state["sampler"], yielded - base)}
        state = copy.deepcopy(state)
        return {**state, "skip": yielded - base} if yielded > base else state
