"""Where a loader is in an epoch: what `state_dict` returns."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import reprlib
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cseq.adapters.torch import names
from cseq.adapters.torch.order import put, sources_in, text_of
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

__all__ = ["VERSION", "LoaderProgress", "read"]

log = logging.getLogger("cseq")

VERSION = 4
NUMBERS = ("_num_yielded", "_sampler_iter_yielded")  # one thing; accelerate lowers both
MOST = 2**63 - 1
# What a loader says of its epochs: what their order depends on, and their batches; and `Shares`.
ORDER, BATCHES = ("sampler_type", "shuffle", "seed", "samples"), ("batch_size", "batches")
SHARES = ("step", "world_size", "rank")

State = dict[str, Any]


class LoaderProgress:
    """How far an epoch is, as of the last batch delivered.

    A loader that is pickled, or copied, begins anew: it has none.
    """

    def __init__(self, loader: DataLoader[Any], order: Keys, *, rng: str) -> None:
        self.iterable = loader._dataset_kind == names.ITERABLE
        self.num_workers, self.rng = loader.num_workers, rng
        self.iterator: Callable[[], Any] = _none  # a weak reference, if there are workers
        self.stats: Stats | None = None  # of workers that have ended
        # Of the data set in each worker, pickled; also what an earlier epoch has left it in.
        self.states: list[bytes | None] = []
        self.begin(order, None)

    def __reduce__(self) -> tuple[object, ...]:
        return _none, ()

    def begin(self, order: Keys, base_seed: int | None, resume: State | None = None) -> None:
        """Begin an epoch, or go on with one."""
        several = max(1, self.num_workers)
        self.order, self.base_seed = order, base_seed  # None: no epoch has begun
        self.finished = False
        self.batching: State | None = None  # what the loader says of it, once a state is asked for
        self.skipped: deque[Skipped] = deque(maxlen=MOST_SKIPPED)
        self.inline: DatasetState | None = None  # where the trainer makes the batches
        # Of an IterableDataset, for each worker: batches delivered, whether there are no more.
        if resume is None:
            self.yielded = order.omitted
            self.counts, self.ended = [0] * several, [False] * several
            states = [each and left_by(pickle.loads(each)) for each in self.states]
        else:
            self.yielded = resume["_num_yielded"]
            self.counts, self.ended = list(resume["counts"]), list(resume["ended"])
            states = resume["workers"]
        self.states = [None if each is None else dumps(each) for each in states or [None] * several]
        # The worker that is next: batch k of the keys of this loader is made by worker k mod N.
        self.turn = (self.yielded - order.omitted) % several
        if self.iterable:  # they take turns: the last with the most batches was the latest
            self.turn = -self.counts[::-1].index(max(self.counts)) % several

    def as_dict(self, *, next_epoch: bool) -> State:
        """Return it as `state_dict` does: another dict each time.

        All states of a loader have the same keys, and what varies is in a tuple: torch's
        distributed checkpoints restore only the keys that the state of a new loader has, and look
        into dicts and lists.
        """
        is_over = self.finished or (next_epoch and self.base_seed is not None)
        is_between = is_over or self.base_seed is None
        generator = self.order.loaders_generator(now=is_between)
        if self.inline:
            states: list[State | None] = [copy.deepcopy(self.inline.take(self.yielded))]
        else:
            states = [None if each is None else pickle.loads(each) for each in self.states]
        return {
            "version": VERSION,
            "kind": "iterable" if self.iterable else "map",
            "rng": self.rng,
            "generator": generator,
            "num_workers": self.num_workers,
            "base_seed": self.base_seed,
            "_num_yielded": self.yielded,
            "_sampler_iter_yielded": self.yielded,
            "_iterator_finished": is_over,
            "sampler": (self.order.state(self.yielded, finished=is_between),),
            "start": list(self.order.start),
            "counts": list(self.counts),
            "ended": list(self.ended),
            "workers": tuple(states),
        }


def _none() -> None:
    """Return what a weak reference returns when its object is gone."""


def _from_3(state: State) -> State:
    """Lift a state of version 3, which had tensors for the states of generators."""

    def texts(value: object) -> object:
        if isinstance(value, dict):
            return {name: texts(part) for name, part in value.items()}
        return text_of(value) if isinstance(value, torch.Tensor) else value

    sampler = {k: v if k == "sampler" else texts(v) for k, v in state["sampler"].items()}
    unknown = dict.fromkeys((*ORDER, *BATCHES, *SHARES, "epoch"))
    changed = {"sampler": (sampler,), "generator": texts(state["generator"])}
    return {**unknown, **state, **changed, "version": 4, "start": [0, 0]}


LIFTS = {3: _from_3}


def read(
    state: State,
    *,
    iterable: bool,
    num_workers: int,
    keeps: bool,
    batching: State,
    strict: bool = True,
) -> State | None:
    """Return a state as an iterator goes on from it; None: the next epoch begins anew.

    Of an epoch that is over, or has not begun, ``base_seed`` is None, and the rest as for an epoch
    that begins. `keeps`: the data set is the same object in all epochs. `strict`: see
    `DataLoader.load_state_dict`.

    Raises
    ------
    ValueError
        It is of another kind of data set, of another order, of another number of workers where
        that matters, or of a format that is not known.
    """
    if "_snapshot" in state or "fetcher_state" in state:
        raise ValueError(
            "the state is of torchdata's StatefulDataLoader, whose format is not read here: finish "
            "its epoch with that loader, then begin the next one with this loader, without a state"
        )
    if "order" in state:
        raise ValueError("the state is of a manager, such as MPSequence; load it into one")
    state = _lifted(state)
    kind = "iterable" if iterable else "map"
    if state["kind"] != kind:
        raise ValueError(
            f"the state is of a loader of {state['kind']}-style data; this one's is {kind}-style"
        )
    yielded = int(min(state[name] for name in NUMBERS))
    # Between epochs: that is over, or none has begun.
    is_between = state["_iterator_finished"] or state["base_seed"] is None
    (sampler,), workers, start = state["sampler"], list(state["workers"]), state["start"]
    has_states = any(each is not None for each in workers) and (keeps or not is_between)
    if is_between:  # a sampler that has a state goes on from its own
        sampler = {
            name: sampler[name]
            for name in ("sampler", "generator", "epoch")
            if sampler.get(name) is not None
        }
        if not sampler and not has_states and state.get("generator") is None:
            return None
    else:
        start, yielded = _cut(state, yielded, batching, strict=strict)
    if ((iterable and not is_between) or has_states) and state["num_workers"] != num_workers:
        what = "an IterableDataset" if iterable else "a data set that has a state"
        raise ValueError(
            f"the state is of num_workers={state['num_workers']} and this loader has "
            f"num_workers={num_workers}: with {what} both must be the same, since every worker "
            "has a share of its own"
        )
    several = max(1, num_workers)
    counts, ended = state["counts"], state["ended"]
    if is_between or not iterable:
        counts, ended = [0] * several, [False] * several
    elif sum(counts) != yielded:  # the caller has changed the number
        counts = [len(range(number, yielded, several)) for number in range(several)]
    workers = workers if has_states else [None] * several
    resume = {**state, "sampler": sampler, "start": start, "counts": counts}
    resume |= {"ended": ended, "strict": strict}
    if state["rng"] == "worker" and state.get("rank") != batching["rank"] and not is_between:
        resume["base_seed"] = (state["base_seed"] + (batching["rank"] or 0)) % MOST
    if is_between:
        left = [each and left_by(each) for each in workers]
        return resume | {"_num_yielded": 0, "base_seed": None, "workers": left}
    return resume | {"_num_yielded": yielded, "workers": workers}


def _lifted(state: State) -> State:
    """Return a state as this version writes it, or raise ValueError if it is malformed."""
    version = state.get("version")
    try:
        lifted = LIFTS[version](state) if version in LIFTS else state
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the state of version {version} is malformed: {error!r}") from error
    if type(version) is not int or lifted.get("version") != VERSION:
        raise ValueError(
            f"the state has version {version!r}; a DataLoader's have {min(LIFTS)} to {VERSION}"
        )
    _check_form(lifted)
    return lifted


def _is_list(value: Sequence[object], state: State, *kinds: type) -> bool:
    """Tell whether a value is a list of these, one for each worker, and no number below 0."""
    return len(value) == max(1, state["num_workers"]) and all(
        type(each) in kinds and (type(each) is not int or 0 <= each <= MOST) for each in value
    )


def _is_sampler(kept: list[State]) -> bool:
    """Tell whether this is what orders keep of a sampler, but for the sampler's own state."""
    (value,) = kept
    both: dict[str, State] = value.get("generators", {"iter": {}, "first": {}})
    trial = sources_in(random.Random(), np.random.RandomState(), torch.Generator())
    trial["generator"] = trial["torch"]
    trial["epoch"] = trial["torch"][0], lambda epoch: integer("epoch", epoch, 0, MOST)
    for states in (value, *both.values()):
        put(states, trial)
    return value.get("base", 0) in (0, 1) and both.keys() == {"iter", "first"}


# What each part of a state looks like: False, or an exception, where it does not.
FORM: dict[str, Callable[[Any, State], object]] = {
    "kind": lambda kind, _: kind in ("map", "iterable"),
    "num_workers": lambda number, _: integer("num_workers", number, 0, MOST),
    "base_seed": lambda seed, _: seed is None or integer("base_seed", seed, -MOST - 1, MOST),
    **dict.fromkeys(NUMBERS, lambda number, _: integer("batches", number, 0, MOST)),
    "_iterator_finished": lambda value, _: type(value) is bool,
    "counts": lambda counts, state: _is_list(counts, state, int),
    "ended": lambda ended, state: _is_list(ended, state, bool),
    "workers": lambda states, state: _is_list(states, state, dict, type(None)),
    "sampler": lambda sampler, _: _is_sampler(sampler),
    "generator": lambda states, _: states is None or _is_sampler([{"generator": states}]),
    "start": lambda start, _: len([integer("start", n, 0, MOST) for n in start]) == 2,
    "epoch": lambda epoch, _: epoch is None or integer("epoch", epoch, 0, MOST),
    **dict.fromkeys(
        (*ORDER, *BATCHES), lambda value, _: type(value) in (int, bool, str, type(None))
    ),
    **dict.fromkeys(
        SHARES, lambda value, _: value is None or integer("a share", value, 0, MOST) or not value
    ),
}


def _check_form(state: State) -> None:
    for name, look in FORM.items():
        try:
            is_fine = look(state[name], state) is not False
        except Exception:  # noqa: BLE001 - of any type
            is_fine = False
        if not is_fine:
            raise ValueError(
                f"the state is malformed, with {name}={reprlib.repr(state.get(name))}; give what "
                "state_dict() of a DataLoader returned"
            )


def _cut(state: State, yielded: int, batching: State, *, strict: bool) -> tuple[list[int], int]:
    """Return where the new batches of the epoch begin, and the number of the next one.

    Raises ValueError if the order of the samples differs, or if the batches do and it is not
    known how ranks share the epoch.
    """
    steps = [(side.get("step"), side.get("world_size")) for side in (state, batching)]
    is_shared = None not in (*steps[0], *steps[1])
    names = [*ORDER, *(() if is_shared else BATCHES)]
    for name in names if strict else ():
        there, value = state.get(name), batching[name]
        if there is not None and value is not None and there != value:
            way = "make it with the same"
            if name == "samples":
                way += (
                    ", or call load_state_dict(state, strict=False) to continue at the same "
                    "position of this one"
                )
            raise ValueError(
                f"the state is of an epoch with {name}={there!r}, and this loader has "
                f"{name}={value!r}, so its batches differ; {way}, or do not load this state"
            )
    start: list[int] = list(state["start"])
    if not is_shared or steps[0] == steps[1]:
        return start, yielded
    consumed = min(max(0, start[0] + (yielded - start[1]) * state["step"]), MOST)
    number = -(-consumed // batching["step"])
    return [consumed, number if consumed else 0], number
