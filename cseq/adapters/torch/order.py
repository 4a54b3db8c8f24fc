"""Reproduces an epoch's order: a sequence of keys.

Keys come from the batch sampler or, with ``batch_size=None``, from the sampler. To resume an epoch,
its keys are drawn again, and the consumed ones are dropped (`Keys`). For torch's own samplers,
iteration can start anywhere (`drawn_keys`).

Between epochs, a saved state covers the sampler or its generator, but not the global generators,
which belong to the trainer.

With a known sampler, ranks share an epoch (`Layers.shares`): after k batches on each rank, the
ranks together have consumed the first k * step samples. The state of one rank is therefore enough,
and a resumed run may have a different batch size or number of ranks.
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

    # Functions that get and set a generator's state.
    Source = tuple[Callable[[], object], Callable[[Any], object]]

__all__ = ["Keys", "Layers", "read_sources", "seed_from", "set_sources", "sources_in", "text_of"]

log = logging.getLogger("cseq")

State = dict[str, Any]

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
OWN = (*DRAWING, DistributedSampler)


class Shares(NamedTuple):
    """How ranks share an epoch. One batch on each rank makes `step` samples in total."""

    step: int
    world_size: int
    rank: int


class Layers:
    """An index sampler and the samplers nested in it.

    Attributes
    ----------
    outer : iterable
        The index sampler, unwrapped from accelerate's SkipBatchSampler.
    omitted : int
        The number of keys that SkipBatchSampler skips.
    shard : BatchSamplerShard or None
        `outer` if it is accelerate's batch sampler for one rank.
    batches : iterable
        The batch sampler that `shard` divides, or `outer`.
    size, inner : int, iterable
        The batch size and sampler of torch's BatchSampler. Without one, 0 and `outer`.
    seed : int or None
        The seed, if the order depends only on the seed and the epoch.
    is_known : bool
        Whether `inner` draws only from its seed, its generator or torch's global generator.
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
        """The generator passed to `inner`, if any."""
        generator = getattr(self.inner, "generator", None) if self.seed is None else None
        return generator if isinstance(generator, torch.Generator) else None

    @property
    def leaves_no_trace(self) -> bool:
        """Whether drawing keys before workers are forked has no effect on the workers.

        torch forks before it draws keys. Its samplers change only the global generator, which every
        worker reseeds, and a generator passed to them, which the data set may share.
        """
        return type(self.inner) in OWN and self.generator is None

    @property
    def is_sliced(self) -> bool:
        """Whether batches come from torch's BatchSampler and are slices of a permutation."""
        return self.batches is self.outer and self.size > 0 and type(self.inner) in PERMUTED

    @property
    def shares(self) -> Shares | None:
        """How ranks share an epoch, if known."""
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
    """Return `sampler` if its class is accelerate's `name`, or else None."""
    known: object = getattr(sys.modules.get("accelerate.data_loader"), name, None)
    return sampler if type(sampler) is known else None


def seed_from(*numbers: int) -> int:
    """Derive a seed from several numbers."""
    words = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(words.generate_state(1, np.uint64)[0] >> 1)


# -- sources of random numbers


def _as_lists(value: object) -> object:
    """Convert arrays in a NumPy state to lists, which `set_state` also accepts."""
    if isinstance(value, dict):
        return {name: _as_lists(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_as_lists, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def text_of(states: torch.Tensor) -> str:
    """Encode a torch generator's state as text, leaving out zero words (about half)."""
    words = states.numpy().view(np.uint32)
    used = words != 0
    parts = (np.uint32(len(words)), np.packbits(used), words[used])
    return b64encode(b"".join(part.tobytes() for part in parts)).decode()


def states_of(text: str) -> torch.Tensor:
    """Decode the result of `text_of`."""
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
    """Return the getter and setter of each generator's state, keyed by name."""
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
    """Return a sampler's sources of randomness.

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


# Number of samples to convert to a list at a time.
TOGETHER = 2048

# torch samplers that yield a permutation or a prefix of one, and the attribute each permutes.
PERMUTED = {
    RandomSampler: "data_source",
    SubsetRandomSampler: "indices",
    DistributedSampler: "dataset",
}


def drawn_keys(layers: Layers, skip: int = 0, start: int = 0) -> Iterator[object]:
    """Yield all keys after the first `skip`, drawing the same random numbers as the sampler.

    Key 0 follows the epoch's first `start` samples, counted over all ranks. A DistributedSampler
    pads what remains with the epoch's first samples. This is faster than torch's code, which
    converts all samples to a list and passes each key through two iterators.
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
        # RandomSampler draws another permutation for the remaining samples, even if none remain.
        torch.randperm(n, generator=inner.generator, dtype=order.dtype)
    if end < count and skip * size <= end and not outer.drop_last:
        yield listed(order[end:])


def order_of(inner: object, start: int = 0) -> torch.Tensor | None:
    """Draw this rank's samples as the sampler would, from sample `start` of the epoch.

    Return None, without drawing, if they are not a permutation or a prefix of one.
    """
    if type(inner) not in PERMUTED:
        return None
    samples: Sized = getattr(inner, PERMUTED[type(inner)])
    n = len(samples)
    # torch draws the same permutation for both dtypes.
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
    """Replace the inner sampler of an index sampler."""
    if type(index_sampler) is BatchSampler:
        return BatchSampler(samples, index_sampler.batch_size, index_sampler.drop_last)
    shard: Any = copy.copy(_of_accelerate(index_sampler, "BatchSamplerShard"))
    if shard is not None:
        shard.batch_sampler = _with_samples(shard.batch_sampler, samples)
    return samples if shard is None else shard


class Ahead(int):
    """An epoch number set by `Epochs` rather than by the framework."""


class Epochs:
    """Corrects the epoch numbers that a framework sets in a resumed run.

    Some frameworks restart at 0. For example, accelerate does so unless the loop calls its
    `set_epoch`. `ahead` is added to their numbers, unless the number of the next epoch shows that
    the framework continues from the saved epoch.
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
        """Return the number of the next epoch if the sampler has already advanced to it."""
        number: int = self._sampler.epoch
        return {"epoch": int(number)} if number == self._number + 1 else {}


class Keys:
    """The keys of an epoch, and the states needed to redraw them.

    Most samplers draw their order in `iter` or with the first key. Generator states are saved
    before each of these, and a sampler's own state before and after the first key. A resumed run
    restores these states, redraws the keys, and then restores the trainer's global generators.
    Draws from global generators after the first key cannot be reproduced.

    The epoch number in a state takes precedence, because Lightning sets the epoch of a resumed
    loader only after the first keys have been drawn.

    Create this before the seed is drawn and `iter` is called on the index sampler. `start` is the
    position (samples, batches) at which the batch size or the number of ranks changed.
    """

    def __init__(
        self, loader: DataLoader[Any], *, keeps_state: bool, resume: State | None = None
    ) -> None:
        layers = self.layers = Layers(loader._index_sampler)
        self._generator: torch.Generator | None = loader.generator
        self._keeps_state = keeps_state and type(layers.inner) is not SequentialSampler
        known: tuple[object, ...] = layers.outer, layers.inner, layers.batches
        self._sampler = next(filter(is_stateful, known), None)
        # If a sampler is divided among ranks, its state does not determine each rank's keys.
        self._is_divided = layers.shard is not None and self._sampler is known[-1]
        # Only cseq's BatchSampler has this method.
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
        # `_state`: from before the first key. `_base`: its number. `_own`: the sampler's, after it.
        self._state: State | None = None
        self._base = 0
        self._own: State = {}

    def look_again(self, resume: State | None = None) -> None:
        """Save the generators' states before the sampler's next `iter`.

        Pass `resume` only with persistent workers, because their later epochs draw no seed.
        """
        if resume is not None and resume["_iterator_finished"]:
            self._set_generators(resume)
        # Calling `iter` on torch's own samplers draws no random numbers.
        draws_nothing = type(self.layers.outer) in (BatchSampler, *OWN)
        self._before: State = {} if draws_nothing else read_sources(self._sources)

    def _set_generators(self, resume: State) -> None:
        """Restore the generators at the start of an epoch."""
        if self._generator is not None and resume.get("generator") is not None:
            _source_of(self._generator)[1](resume["generator"])
        generator = resume["sampler"].get("generator")
        set_sources({} if generator is None else {"generator": generator}, self._sources)

    def seed(self) -> int | None:
        """Derive a seed for the epoch from accelerate's seedable sampler, if any.

        accelerate does not save generators, so a run that skips batches cannot redraw the seed.
        """
        inner = self.layers.seedable
        return None if inner is None else seed_from(inner.initial_seed, inner.epoch)

    def loaders_generator(self, *, now: bool) -> str | None:
        """Return the state of the loader's generator, either now or from before the epoch."""
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
            # accelerate has lowered the batch count, so recompute the sampler's state.
            if self._after is not None and yielded < noted_at:
                self._sampler.load_state_dict(begun, **self._options)
                own = self._after(begun, yielded - base)
            self._sampler.load_state_dict(copy.deepcopy(own), **self._options)
            iterator = iter(layers.outer)
            # cseq's BatchSampler resumes at its position, so no keys need to be skipped.
            if self._after is not None:
                self._base, yielded = yielded, 0
        # With `chain`, an exception while drawing the first key does not end the iterator.
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
        # Many samplers draw their order with the first key. A short batch exhausts them.
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
        """Redraw the keys of a resumed epoch. Yield iterables of keys, starting with key `skip`."""
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
            # Draw one number, as a RandomSampler would before its first key.
            if not skip and not start and type(layers.inner) is RandomSampler:
                torch.empty((), dtype=torch.int64).random_()
        yield key
        yield iterator

    def _compare(self, before: State) -> None:
        """Warn if drawing later keys changed a global generator: resuming is then not exact."""
        after = read_sources({name: GLOBAL[name] for name in before.keys() & GLOBAL.keys()})
        if late := sorted(name for name in after if after[name] != before[name]):
            log.warning(
                "%s draws from a global generator (%s) even after its first key, so a mid-epoch "
                "resume cannot draw the same numbers, and may repeat or miss samples; draw all "
                "numbers before the first key, or from the sampler's own generator",
                type(self.layers.inner).__name__,
                ", ".join(late),
            )

    def state(self, yielded: int, *, finished: bool = False) -> State:
        """Return the sampler's part of the state after `yielded` batches.

        `finished` is True between epochs.
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
        # A sampler's state may refer to the same object twice, so copy it all in a single call.
        if len(state) > 1:
            state = copy.deepcopy({**state, "generators": {}})
        return {**state, "generators": generators}
