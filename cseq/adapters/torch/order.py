"""The order of an epoch: the keys of the index sampler, drawn one by one.

An index sampler is what a loader takes its keys from: its batch sampler, or its sampler if it does
not batch. For a resume its keys are drawn again and dropped (`Keys`); keys of
`shuffle=True`, and of torch's samplers for parts and ranks, are slices of one permutation, which
begins anywhere (`permuted`).

After the end of an epoch the state is what the next one begins with: the sampler's, or that of its
generator. What is drawn from a global generator is the trainer's.

Ranks share the epoch of a sampler that is known (`shares_of`): after k batches on each rank, all
of them together have had the first k * step samples of it. So the state of any rank serves all,
and another number of ranks, or another batch size, shares what is left (`tail`).
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from base64 import b64decode, b64encode
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cseq.adapters.torch.stateful import is_stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeGuard

    from typing_extensions import TypeIs

    class Skipping(Protocol):
        """What accelerate's SkipBatchSampler has."""

        skip_batches: int
        batch_sampler: Iterable[object]

    class Shard(Protocol):
        """What accelerate's BatchSamplerShard has."""

        batch_sampler: Iterable[object]
        split_batches: bool
        num_processes: int
        process_index: int

        def __iter__(self) -> Iterator[object]: ...

    class Seedable(Protocol):
        """What accelerate's SeedableRandomSampler has."""

        initial_seed: int
        epoch: int

    Source = tuple[Callable[[], object], Callable[[Any], object]]  # returns its state, and sets it

__all__ = [
    "Keys",
    "inner_of",
    "leaves_no_trace",
    "look",
    "put",
    "seed_from",
    "seed_of",
    "shares_of",
    "sources_in",
    "text_of",
]

log = logging.getLogger("cseq")

State = dict[str, Any]

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
OWN = (*DRAWING, DistributedSampler)


def _is_accelerates(sampler: object, name: str) -> bool:
    known: object = getattr(sys.modules.get("accelerate.data_loader"), name, None)
    return type(sampler) is known


def _is_skipping(sampler: object) -> TypeIs[Skipping]:
    return _is_accelerates(sampler, "SkipBatchSampler")


def _is_shard(sampler: object) -> TypeIs[Shard]:
    return _is_accelerates(sampler, "BatchSamplerShard")


def _is_seedable(sampler: object) -> TypeIs[Seedable]:
    return _is_accelerates(sampler, "SeedableRandomSampler")


def shard_in(index_sampler: object) -> Shard | None:
    """Return accelerate's part of a batch sampler for one rank, if it is one; otherwise None."""
    return index_sampler if _is_shard(index_sampler) else None


def unskipped(index_sampler: Iterable[object]) -> tuple[Iterable[object], int]:
    """Return a sampler without accelerate's SkipBatchSampler, and how many keys that omits."""
    omitted = 0
    while _is_skipping(index_sampler):
        omitted += index_sampler.skip_batches
        index_sampler = index_sampler.batch_sampler
    return index_sampler, omitted


def inner_of(index_sampler: Iterable[object]) -> Iterable[object]:
    """Return the sampler that torch's own BatchSampler has; of any other, itself."""
    index_sampler, _ = unskipped(index_sampler)
    batches = index_sampler.batch_sampler if _is_shard(index_sampler) else index_sampler
    return batches.sampler if type(batches) is BatchSampler else index_sampler


class Shares(NamedTuple):
    """How ranks share the samples of an epoch.

    Attributes
    ----------
    step : int
        Samples that all ranks together have had after one batch of each.
    world_size, rank : int
    """

    step: int
    world_size: int
    rank: int


def shares_of(index_sampler: Iterable[object]) -> Shares | None:
    """Return how ranks share an epoch; None: that is not known."""
    index_sampler, _ = unskipped(index_sampler)
    shard = shard_in(index_sampler)
    batches = index_sampler if shard is None else shard.batch_sampler
    inner = inner_of(index_sampler)
    if type(inner) not in (*OWN, SequentialSampler) and seed_of(inner) is None:
        return None
    size = batches.batch_size if type(batches) is BatchSampler else 1
    if shard is not None:
        step = size if shard.split_batches else size * shard.num_processes
        return Shares(step, shard.num_processes, shard.process_index)
    if type(inner) is DistributedSampler:
        return Shares(size * inner.num_replicas, inner.num_replicas, inner.rank)
    return Shares(size, 1, 0)


def _with_keys(index_sampler: Iterable[object], keys: list[Any]) -> Iterable[object]:
    """Return an index sampler that has these keys in place of those of its inner sampler."""
    if type(index_sampler) is BatchSampler:
        return BatchSampler(keys, index_sampler.batch_size, index_sampler.drop_last)
    if not _is_shard(index_sampler):
        return keys
    shard = copy.copy(index_sampler)
    shard.batch_sampler = _with_keys(shard.batch_sampler, keys)
    return shard


def tail(index_sampler: Iterable[object], consumed: int) -> Iterator[object]:
    """Yield this rank's keys of what is left of an epoch, of which so many samples are over.

    Nothing is drawn before the first key. A DistributedSampler pads what is left as it pads an
    epoch: with the epoch's first samples.
    """
    inner = inner_of(index_sampler)
    if type(inner) is not DistributedSampler:
        yield from _with_keys(index_sampler, list(islice(iter(inner), consumed, None)))
        return
    order = _epoch_of(inner, _length(inner.dataset))
    ranks, left = inner.num_replicas, max(0, len(order) - consumed)
    count = left // ranks if inner.drop_last else -(-left // ranks)
    places = torch.arange(count) * ranks + inner.rank + consumed
    yield from _with_keys(index_sampler, order[places % len(order)].tolist())


def _length(dataset: Any) -> int:
    """Return the length of a data set: its class in torch has none."""
    return len(dataset)


def seed_of(inner: object) -> int | None:
    """Return the seed of a sampler that draws from this and its epoch alone, if it is known."""
    if _is_seedable(inner):
        return int(inner.initial_seed)
    return int(inner.seed) if type(inner) is DistributedSampler else None


def seed_from(*numbers: int) -> int:
    """Return a seed that depends on several numbers."""
    words = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(words.generate_state(1, np.uint64)[0] >> 1)


def generator_of(index_sampler: Iterable[object]) -> torch.Generator | None:
    """Return the generator that a sampler has of its own, if any."""
    inner = inner_of(index_sampler)
    generator = getattr(inner, "generator", None) if seed_of(inner) is None else None
    return generator if isinstance(generator, torch.Generator) else None


def leaves_no_trace(index_sampler: Iterable[object]) -> bool:
    """Whether keys can be drawn before workers are forked, and no worker can tell.

    torch forks first. Its own samplers change nothing but torch's generator, which every worker
    seeds anew, and a generator that they were given: the data set may have that one. They ask the
    data set for its length, which a SequentialSampler has not done before.
    """
    return type(inner_of(index_sampler)) in OWN and generator_of(index_sampler) is None


# -- what a sampler draws from


def _as_lists(value: object) -> object:
    """Return a state of numpy's with lists for its arrays, which `set_state` takes as well."""
    if isinstance(value, dict):
        return {name: _as_lists(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_as_lists, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def text_of(states: torch.Tensor) -> str:
    """Return the state of a generator of torch's as a text: its words, without those that are 0.

    Half of a CPU's are.
    """
    words = states.numpy().view(np.uint32)
    used = words != 0
    parts = (np.uint32(len(words)), np.packbits(used), words[used])
    return b64encode(b"".join(part.tobytes() for part in parts)).decode()


def states_of(text: str) -> torch.Tensor:
    """Return the state of a generator of torch's that `text_of` has written."""
    kept = b64decode(text)
    count = int.from_bytes(kept[:4], sys.byteorder)
    start = 4 + -(-count // 8)
    if start > len(kept):
        raise ValueError(f"the state of a generator has {len(kept)} bytes and {count} words")
    used = np.unpackbits(np.frombuffer(kept[4:start], np.uint8), count=count).astype(bool)
    words = np.zeros(count, np.uint32)
    words[used] = np.frombuffer(kept[start:], np.uint32)
    return torch.from_numpy(words.view(np.uint8))


def _source_of(generator: torch.Generator) -> Source:
    """Return a generator of torch's as a source; its state is a text."""
    return (
        lambda: text_of(generator.get_state()),
        lambda text: generator.set_state(states_of(text)),
    )


def sources_in(python: Any, of_numpy: Any, of_torch: torch.Generator) -> dict[str, Source]:
    """Return generators by name; their states are such that JSON can hold them."""
    return {
        "random": (
            python.getstate,
            lambda state: python.setstate((state[0], tuple(state[1]), state[2])),
        ),
        "numpy": (lambda: _as_lists(of_numpy.get_state()), of_numpy.set_state),
        "torch": _source_of(of_torch),
    }


GLOBAL = sources_in(random, np.random, torch.default_generator)


def look(sources: dict[str, Source] = GLOBAL) -> State:
    """Return the states of what is drawn from: numbers and texts."""
    return {name: source[0]() for name, source in sources.items()}


def put(states: State, sources: dict[str, Source] = GLOBAL) -> None:
    """Set each source that has a state."""
    for name in sources.keys() & states.keys():
        sources[name][1](states[name])


def int_in(thing: object, name: str) -> int:
    """Return an attribute that is an integer."""
    return int(getattr(thing, name))


def sources_of(index_sampler: Iterable[object]) -> dict[str, Source]:
    """Return what determines the keys of a sampler, and is not its own.

    ==============================  ===========================================================
    a generator that it has         torch's samplers that draw (`DRAWING`) draw from that alone
    its ``epoch``                   if it has ``set_epoch``; alone where `seed_of` knows the seed
    torch's global generator        torch's samplers that draw, without one of their own
    all global generators           any other
    ==============================  ===========================================================
    """
    inner, generator = inner_of(index_sampler), generator_of(index_sampler)
    sources: dict[str, Source] = {}
    if generator is not None:
        sources["generator"] = _source_of(generator)
    elif type(inner) in DRAWING:
        sources["torch"] = GLOBAL["torch"]
    set_epoch = getattr(inner, "set_epoch", None)
    if isinstance(getattr(inner, "epoch", None), int) and callable(set_epoch):
        sources["epoch"] = (
            (lambda: int(getattr(inner, "epoch", 0))),
            lambda epoch: set_epoch(Ahead(epoch)),
        )
    is_known = type(inner) in OWN or seed_of(inner) is not None
    return sources if is_known else {**GLOBAL, **sources}


# -- orders


TOGETHER = 2048  # keys, or about as many, that become a list together


# torch's samplers whose keys are slices of a permutation, and what each of them calls its samples.
PERMUTED = {
    RandomSampler: "data_source",
    SubsetRandomSampler: "indices",
    DistributedSampler: "dataset",
}


def is_permuted(index_sampler: Iterable[object]) -> TypeGuard[BatchSampler]:
    """Whether it is torch's own, whose keys are slices of a permutation."""
    inner = inner_of(index_sampler)
    is_torchs = type(index_sampler) is BatchSampler and type(inner) in PERMUTED
    return is_torchs and not getattr(inner, "replacement", False)


def permuted(index_sampler: BatchSampler, skip: int = 0) -> Iterator[list[Any]]:
    """Yield the keys of such a sampler that follow the first `skip` ones, and draw as it does.

    torch makes a list of a whole epoch, and every key goes through two iterators. Here the epoch
    stays a tensor.
    """
    sampler, size = index_sampler.sampler, index_sampler.batch_size
    samples: Sequence[object] = getattr(sampler, PERMUTED[type(sampler)])
    order = order_of(sampler, len(samples))
    if order is None:
        yield from islice(index_sampler, skip, None)
        return
    count, is_subset = _length(sampler), type(sampler) is SubsetRandomSampler
    end = count - count % size

    def batch_of(keys: list[int]) -> list[Any]:
        return [samples[key] for key in keys] if is_subset else keys

    for start in range(skip * size, end, together := max(1, TOGETHER // size) * size):
        keys = order[start : min(start + together, end)].tolist()
        for first in range(0, len(keys), size):
            yield batch_of(keys[first : first + size])
    if type(sampler) is RandomSampler and count == len(order) and sampler.generator is not None:
        torch.randperm(count, generator=sampler.generator, dtype=order.dtype)  # as torch's does
    if end < count and skip * size <= end and not index_sampler.drop_last:
        yield batch_of(order[end:count].tolist())


def order_of(sampler: Any, n: int) -> torch.Tensor | None:
    """Draw an epoch of `n` samples as such a sampler does; None: it is more than a permutation."""
    kind = torch.int32 if n < 2**31 else torch.int64  # torch draws the same with both
    if type(sampler) is not DistributedSampler:
        generator = sampler.generator
        if type(sampler) is RandomSampler and sampler.num_samples > n:
            return None
        if type(sampler) is RandomSampler and generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
        return torch.randperm(n, generator=generator, dtype=kind)
    rank, end, step = sampler.rank, sampler.total_size, sampler.num_replicas
    if end != n and sampler.drop_last != (end < n):
        return None  # the length of the data set has changed: torch raises
    order = _epoch_of(sampler, n)
    own = order[rank:end:step]
    padding = (torch.arange(len(own), len(sampler)) * step + rank) % n  # it repeats the order
    return torch.cat((own, order[padding]))


def _epoch_of(sampler: DistributedSampler[Any], n: int) -> torch.Tensor:
    kind = torch.int32 if n < 2**31 else torch.int64
    if not sampler.shuffle:
        return torch.arange(n, dtype=kind)
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    return torch.randperm(n, generator=generator, dtype=kind)


class Ahead(int):
    """A number of an epoch that is not the framework's, but `Epochs`'."""


class Epochs:
    """The epoch that a sampler is told, in a run that goes on from a state.

    A framework may count epochs from 0 again behind a resume, as accelerate does where the loop
    does not call its `set_epoch`. Then its numbers are `ahead` too low, and the sampler is told the
    right ones. Numbers that go on from the state's are left as they are. Which of them it is shows
    with the first epoch behind the resumed one.

    Parameters
    ----------
    loader, sampler : object
        The sampler has `epoch` and `set_epoch`, and was told the epoch that begins.
    resume : dict, optional
        The state of the run that is resumed.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any, resume: State | None) -> None:
        kept: dict[str, Any] = loader.__dict__
        self._sampler, told = sampler, sampler.epoch
        resumed, ahead = kept.get("_epochs", (None, 0))
        if resume is not None:
            there = resume["sampler"].get("epoch")  # behind an epoch that is over
            if there is None:  # in the middle of one, whose number `Keys` puts back
                first = resume["sampler"].get("generators", {}).get("first", {})
                there, resumed = first.get("epoch", told), told
            ahead = there - told
        elif resumed is not None and type(told) is not Ahead:
            ahead = ahead if told in (resumed, resumed + 1) and told != resumed + ahead + 1 else 0
            resumed = None
        kept["_epochs"] = resumed, ahead
        self.begun = told
        if ahead and type(told) is not Ahead:
            self.begun = Ahead(told + ahead)
            sampler.set_epoch(self.begun)

    def ended(self) -> State:
        """Return the number of the next epoch, if the sampler has counted on by itself."""
        now = self._sampler.epoch
        return {"epoch": int(now)} if now == self.begun + 1 else {}


class Keys:
    """An epoch's keys, which a resume draws again from the states that are noted here.

    Samplers draw all at once, in `iter` or with the first key. So the states of generators before
    both are noted, and the sampler's, if it has one, before and after that key. A resume sets them,
    draws what was drawn, drops the keys of batches that were delivered, and sets the global
    generators back to what they were, since they are the trainer's. What a sampler draws from these
    with later keys cannot be drawn again: the trainer may have drawn in between.

    The epoch's number of a state goes before what the sampler was told: Lightning tells a loader
    that goes on the epoch when its first keys are drawn.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        The `iter` of its index sampler comes next, and its seed.
    keeps_state : bool
        Whether states may be asked for.
    resume : dict, optional
        The state of the run that is resumed: its generators are put back.

    Attributes
    ----------
    start : tuple of int
        Samples that were over, and batches, where the epoch was cut anew.
    omitted : int
        Batches that accelerate's SkipBatchSampler leaves out.
    """

    def __init__(
        self, loader: DataLoader[Any], *, keeps_state: bool, resume: State | None = None
    ) -> None:
        index_sampler, self.omitted = unskipped(loader._index_sampler)
        inner = inner_of(index_sampler)
        self._generator: torch.Generator | None = loader.generator
        self._index_sampler = index_sampler
        self._keeps_state = keeps_state and type(inner) is not SequentialSampler
        divided: object = index_sampler.batch_sampler if _is_shard(index_sampler) else None
        known: tuple[object, ...] = index_sampler, inner, divided
        self._sampler = next(filter(is_stateful, known), None)
        # Its place is not that of a rank's keys, so an epoch is always drawn from its beginning.
        self._is_divided = divided is not None and self._sampler is divided
        # Of cseq's BatchSampler.
        self._after: Callable[[State, int], State] | None
        self._after = getattr(index_sampler, "state_after", None)
        has_sources = self._keeps_state and self._after is None
        self._sources = sources_of(index_sampler) if has_sources else {}
        self.start = 0, 0
        if resume is not None:
            self._put_back(resume)
            self.start = tuple(resume["start"])
        self._strict = resume is None or resume["strict"] or self._after is None
        self._epochs = Epochs(loader, inner, resume) if "epoch" in self._sources else None
        self._begun_with = self.loaders_generator(now=True)
        self.look_again()
        self._state: State | None = None  # before the first key
        self._base = 0  # keys before that
        self._own: State = {}  # of a sampler that has a state, after the first key
        self._size = index_sampler.batch_size if type(index_sampler) is BatchSampler else 0

    def look_again(self, resume: State | None = None) -> None:
        """Note the states before another `iter` of the sampler.

        `resume`: of an epoch that draws no seed, unless it is the first one.
        """
        if resume is not None and resume["_iterator_finished"]:
            self._put_back(resume)
        is_torchs = type(self._index_sampler) in (BatchSampler, *OWN)  # whose `iter` draws nothing
        self._before: State = {} if is_torchs else look(self._sources)

    def _put_back(self, resume: State) -> None:
        """Put the generators back to where the epoch that is resumed, or the next one, began."""
        if self._generator is not None and resume.get("generator") is not None:
            _source_of(self._generator)[1](resume["generator"])
        generator = resume["sampler"].get("generator")
        put({} if generator is None else {"generator": generator}, self._sources)

    def seed(self) -> int | None:
        """Return a seed for the draws of an epoch of accelerate's sampler, which has one itself.

        A run that skips batches cannot draw it again, as accelerate keeps no state of generators.
        """
        inner = inner_of(self._index_sampler)
        if not _is_seedable(inner):
            return None
        return seed_from(inner.initial_seed, inner.epoch)

    def loaders_generator(self, *, now: bool) -> str | None:
        """Return the state of the loader's own generator: now, or before the epoch's seed."""
        if now:
            return None if self._generator is None else text_of(self._generator.get_state())
        return self._begun_with

    def draw(self, iterator: Iterator[object], yielded: int, state: State) -> Iterator[object]:
        """Return the keys that follow the first `yielded` ones.

        `iterator` is ``iter(index_sampler)``, `state` that of the run that is resumed.
        """
        if self.start[0] and not self._keeps_state:  # it needs no state of its own
            iterator, yielded = tail(self._index_sampler, self.start[0]), yielded - self.start[1]
        elif is_permuted(self._index_sampler):
            iterator = permuted(self._index_sampler)
        elif self.omitted:
            iterator = iter(self._index_sampler)
        if "generators" in state and self._keeps_state:
            kept = "generator" in state["generators"]["first"]
            if kept != ("generator" in self._sources):
                its, ours = ("with", "has none") if kept else ("without", "has one")
                raise ValueError(
                    f"the state is of a sampler {its} a generator, and this loader's {ours}, so "
                    f"its order is another; make it {its} one, or do not load this state"
                )
            self._state, self._base = state, state.get("base", 0) or self.start[1]
            return chain.from_iterable(self._again(yielded - self._base, state))
        if "sampler" in state and self._sampler is not None:
            options = {} if self._strict else {"strict": False}
            own = state["sampler"]
            begun, base, there = state.get("begun", (own, 0, 0))
            if self._after is not None and yielded < there:  # accelerate has taken some back
                self._sampler.load_state_dict(begun, **options)
                own = self._after(begun, yielded - base)
            self._sampler.load_state_dict(copy.deepcopy(own), **options)
            iterator = iter(self._index_sampler)
            if self._after is not None:  # it goes on at the place
                self._base, yielded = yielded, 0
        if self._keeps_state:  # what the first key raises does not end the iterator
            iterator = chain(map(self._first_of, (iterator,)), iterator)
        return islice(iterator, yielded, None) if yielded else iterator

    def _first_of(self, iterator: Iterator[Any]) -> object:
        self._state = self._noted()
        key = next(iterator)
        # Many draw their order with it. At a short batch a sampler has come to its end.
        if (not self._size or len(key) == self._size) and not self._is_divided:
            self._own = self._own_state()
        return key

    def _noted(self) -> State:
        generators = {"iter": self._before, "first": look(self._sources)}
        return {"generators": generators, **self._own_state()}

    def _own_state(self) -> State:
        sampler = self._sampler
        return {} if sampler is None else {"sampler": copy.deepcopy(sampler.state_dict())}

    def _again(self, skip: int, state: State) -> Iterator[Iterable[object]]:
        """Yield the key after so many that begin from a state, and the iterator."""
        trainers, generators, sampler = look(), state["generators"], self._index_sampler
        try:
            put(generators["first"] | generators["iter"], self._sources)
            if self._sampler is not None and "sampler" in state:
                self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))
            is_slices = is_permuted(sampler) and not self.start[0]
            if self.start[0]:
                iterator = tail(sampler, self.start[0])
            else:
                iterator = permuted(sampler, skip) if is_permuted(sampler) else iter(sampler)
            put(generators["first"], self._sources)
            key = list(islice(iterator, 1))
            if skip and not is_slices:
                before = look(self._sources)
                key = list(islice(iterator, skip - 1, skip))
                self._compare(before)
        finally:
            put(trainers)
            if not skip and not self.start[0] and type(inner_of(sampler)) is RandomSampler:
                torch.empty((), dtype=torch.int64).random_()  # as its first key does
        yield key
        yield iterator

    def _compare(self, before: State) -> None:
        """Say that a resume is not exact, if keys were drawn from global generators since."""
        after = look({name: GLOBAL[name] for name in before.keys() & GLOBAL.keys()})
        if late := sorted(name for name in after if after[name] != before[name]):
            log.warning(
                "%s draws from a global generator (%s) with later keys than its first: a resume in "
                "the middle of an epoch cannot draw the same again, so samples may come twice or "
                "not at all; have it draw all at once, or from a generator of its own",
                type(inner_of(self._index_sampler)).__name__,
                ", ".join(late),
            )

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return what has to be kept, when so many batches of this epoch have been delivered.

        `finished`: and the loop was told that the epoch is over.
        """
        if finished:
            if self._keeps_state and self._sampler is not None:
                return self._own_state()
            generator = generator_of(self._index_sampler)  # the next epoch draws from it
            state = {} if self._epochs is None else self._epochs.ended()
            if generator is not None:
                state["generator"] = text_of(generator.get_state())
            return state
        if not self._keeps_state:
            return {}
        state = self._noted() if self._state is None else self._state
        if self._after is not None:
            begun = state["sampler"], self._base, yielded
            return {"sampler": self._after(begun[0], yielded - self._base), "begun": begun}
        if self._own and yielded > self._base:
            state = {**state, **self._own, "base": 1}
        generators = {
            when: {k: v if type(v) is str else copy.deepcopy(v) for k, v in states.items()}
            for when, states in state["generators"].items()
        }
        if len(state) > 1:  # a sampler's state may refer to one thing twice
            state = copy.deepcopy({**state, "generators": {}})
        return {**state, "generators": generators}
