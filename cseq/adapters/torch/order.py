"""Reproduces the order of an epoch, which is a sequence of keys.

Keys come from the index sampler, which is the batch sampler, or the sampler if the loader does not
batch. To resume an epoch, its keys are drawn again, and the consumed keys are discarded (`Keys`).
With `shuffle=True`, and with torch's subset and distributed samplers, keys are slices of a
permutation. Iteration can then start at any position (`drawn_keys`).

When an epoch has ended, states contain the state of the sampler or its generator, which determines
the next epoch. The trainer is responsible for the global generators.

With a known sampler, ranks share an epoch (`Layers.shares`): after k batches on each rank, all
ranks together have consumed the first k * step samples. It is therefore sufficient to save the
state of one rank, and the remaining samples can be divided with a different number of ranks or
batch size.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from base64 import b64decode, b64encode
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from collections.abc import Callable, Iterable, Iterator, Sized

    # A getter and a setter for the state of a generator.
    Source = tuple[Callable[[], object], Callable[[Any], object]]

__all__ = ["Keys", "Layers", "read_sources", "seed_from", "set_sources", "sources_in", "text_of"]

log = logging.getLogger("cseq")

State = dict[str, Any]

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
OWN = (*DRAWING, DistributedSampler)


class Shares(NamedTuple):
    """How ranks share an epoch. One batch on each rank adds up to `step` samples."""

    step: int
    world_size: int
    rank: int


class Layers:
    """An index sampler and the samplers nested in it.

    Attributes
    ----------
    outer : iterable
        The index sampler. If it is accelerate's SkipBatchSampler, its inner batch sampler.
    omitted : int
        The number of keys that SkipBatchSampler skips.
    shard : BatchSamplerShard or None
        `outer` if it is accelerate's batch sampler for one rank.
    batches : iterable
        The batch sampler that `shard` divides, or `outer`.
    size, inner : int, iterable
        The batch size and the sampler of `batches` if it is torch's BatchSampler. Otherwise, 0 and
        `outer`.
    seed : int or None
        The seed, if the order depends only on the seed and the epoch.
    is_known : bool
        Whether `inner` uses no random numbers except from its seed, its generator or torch's global
        generator.
    """

    def __init__(self, index_sampler: Iterable[object]) -> None:
        self.omitted = 0
        while (skipping := _of_accelerate(index_sampler, "SkipBatchSampler")) is not None:
            self.omitted += int(skipping.skip_batches)
            index_sampler = skipping.batch_sampler
        self.outer = self.batches = self.inner = index_sampler
        self.shard = _of_accelerate(self.outer, "BatchSamplerShard")
        if self.shard is not None:
            self.batches = self.shard.batch_sampler
        self.size = 0
        if type(self.batches) is BatchSampler:
            self.size, self.inner = self.batches.batch_size, self.batches.sampler
        self.seed: int | None = None
        self.seedable = _of_accelerate(self.inner, "SeedableRandomSampler")
        if self.seedable is not None:
            self.seed = int(self.seedable.initial_seed)
        elif type(self.inner) is DistributedSampler:
            self.seed = int(self.inner.seed)
        self.is_known = self.seed is not None or type(self.inner) in DRAWING

    @property
    def generator(self) -> torch.Generator | None:
        """The generator passed to `inner`, or None."""
        generator = getattr(self.inner, "generator", None) if self.seed is None else None
        return generator if isinstance(generator, torch.Generator) else None

    @property
    def leaves_no_trace(self) -> bool:
        """Whether keys can be drawn before workers are forked without affecting the workers.

        torch forks first. The samplers of torch change only the global generator, which every
        worker reseeds, and a generator that was passed to them, which the data set may share. They
        also call ``len(dataset)``, but a SequentialSampler does so only after the fork.
        """
        return type(self.inner) in OWN and self.generator is None

    @property
    def is_sliced(self) -> bool:
        """Whether keys are slices of a permutation, made by torch's BatchSampler."""
        return self.batches is self.outer and self.size > 0 and type(self.inner) in PERMUTED

    @property
    def shares(self) -> Shares | None:
        """How ranks share an epoch, or None if this is unknown."""
        inner, shard = self.inner, self.shard
        if not (self.is_known or type(inner) is SequentialSampler):
            return None
        size = self.size or 1
        if shard is not None:
            step = size if shard.split_batches else size * shard.num_processes
            return Shares(step, shard.num_processes, shard.process_index)
        if type(inner) is DistributedSampler:
            return Shares(size * inner.num_replicas, inner.num_replicas, inner.rank)
        return Shares(size, 1, 0)


def _of_accelerate(sampler: object, name: str) -> Any:
    """Return `sampler` if its type is accelerate's class `name`, or None."""
    known: object = getattr(sys.modules.get("accelerate.data_loader"), name, None)
    return sampler if type(sampler) is known else None


def seed_from(*numbers: int) -> int:
    """Derive a seed from several numbers."""
    words = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(words.generate_state(1, np.uint64)[0] >> 1)


# -- sources of random numbers


def _as_lists(value: object) -> object:
    """Convert arrays in a numpy state to lists, which `set_state` accepts as well."""
    if isinstance(value, dict):
        return {name: _as_lists(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_as_lists, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def text_of(states: torch.Tensor) -> str:
    """Encode the state of a torch generator as text without zero words, which are half of all."""
    words = states.numpy().view(np.uint32)
    used = words != 0
    parts = (np.uint32(len(words)), np.packbits(used), words[used])
    return b64encode(b"".join(part.tobytes() for part in parts)).decode()


def states_of(text: str) -> torch.Tensor:
    """Decode a state that was encoded by `text_of`."""
    kept = b64decode(text)
    count = int.from_bytes(kept[:4], sys.byteorder)
    start = 4 + -(-count // 8)
    if start > len(kept):
        raise ValueError(f"a generator state of {count} words does not fit in {len(kept)} bytes")
    used = np.unpackbits(np.frombuffer(kept[4:start], np.uint8), count=count).astype(bool)
    words = np.zeros(count, np.uint32)
    words[used] = np.frombuffer(kept[start:], np.uint32)
    return torch.from_numpy(words.view(np.uint8))


def _source_of(generator: torch.Generator) -> Source:
    return (
        lambda: text_of(generator.get_state()),
        lambda text: generator.set_state(states_of(text)),
    )


def sources_in(python: Any, of_numpy: Any, of_torch: torch.Generator) -> dict[str, Source]:
    """Return functions that get and set the states of generators as JSON values, by name."""
    return {
        "random": (
            python.getstate,
            lambda state: python.setstate((state[0], tuple(state[1]), state[2])),
        ),
        "numpy": (lambda: _as_lists(of_numpy.get_state()), of_numpy.set_state),
        "torch": _source_of(of_torch),
    }


GLOBAL = sources_in(random, np.random, torch.default_generator)


def read_sources(sources: dict[str, Source] = GLOBAL) -> State:
    """Return the state of each source, as numbers and text."""
    return {name: source[0]() for name, source in sources.items()}


def set_sources(states: State, sources: dict[str, Source] = GLOBAL) -> None:
    """Restore each source that has a saved state."""
    for name in sources.keys() & states.keys():
        sources[name][1](states[name])


def sources_of(layers: Layers) -> dict[str, Source]:
    """Return the sources of randomness that determine the keys of a sampler.

    ==============================  ===========================================================
    the sampler's generator         if it has one (the only source for `DRAWING` samplers)
    the sampler's ``epoch``         if it has ``set_epoch`` (the only source with a known seed)
    torch's global generator        for torch's `DRAWING` samplers without a generator
    all global generators           for all other samplers
    ==============================  ===========================================================
    """
    inner, generator = layers.inner, layers.generator
    sources = {} if layers.is_known else dict(GLOBAL)
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
    return sources


# -- orders


# The approximate number of samples to convert to a list at a time.
TOGETHER = 2048

# torch's samplers that yield a permutation or the start of one, and the attribute to permute.
PERMUTED = {
    RandomSampler: "data_source",
    SubsetRandomSampler: "indices",
    DistributedSampler: "dataset",
}


def drawn_keys(layers: Layers, skip: int = 0, start: int = 0) -> Iterator[object]:
    """Yield all keys after the first `skip`, and draw the same random numbers as the sampler.

    Key 0 comes after the first `start` samples, counted over all ranks. As in a whole epoch, the
    remaining samples for a DistributedSampler are padded with the first samples of the epoch.

    torch converts all samples of an epoch to a list and passes each key through two iterators. For
    torch's samplers, this function keeps them in a tensor instead.
    """
    outer, inner, size = layers.outer, layers.inner, layers.size
    order = order_of(inner, start) if start or layers.is_sliced else None
    samples = inner.indices if type(inner) is SubsetRandomSampler else None

    def listed(part: torch.Tensor) -> list[object]:
        numbers: list[int] = part.tolist()
        return [*numbers] if samples is None else [samples[number] for number in numbers]

    if order is None or type(outer) is not BatchSampler:
        if start:
            left = islice(iter(inner), start, None) if order is None else listed(order)
            outer = _with_samples(outer, [*left])
        yield from islice(iter(outer), skip, None)
        return
    count = len(order)
    end = count - count % size
    for first in range(skip * size, end, together := max(1, TOGETHER // size) * size):
        keys = listed(order[first : min(first + together, end)])
        for k in range(0, len(keys), size):
            yield keys[k : k + size]
    n = len(inner.data_source) if type(inner) is RandomSampler else 0
    if type(inner) is RandomSampler and inner.generator is not None and inner.num_samples == n:
        # torch's RandomSampler draws whole permutations, and then another one for the rest.
        torch.randperm(n, generator=inner.generator, dtype=order.dtype)
    if end < count and skip * size <= end and not outer.drop_last:
        yield listed(order[end:])


def order_of(inner: object, start: int = 0) -> torch.Tensor | None:
    """Draw this rank's samples like the sampler, without the first `start` samples of the epoch.

    If the samples are not a permutation or the start of one, return None without drawing numbers.
    """
    if type(inner) not in PERMUTED:
        return None
    samples: Sized = getattr(inner, PERMUTED[type(inner)])
    n = len(samples)
    # torch draws the same numbers for both types.
    kind = torch.int32 if n < 2**31 else torch.int64
    if type(inner) is DistributedSampler:
        total, ranks, first = inner.total_size, inner.num_replicas, start + inner.rank
        if total != n and inner.drop_last != (total < n):
            # The length of the data set has changed. Let torch raise an error.
            return None
        order = torch.arange(n, dtype=kind)
        if inner.shuffle:
            drawing = torch.Generator().manual_seed(inner.seed + inner.epoch)
            order = torch.randperm(n, generator=drawing, dtype=kind)
        left = max(0, n - start)
        count = left // ranks if inner.drop_last else -(-left // ranks)
        own = order[first::ranks][:count]
        padding = (torch.arange(len(own), count) * ranks + first) % n
        return torch.cat((own, order[padding]))
    generator: torch.Generator | None = getattr(inner, "generator", None)
    count = n
    if type(inner) is RandomSampler:
        count = inner.num_samples
        if inner.replacement or count > n:
            return None
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator, dtype=kind)[start:count]


def _with_samples(index_sampler: object, samples: list[Any]) -> Iterable[object]:
    """Return an index sampler whose inner sampler is replaced by `samples`."""
    if type(index_sampler) is BatchSampler:
        return BatchSampler(samples, index_sampler.batch_size, index_sampler.drop_last)
    shard: Any = copy.copy(_of_accelerate(index_sampler, "BatchSamplerShard"))
    if shard is not None:
        shard.batch_sampler = _with_samples(shard.batch_sampler, samples)
    return samples if shard is None else shard


class Ahead(int):
    """An epoch number that was set by `Epochs` and not by the framework."""


class Epochs:
    """Corrects the epoch numbers that a framework passes to `set_epoch` in a resumed run.

    Some frameworks count epochs from 0 again after a resume. accelerate does this if the loop does
    not call its `set_epoch`. `ahead` is then added to these numbers. If a framework continues to
    count from the saved epoch, the numbers are left unchanged. Which case applies becomes clear in
    the epoch after the resumed one.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any, resume: State | None) -> None:
        kept: dict[str, tuple[int | None, int]] = loader.__dict__
        self._sampler = sampler
        number: int = sampler.epoch
        resumed, ahead = kept.get("_epochs", (None, 0))
        if resume is not None:
            saved: int | None = resume["sampler"].get("epoch")
            # In the middle of an epoch, `Keys` sets the epoch number.
            if saved is None:
                first = resume["sampler"].get("generators", {}).get("first", {})
                saved, resumed = int(first.get("epoch", number)), number
            ahead = saved - number
        elif resumed is not None and type(number) is not Ahead:
            goes_on = number not in (resumed, resumed + 1) or number == resumed + ahead + 1
            resumed, ahead = None, 0 if goes_on else ahead
        kept["_epochs"] = resumed, ahead
        self._number = number
        if ahead and type(number) is not Ahead:
            self._number = Ahead(number + ahead)
            sampler.set_epoch(self._number)

    def after(self) -> State:
        """Return the next epoch's number if the sampler incremented its epoch on its own."""
        number: int = self._sampler.epoch
        return {"epoch": int(number)} if number == self._number + 1 else {}


class Keys:
    """The keys of an epoch, and the states that are needed to draw them again in a resumed run.

    Most samplers draw their whole order at once, either in `iter` or with the first key. `Keys`
    therefore saves the states of generators before both of these points, and the state of a
    stateful sampler before and after the first key. In a resumed run, it restores these states,
    draws the keys again, and discards the keys of delivered batches. It then restores the global
    generators, because they belong to the trainer. If a sampler uses a global generator for later
    keys, these draws cannot be reproduced, because the trainer may use the generator as well.

    The epoch number in a state takes precedence over the sampler's number, because Lightning sets
    the epoch of a resumed loader only after the first keys have been drawn.

    A `Keys` object must be created before the index sampler's `iter` is called and the seed is
    drawn. `keeps_state` is True if states may be requested. `start` contains the number of samples
    and batches before the batch size or the number of ranks changed.
    """

    def __init__(
        self, loader: DataLoader[Any], *, keeps_state: bool, resume: State | None = None
    ) -> None:
        layers = self.layers = Layers(loader._index_sampler)
        self._generator: torch.Generator | None = loader.generator
        self._keeps_state = keeps_state and type(layers.inner) is not SequentialSampler
        known: tuple[object, ...] = layers.outer, layers.inner, layers.batches
        self._sampler = next(filter(is_stateful, known), None)
        # If a sampler's keys are divided among ranks, its state does not determine the keys of a
        # rank, so all keys are drawn again.
        self._is_divided = layers.shard is not None and self._sampler is known[-1]
        # Only cseq's BatchSampler has `state_after`.
        self._after: Callable[[State, int], State] | None
        self._after = getattr(layers.outer, "state_after", None)
        has_sources = self._keeps_state and self._after is None
        self._sources = sources_of(layers) if has_sources else {}
        self.start, self._options = (0, 0), dict[str, bool]()
        if resume is not None:
            self._set_generators(resume)
            self.start = tuple(resume["start"])
            if self._after is not None and not resume["strict"]:
                self._options = {"strict": False}
        self._epochs = Epochs(loader, layers.inner, resume) if "epoch" in self._sources else None
        self._begun_with = self.loaders_generator(now=True)
        self.look_again()
        # The state before the first key, the number of keys before it, and the state of the sampler
        # after the first key.
        self._state: State | None = None
        self._base = 0
        self._own: State = {}

    def look_again(self, resume: State | None = None) -> None:
        """Save the states of generators before the sampler's `iter` is called again.

        `resume` is passed for persistent workers, because no seed is drawn for their later epochs.
        """
        if resume is not None and resume["_iterator_finished"]:
            self._set_generators(resume)
        # For torch's own samplers, `iter` does not draw numbers.
        draws_nothing = type(self.layers.outer) in (BatchSampler, *OWN)
        self._before: State = {} if draws_nothing else read_sources(self._sources)

    def _set_generators(self, resume: State) -> None:
        """Restore the states of generators from the start of the epoch to resume or begin."""
        if self._generator is not None and resume.get("generator") is not None:
            _source_of(self._generator)[1](resume["generator"])
        generator = resume["sampler"].get("generator")
        set_sources({} if generator is None else {"generator": generator}, self._sources)

    def seed(self) -> int | None:
        """Derive a seed for the epoch from accelerate's seedable sampler, or return None.

        A run that skips batches cannot draw the same seed again, because accelerate does not save
        the states of generators.
        """
        inner = self.layers.seedable
        return None if inner is None else seed_from(inner.initial_seed, inner.epoch)

    def loaders_generator(self, *, now: bool) -> str | None:
        """Return the current state of the loader's generator, or the state before the epoch."""
        if now:
            return None if self._generator is None else text_of(self._generator.get_state())
        return self._begun_with

    def draw(self, iterator: Iterator[object], yielded: int, state: State) -> Iterator[object]:
        """Return an iterator over the keys after the first `yielded`.

        `iterator` is ``iter(index_sampler)``, and `state` is the state to resume from.
        """
        layers = self.layers
        if "generators" in state and self._keeps_state:
            self._check_sources(state)
            self._state, self._base = state, state.get("base", 0) or self.start[1]
            return chain.from_iterable(self._again(yielded - self._base, state))
        if self.start[0] and not self._keeps_state:
            iterator, yielded = drawn_keys(layers, 0, self.start[0]), yielded - self.start[1]
        elif layers.is_sliced:
            iterator = drawn_keys(layers)
        elif layers.omitted:
            iterator = iter(layers.outer)
        if "sampler" in state and self._sampler is not None:
            own = state["sampler"]
            begun, base, noted_at = state.get("begun", (own, 0, 0))
            # accelerate has reduced the number of batches in the state.
            if self._after is not None and yielded < noted_at:
                self._sampler.load_state_dict(begun, **self._options)
                own = self._after(begun, yielded - base)
            self._sampler.load_state_dict(copy.deepcopy(own), **self._options)
            iterator = iter(layers.outer)
            # cseq's BatchSampler starts at the position in its state.
            if self._after is not None:
                self._base, yielded = yielded, 0
        # With `chain`, an exception from the first key does not end the iterator.
        if self._keeps_state:
            iterator = chain(map(self._first_of, (iterator,)), iterator)
        return islice(iterator, yielded, None) if yielded else iterator

    def _check_sources(self, state: State) -> None:
        kept = "generator" in state["generators"]["first"]
        if kept != ("generator" in self._sources):
            its, ours = ("with", "has none") if kept else ("without", "has one")
            raise ValueError(
                f"the state was saved {its} a generator for the sampler, but this loader's sampler "
                f"{ours}, so its order would differ; create the loader {its} a generator, or do "
                "not load this state"
            )

    def _first_of(self, iterator: Iterator[Any]) -> object:
        self._state = self._noted()
        key = next(iterator)
        # Many samplers draw their order with the first key. If the first batch is short, the
        # sampler is already exhausted.
        size = 0 if self.layers.shard else self.layers.size
        if (not size or len(key) == size) and not self._is_divided:
            self._own = self._own_state()
        return key

    def _noted(self) -> State:
        generators = {"iter": self._before, "first": read_sources(self._sources)}
        return {"generators": generators, **self._own_state()}

    def _own_state(self) -> State:
        sampler = self._sampler
        return {} if sampler is None else {"sampler": copy.deepcopy(sampler.state_dict())}

    def _again(self, skip: int, state: State) -> Iterator[Iterable[object]]:
        """Draw the keys of a resumed epoch. Yield an iterable with key `skip`, then the others."""
        trainers, generators = read_sources(), state["generators"]
        layers, start, is_sliced = self.layers, self.start[0], self.layers.is_sliced
        try:
            set_sources(generators["first"] | generators["iter"], self._sources)
            if self._sampler is not None and "sampler" in state:
                self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))
            if start or is_sliced:
                iterator = drawn_keys(layers, skip if is_sliced else 0, start)
            else:
                iterator = iter(layers.outer)
            set_sources(generators["first"], self._sources)
            key = list(islice(iterator, 1))
            if skip and not is_sliced:
                before = read_sources(self._sources)
                key = list(islice(iterator, skip - 1, skip))
                self._compare(before)
        finally:
            set_sources(trainers)
            # Draw a number, because a RandomSampler draws one for its first key.
            if not skip and not start and type(layers.inner) is RandomSampler:
                torch.empty((), dtype=torch.int64).random_()
        yield key
        yield iterator

    def _compare(self, before: State) -> None:
        """Warn that resumes are not exact if later keys have changed a global generator."""
        after = read_sources({name: GLOBAL[name] for name in before.keys() & GLOBAL.keys()})
        if late := sorted(name for name in after if after[name] != before[name]):
            log.warning(
                "%s draws from a global generator (%s) even after its first key, so a resume in "
                "the middle of an epoch cannot draw the same numbers, and may repeat or miss "
                "samples; draw all numbers at the first key, or from the sampler's own generator",
                type(self.layers.inner).__name__,
                ", ".join(late),
            )

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the sampler's part of the state after `yielded` batches have been delivered.

        `finished` is True if the loop has reached the end of the epoch.
        """
        if finished:
            if self._keeps_state and self._sampler is not None:
                return self._own_state()
            # The next epoch will use this generator.
            generator = self.layers.generator
            state = {} if self._epochs is None else self._epochs.after()
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
        # Copy everything at once, because a sampler's state may refer to an object twice.
        if len(state) > 1:
            state = copy.deepcopy({**state, "generators": {}})
        return {**state, "generators": generators}
