"""A loader's position in an epoch, as returned by `state_dict`."""

from __future__ import annotations

import copy
import pickle
import random
import reprlib
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cseq.adapters.torch import names
from cseq.adapters.torch.order import set_sources, sources_in, text_of
from cseq.adapters.torch.stateful import left_by
from cseq.check import integer
from cseq.encoding.pickling import dumps
from cseq.engine._feed import MOST_SKIPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.data import DataLoader

    from cseq.adapters.torch.order import Keys
    from cseq.adapters.torch.stateful import DatasetState
    from cseq.indexing.leaving import Skipped
    from cseq.measure.stats import Stats

__all__ = ["LoaderProgress", "resumed"]

VERSION = 4
# State keys whose values accelerate decrements.
NUMBERS = ("_num_yielded", "_sampler_iter_yielded")
MOST = 2**63 - 1
# State keys that describe an epoch: its order, its batches, and `Shares`.
ORDER, BATCHES = ("sampler_type", "shuffle", "seed", "samples"), ("batch_size", "batches")
SHARES = ("step", "world_size", "rank")

State = dict[str, Any]


class LoaderProgress:
    """A loader's progress up to the latest delivered batch.

    It is not copied or pickled with the loader, so a copy of the loader starts a new epoch.
    """

    def __init__(self, loader: DataLoader[Any], keys: Keys, *, rng: str) -> None:
        self.iterable = loader._dataset_kind == names.ITERABLE
        self.num_workers, self.rng = loader.num_workers, rng
        # A weak reference to the iterator if there are workers.
        self.iterator: Callable[[], Any] = _none
        # The final statistics, once the workers have been shut down.
        self.stats: Stats | None = None
        # The pickled data set state of each worker, kept across epochs.
        self.states: list[bytes | None] = []
        self.begin_epoch(keys, None)

    def __reduce__(self) -> tuple[object, ...]:
        return _none, ()

    def begin_epoch(self, keys: Keys, base_seed: int | None, resume: State | None = None) -> None:
        """Start or resume an epoch, or only initialize if `base_seed` is None."""
        several = max(1, self.num_workers)
        self.keys, self.base_seed = keys, base_seed
        self.finished = False
        # Computed when a state is first requested.
        self.batching: State | None = None
        self.skipped: deque[Skipped] = deque(maxlen=MOST_SKIPPED)
        # Set only if the trainer makes the batches.
        self.inline: DatasetState | None = None
        # For an IterableDataset, each worker's batch count, and whether the worker is exhausted.
        self.counts, self.ended = [0] * several, [False] * several
        self.yielded = keys.layers.omitted
        if resume is None:
            states = [state and left_by(pickle.loads(state)) for state in self.states]
        else:
            self.yielded, states = resume["_num_yielded"], resume["workers"]
            self.counts, self.ended = list(resume["counts"]), list(resume["ended"])
        self.states = [
            None if state is None else dumps(state) for state in states or [None] * several
        ]
        # The worker whose turn is next. When taking turns, worker k mod N makes key k's batch.
        self.turn = (self.yielded - keys.layers.omitted) % several
        # As workers take turns, the last one with the highest count made the latest batch.
        if self.iterable:
            self.turn = -self.counts[::-1].index(max(self.counts)) % several

    def as_dict(self, *, next_epoch: bool) -> State:
        """Return a new dict for `state_dict`.

        All states have the same keys, with tuples for the parts that vary, because torch's
        distributed checkpoints descend into dicts and lists and restore only the new loader's keys.
        """
        is_over = self.finished or (next_epoch and self.base_seed is not None)
        is_between = is_over or self.base_seed is None
        if self.inline:
            states: list[State | None] = [copy.deepcopy(self.inline.after(self.yielded))]
        else:
            states = [None if state is None else pickle.loads(state) for state in self.states]
        return {
            "version": VERSION,
            "kind": "iterable" if self.iterable else "map",
            "rng": self.rng,
            "generator": self.keys.loaders_generator(now=is_between),
            "num_workers": self.num_workers,
            "base_seed": self.base_seed,
            "_num_yielded": self.yielded,
            "_sampler_iter_yielded": self.yielded,
            "_iterator_finished": is_over,
            "sampler": (self.keys.state(self.yielded, finished=is_between),),
            "start": list(self.keys.start),
            "counts": list(self.counts),
            "ended": list(self.ended),
            "workers": tuple(states),
        }


def _none() -> None:
    """Return None, like a dead weak reference."""


def _from_3(state: State) -> State:
    """Convert a version 3 state, which stores generator states as tensors."""

    def texts(value: object) -> object:
        if isinstance(value, dict):
            return {name: texts(part) for name, part in value.items()}
        return text_of(value) if isinstance(value, torch.Tensor) else value

    sampler = {k: v if k == "sampler" else texts(v) for k, v in state["sampler"].items()}
    unknown = dict.fromkeys((*ORDER, *BATCHES, *SHARES, "epoch"))
    changed = {"sampler": (sampler,), "generator": texts(state["generator"])}
    return {**unknown, **state, **changed, "version": 4, "start": [0, 0]}


LIFTS = {3: _from_3}


def resumed(
    state: State, *, keeps: bool, kind: str, num_workers: int, batching: State, strict: bool
) -> State | None:
    """Return the state to resume from, or None for a new epoch.

    Between epochs, the ``base_seed`` of the state is None. `keeps` is True if all epochs use the
    same data set object. Raises ValueError if the state does not fit the loader.
    """
    state = _lifted(state)
    if state["kind"] != kind:
        raise ValueError(
            f"the state was saved by a loader of {state['kind']}-style data, but this loader's "
            f"data is {kind}-style"
        )
    yielded = int(min(state[name] for name in NUMBERS))
    is_between = state["_iterator_finished"] or state["base_seed"] is None
    (sampler,), workers, start = state["sampler"], list(state["workers"]), state["start"]
    has_states = any(workers) and (keeps or not is_between)
    # A stateful sampler resumes from its own state.
    if is_between:
        sampler = {
            name: sampler[name]
            for name in ("sampler", "generator", "epoch")
            if sampler.get(name) is not None
        }
        if not sampler and not has_states and state.get("generator") is None:
            return None
    else:
        start, yielded = _cut(state, yielded, batching, strict=strict)
    is_divided = kind == "iterable" and not is_between
    if (is_divided or has_states) and state["num_workers"] != num_workers:
        what = "an IterableDataset" if kind == "iterable" else "a stateful data set"
        raise ValueError(
            f"the state was saved with num_workers={state['num_workers']}, but this loader has "
            f"num_workers={num_workers}, and each worker has its own part of {what}; pass the same "
            "number"
        )
    several = max(1, num_workers)
    counts, ended, base_seed = state["counts"], state["ended"], state["base_seed"]
    if not is_divided:
        counts, ended = [0] * several, [False] * several
    # The number of batches may have been changed, for example by accelerate.
    elif sum(counts) != yielded:
        counts = [len(range(number, yielded, several)) for number in range(several)]
    workers = workers if has_states else [None] * several
    if is_between:
        yielded, base_seed = 0, None
        workers = [state and left_by(state) for state in workers]
    elif state["rng"] == "worker" and state.get("rank") != batching["rank"]:
        base_seed = (base_seed + (batching["rank"] or 0)) % MOST
    parts = {"sampler": sampler, "start": start, "counts": counts, "ended": ended}
    parts |= {"workers": workers, "base_seed": base_seed, "_num_yielded": yielded}
    return {**state, **parts, "strict": strict}


def _lifted(state: State) -> State:
    """Convert a state to the current version. Raises ValueError if it is malformed."""
    if "_snapshot" in state or "fetcher_state" in state:
        raise ValueError(
            "the state was saved by torchdata's StatefulDataLoader, whose format cseq cannot read; "
            "finish the epoch with that loader, then start the next one here, without a state"
        )
    if "order" in state:
        raise ValueError("the state was saved by a manager, such as MPSequence; load it into one")
    version = state.get("version")
    try:
        lifted = LIFTS[version](state) if version in LIFTS else state
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"malformed version {version} state: {error!r}") from error
    if type(version) is not int or lifted.get("version") != VERSION:
        raise ValueError(
            f"the state has version {version!r}, but a DataLoader reads versions {min(LIFTS)} to "
            f"{VERSION}"
        )
    for name, fits in FORM.items():
        try:
            is_fine = fits(lifted[name], lifted) is not False
        except Exception:  # noqa: BLE001 - whatever a malformed value raises
            is_fine = False
        if not is_fine:
            raise ValueError(
                f"the state is malformed: {name}={reprlib.repr(lifted.get(name))}; pass the dict "
                "that a DataLoader's state_dict() returned"
            )
    return lifted


def _is_number(value: object, _: State, least: int = 0) -> bool:
    return integer("a number", value, least, MOST) >= least


def _is_list(value: Sequence[object], state: State, *kinds: type) -> bool:
    """Return True if a list has one item per worker, of the given types and in range."""
    return len(value) == max(1, state["num_workers"]) and all(
        type(part) in kinds and (type(part) is not int or 0 <= part <= MOST) for part in value
    )


def _is_sampler(kept: list[State]) -> bool:
    """Check the part of a state that `Keys` writes, except for the sampler's own state."""
    (value,) = kept
    both: dict[str, State] = value.get("generators", {"iter": {}, "first": {}})
    trial = sources_in(random.Random(), np.random.RandomState(), torch.Generator())
    trial["generator"] = trial["torch"]
    trial["epoch"] = trial["torch"][0], lambda epoch: integer("epoch", epoch, 0, MOST)
    for states in (value, *both.values()):
        set_sources(states, trial)
    return value.get("base", 0) in (0, 1) and both.keys() == {"iter", "first"}


# Checks for the parts of a state. A check returns False or raises if its part is malformed.
FORM: dict[str, Callable[[Any, State], object]] = {
    "kind": lambda kind, _: kind in ("map", "iterable"),
    **dict.fromkeys(("num_workers", *NUMBERS), _is_number),
    "base_seed": lambda seed, state: seed is None or _is_number(seed, state, -MOST - 1),
    "_iterator_finished": lambda value, _: type(value) is bool,
    "counts": lambda counts, state: _is_list(counts, state, int),
    "ended": lambda ended, state: _is_list(ended, state, bool),
    "workers": lambda states, state: _is_list(states, state, dict, type(None)),
    "sampler": lambda sampler, _: _is_sampler(sampler),
    "generator": lambda states, _: states is None or _is_sampler([{"generator": states}]),
    "start": lambda start, state: [_is_number(n, state) for n in start] == [True, True],
    **dict.fromkeys(
        ("epoch", *SHARES), lambda value, state: value is None or _is_number(value, state)
    ),
    **dict.fromkeys(
        (*ORDER, *BATCHES), lambda value, _: type(value) in (int, bool, str, type(None))
    ),
}


def _cut(state: State, yielded: int, batching: State, *, strict: bool) -> tuple[list[int], int]:
    """Return `start` for the current batch size and ranks, and the number of the next batch.

    Raises ValueError if the order of samples differs, or if the batches differ and it is unknown
    how ranks share an epoch.
    """
    steps = [(side.get("step"), side.get("world_size")) for side in (state, batching)]
    is_shared = None not in (*steps[0], *steps[1])
    for name in (*ORDER, *(() if is_shared else BATCHES)) if strict else ():
        saved, value = state.get(name), batching[name]
        if saved is not None and value is not None and saved != value:
            way = "create the loader with the same value"
            if name == "samples":
                way = (
                    "use the same data, call load_state_dict(state, strict=False) to continue at "
                    "the same position in this data"
                )
            raise ValueError(
                f"the state was saved in an epoch with {name}={saved!r}, but this loader has "
                f"{name}={value!r}, so its batches differ; {way}, or do not load this state"
            )
    start: list[int] = list(state["start"])
    if not is_shared or steps[0] == steps[1]:
        return start, yielded
    consumed = min(max(0, start[0] + (yielded - start[1]) * state["step"]), MOST)
    number = -(-consumed // batching["step"])
    return [consumed, number if consumed else 0], number
