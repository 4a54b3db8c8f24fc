"""Where a loader is in an epoch: what `state_dict` returns."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cseq import failure
from cseq.pickling import dumps

if TYPE_CHECKING:
    import torch

    from cseq.adapters.torch.order import Order
    from cseq.adapters.torch.stateful import DatasetState

__all__ = ["VERSION", "Progress", "Resume", "read"]

log = logging.getLogger("cseq")

VERSION = 1
NEEDED = (
    "kind", "num_workers", "base_seed", "_num_yielded", "_sampler_iter_yielded",
    "_iterator_finished", "sampler", "counts", "ended", "turn", "workers",
)  # fmt: skip

State = dict[str, Any]


@dataclass(frozen=True)
class Resume:
    """Where an epoch is to go on.

    Attributes
    ----------
    yielded : int
        Batches that were delivered.
    base_seed : int or None
        None: a new one is drawn, for an epoch that begins where the data set has come to.
    sampler : dict
        See `Order.keys`.
    counts, ended, turn
        See `Progress`.
    states : list of (dict or None)
        Of the data set, in each worker or in the trainer.
    drop : int
        Batches that were delivered behind this place: they are made again, and dropped.
    """

    yielded: int
    base_seed: int | None
    sampler: State
    counts: list[int]
    ended: list[bool]
    turn: int
    states: list[State | None]
    drop: int = 0


class Progress:
    """How far an epoch is, as of the last batch delivered.

    Parameters
    ----------
    iterable : bool
        Whether the data set is an IterableDataset.
    num_workers : int
        0: the trainer makes the batches.
    rng : str

    Attributes
    ----------
    base_seed : int
    yielded : int
        Batches delivered.
    finished : bool
        Whether the epoch is over.
    order : Order or Kept, optional
        Of the keys.
    counts : list of int
        Batches delivered of each worker, if the data set is an IterableDataset.
    ended : list of bool
        Workers that have no more batches.
    turn : int
        The worker whose turn is next.
    states : list of (bytes or None)
        Of the data set in each worker, pickled.
    inline : DatasetState, optional
        Of the data set, where the trainer makes the batches.
    skipped : list of tuple
        Batches of this epoch that were left out: number, error.
    generator : torch.Generator, optional
        The loader's own one, from which the seeds of its epochs are drawn.
    before : torch.Tensor, optional
        The state it had before it was drawn from for this epoch.
    """

    def __init__(self, *, iterable: bool, num_workers: int, rng: str) -> None:
        self.iterable, self.num_workers, self.rng = iterable, num_workers, rng
        self.generator: torch.Generator | None = None
        self.before: torch.Tensor | None = None
        self.begin(0)

    def begin(self, base_seed: int, resume: Resume | None = None) -> None:
        """Begin an epoch, or go on with one."""
        several = max(1, self.num_workers)
        self.base_seed = base_seed
        self.yielded = resume.yielded if resume else 0
        self.finished = False
        self.skipped: list[tuple[int, str]] = []
        self.order: Order | Kept | None = None
        self.inline: DatasetState | None = None
        self.counts = list(resume.counts) if resume and resume.counts else [0] * several
        self.ended = list(resume.ended) if resume and resume.ended else [False] * several
        self.turn = resume.turn if resume else 0
        states = resume.states if resume and resume.states else [None] * several
        self.states = [None if each is None else dumps(each) for each in states]

    def skip(self, error: BaseException, place: str) -> bool:
        """Note, and log, that the next batch is left out, since it is an error.

        Returns
        -------
        bool
            False: it is an exception of another kind, which nothing leaves out.
        """
        if not isinstance(error, Exception):
            return False
        entry = self.yielded, failure.line_of(error)
        if entry not in self.skipped[-1:]:  # a signal handler may have raised behind this
            self.skipped.append(entry)
            log.error("skipped %s: %s", place, entry[1])
        return True

    def as_dict(self) -> State:
        """Return it as `state_dict` does: another dict each time."""
        before = self._generator_state()
        return {
            "version": VERSION,
            "kind": "iterable" if self.iterable else "map",
            "rng": self.rng,
            **({} if before is None else {"generator": before}),
            "num_workers": self.num_workers,
            "base_seed": self.base_seed,
            "_num_yielded": self.yielded,
            "_sampler_iter_yielded": self.yielded,
            "_iterator_finished": self.finished,
            "sampler": self._sampler_state(),
            "counts": list(self.counts),
            "ended": list(self.ended),
            "turn": self.turn,
            "workers": self._dataset_states(),
        }

    def watch(self, generator: torch.Generator | None, before: torch.Tensor | None) -> None:
        """Note the loader's generator, as it was before an epoch; `begin` comes after or before."""
        self.generator, self.before = generator, before

    def _generator_state(self) -> torch.Tensor | None:
        """Return what an epoch draws from that goes on here, or the next one, if this is over."""
        if self.generator is None or (self.before is not None and not self.finished):
            return self.before
        return self.generator.get_state()

    def _sampler_state(self) -> State:
        """Return what is kept of the order."""
        if self.order is None:
            return {}
        return self.order.state(self.yielded, finished=self.finished)

    def _dataset_states(self) -> list[State | None]:
        """Return the states of the data set."""
        if self.inline:
            return [self.inline.take(self.yielded)]
        return [None if each is None else pickle.loads(each) for each in self.states]

    def __getstate__(self) -> State:
        """Return what is pickled, and copied, with a loader: no iterators, no generators."""
        states = self._dataset_states()
        return {
            **vars(self),
            "order": Kept(self._sampler_state()),
            "inline": None,
            "generator": None,
            "before": self._generator_state(),
            "states": [None if each is None else dumps(each) for each in states],
        }


class Kept:
    """What was kept of the order of an epoch; it gives no keys any more."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state(self, yielded: int, *, finished: bool = False) -> State:  # noqa: ARG002 - as of then
        """Return what was kept."""
        return copy.deepcopy(self._state)


def read(
    state: State, *, iterable: bool, num_workers: int, keeps: bool, batching: State
) -> Resume | None:
    """Read a state, of this format or torchdata's; None: the next epoch begins anew.

    Parameters
    ----------
    keeps : bool
        The data set is the same object in all epochs.
    batching : dict
        What the batches of an epoch are numbered by; see `DataLoader.state_dict`.

    Raises
    ------
    ValueError
        It is of another kind of data set, of other batches, of another number of workers where
        that matters, or of a format that is not known.
    """
    if "_snapshot" in state or "fetcher_state" in state:
        state = _of_torchdata(state, iterable=iterable)
    version = state.get("version")
    if version != VERSION:
        raise ValueError(
            f"the state has version {version!r}, this loader reads {VERSION}, and the format of "
            "torchdata's StatefulDataLoader"
        )
    missing = [name for name in NEEDED if name not in state]
    if missing:
        raise ValueError(
            f"the state lacks {missing}; give what state_dict() of a DataLoader returned"
        )
    kind = "iterable" if iterable else "map"
    if state["kind"] != kind:
        raise ValueError(
            f"the state is of a loader of {state['kind']}-style data; this one's is {kind}-style"
        )
    yielded = min(state["_num_yielded"], state["_sampler_iter_yielded"])
    finished, workers = state["_iterator_finished"], state["workers"]
    has_states = any(each is not None for each in workers)
    sampler = state["sampler"]
    if finished:  # a sampler that has a state goes on from its own
        sampler = {"sampler": sampler["sampler"]} if sampler.get("sampler") is not None else {}
    states = list(workers) if has_states and (keeps or not finished) else []
    if state["base_seed"] is None or (finished and not sampler and not states):
        return None
    for name, value in batching.items() if not finished else ():
        there = state.get(name)  # torchdata's states do not say
        if there is not None and value is not None and there != value:
            raise ValueError(
                f"the state is of an epoch with {name}={there!r}, and this loader has "
                f"{name}={value!r}, so its batches are others; make it with the same, or do not "
                "load this state"
            )
    if (iterable or states) and state["num_workers"] != num_workers:
        what = "an IterableDataset" if iterable else "a data set that has a state"
        raise ValueError(
            f"the state is of num_workers={state['num_workers']} and this loader has "
            f"num_workers={num_workers}: with {what} both must be the same, since every worker "
            "has a share of its own"
        )
    if finished:
        kept = [each and {"dataset": each.get("dataset"), "made": 0} for each in states]
        return Resume(0, None, sampler, [], [], 0, kept)
    counts, ended, turn = state["counts"], state["ended"], state["turn"]
    if not iterable:
        counts, ended, turn = [], [], 0
    elif sum(counts) != yielded:  # the caller has changed the number
        counts, turn = _in_turn(yielded, max(1, num_workers)), yielded % max(1, num_workers)
    return Resume(
        yielded=yielded,
        base_seed=state["base_seed"],
        sampler=sampler,
        counts=list(counts),
        ended=list(ended),
        turn=turn,
        states=states,
        drop=state.get("drop", 0),
    )


def _in_turn(yielded: int, num_workers: int) -> list[int]:
    """Count the batches of each worker, if all of them were asked in turn."""
    return [len(range(number, yielded, num_workers)) for number in range(num_workers)]


def _of_torchdata(state: State, *, iterable: bool) -> State:
    """Translate a state of torchdata's StatefulDataLoader.

    Its snapshot is some steps old, and does not say how many batches each worker had made, nor
    which had none left. So what depends on that is made again and dropped: the steps since, or
    all, if the data set has no state to go on from.
    """
    snapshot = state.get("_snapshot")
    if snapshot is None:
        main, since = state, 0
        yielded = state["_num_yielded"]
        num_workers, turn = 0, 0
        fetched = {"fetcher_state": state["fetcher_state"], "dataset_state": state["dataset_state"]}
        found = [fetched]
    else:
        main, since = snapshot["_main_snapshot"], state["_steps_since_snapshot"]
        yielded = snapshot["_snapshot_step"]
        num_workers = main["_num_workers"]
        turn = (snapshot["_last_yielded_worker_id"] + 1) % num_workers
        snapshots = snapshot["_worker_snapshots"]
        found = [snapshots[f"worker_{number}"] for number in range(num_workers)]
    several = max(1, num_workers)
    workers = [
        _worker_of_torchdata(each, made)
        for each, made in zip(found, _in_turn(yielded, several), strict=True)
    ]
    drop, skip = since, 0
    if all(each is None for each in workers):
        if not iterable:  # nothing but keys: none of the batches since is needed
            yielded, drop, skip = yielded + since, 0, since
        elif num_workers:
            yielded, drop, turn = 0, yielded + since, 0
    return {
        "version": VERSION,
        "kind": "iterable" if iterable else "map",
        "rng": "worker",
        "num_workers": num_workers,
        "base_seed": main.get("_base_seed", 0),
        "_num_yielded": yielded,
        "_sampler_iter_yielded": yielded,
        "_iterator_finished": state["_iterator_finished"],
        "sampler": _sampler_of_torchdata(main, skip),
        "counts": _in_turn(yielded, several) if iterable else [],
        "ended": [False] * several if iterable else [],
        "turn": turn,
        "workers": workers,
        "drop": drop,
    }


def _sampler_of_torchdata(main: State, skip: int) -> State:
    """Translate what torchdata keeps of the samplers."""
    sampler, iterator = main.get("_index_sampler_state"), main.get("_sampler_iter_state")
    own = next((each for each in (sampler, iterator) if _is_own(each)), None)
    if own is not None:  # torchdata's BatchSampler, over its RandomSampler or another one
        inner = own.get("sampler_iter_state") or {}
        if "generator" in inner:
            return {"generator": inner["generator"]}
        sampler, iterator = own.get("sampler_state"), None
    return {"sampler": sampler, "iterator": iterator, "skip": skip}


def _is_own(state: Any) -> bool:
    """Whether a state is of torchdata's BatchSampler."""
    return isinstance(state, dict) and "samples_yielded" in state


def _worker_of_torchdata(state: State, made: int) -> State | None:
    """Translate the state of the data set in a worker, if it has one."""
    fetcher = state.get("fetcher_state") or {}
    found = {"dataset": state.get("dataset_state"), "iterator": fetcher.get("dataset_iter_state")}
    if all(each is None for each in found.values()):
        return None
    return {**found, "made": made, "ended": fetcher.get("fetcher_ended", False)}
