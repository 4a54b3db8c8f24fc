"""States of torchdata's StatefulDataLoader, and what can be told from them.

With workers its state is a snapshot, which may be some steps old, and which an epoch that is over
has from before its end. The state of its RandomSampler has the generator's state from when its
iterator was made, which may be before the loader drew the epoch's seed from the same generator, or
in the epoch before.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from cseq.adapters.torch.order import draw_seed, generator_of, inner_of, with_generator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VERSION", "in_turn", "is_of_torchdata", "resolve", "translate"]

VERSION = 1  # of the states that are made here

State = dict[str, Any]


def is_of_torchdata(state: State) -> bool:
    """Whether a state is of torchdata's format."""
    return "_snapshot" in state or "fetcher_state" in state


def in_turn(yielded: int, num_workers: int) -> list[int]:
    """Count the batches of each worker, if all of them were asked in turn."""
    return [len(range(number, yielded, num_workers)) for number in range(num_workers)]


def translate(state: State, *, iterable: bool) -> State:
    """Translate a state of torchdata's StatefulDataLoader.

    Its snapshot is some steps old, and does not say how many batches each worker had made, nor
    which had none left. So what depends on that is made again and dropped: the steps since, or
    all, if the data set has no state to go on from. Where the epoch is over, the rest of it is
    (`to_pass`): the snapshot is from before its end.
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
        _worker_of(each, made) for each, made in zip(found, in_turn(yielded, several), strict=True)
    ]
    drop, skip = since, 0
    if all(each is None for each in workers):
        if not iterable:  # nothing but keys: none of the batches since is needed
            yielded, drop, skip = yielded + since, 0, since
        elif num_workers:
            yielded, drop, turn = 0, yielded + since, 0
    sampler = {} if iterable else {**_sampler_of(main), "skip": skip}
    is_random = "generator" in sampler
    return {
        "version": VERSION,
        "kind": "iterable" if iterable else "map",
        "rng": "worker",
        "num_workers": num_workers,
        "base_seed": main.get("_base_seed", 0),
        "_num_yielded": yielded,
        "_sampler_iter_yielded": yielded,
        "_iterator_finished": state["_iterator_finished"],
        "sampler": sampler,
        "counts": in_turn(yielded, several) if iterable else [],
        "ended": [False] * several if iterable else [],
        "turn": turn,
        "workers": workers,
        "drop": drop,
        # Without workers, a sampler with a state has come to the end of it, and the data set has.
        "to_pass": num_workers > 0 or (not iterable and sampler.get("sampler") is None),
        "asked": main["_sampler_iter_yielded"],
        "samples": sampler.get("samples"),
        "shuffle": True if is_random and "samples" in sampler else None,
    }


def _sampler_of(main: State) -> State:
    """Translate what it keeps of the samplers."""
    sampler: Any = main.get("_index_sampler_state")
    iterator: Any = main.get("_sampler_iter_state")
    own = next((each for each in (sampler, iterator) if _is_of_batches(each)), None)
    found: State = {}
    if own is not None:  # torchdata's BatchSampler, over its RandomSampler or another one
        # Before the first key it is that of the epoch before.
        found["samples"] = own["samples_yielded"] if main["_sampler_iter_yielded"] else 0
        sampler, iterator = own.get("sampler_state"), own.get("sampler_iter_state")
    found["sampler"] = sampler
    if own is None:
        found["iterator"] = iterator
    if sampler is None and _is_random(iterator):
        found["generator"] = iterator["generator"]
        found["drawn"] = iterator["yielded"]
        found["asked"] = main["_sampler_iter_yielded"]
        found["base_seed"] = main.get("_base_seed")  # without workers it is not kept
    return found


def _is_of_batches(state: Any) -> bool:
    """Whether a state is of torchdata's BatchSampler."""
    return isinstance(state, dict) and "samples_yielded" in state


def _is_random(state: Any) -> bool:
    """Whether a state is of the iterator of torchdata's RandomSampler."""
    return isinstance(state, dict) and set(state) == {"generator", "yielded"}


def _worker_of(state: State, made: int) -> State | None:
    """Translate the state of the data set in a worker, if it has one."""
    fetcher = state.get("fetcher_state") or {}
    found = {"dataset": state.get("dataset_state"), "iterator": fetcher.get("dataset_iter_state")}
    if all(each is None for each in found.values()):
        return None
    return {**found, "made": made, "ended": fetcher.get("fetcher_ended", False)}


def resolve(state: State, index_sampler: Any, generator: torch.Generator | None) -> State:
    """Find the state that a RandomSampler's generator had with the first key of the epoch.

    Parameters
    ----------
    state : dict
        Of the sampler, as `translate` returns it; any other is returned as it is.
    generator : torch.Generator, optional
        The loader's, from which it draws a seed for each epoch.
    """
    if "asked" not in state:
        return state
    given, inner = state["generator"], inner_of(index_sampler)
    # An epoch that has asked for no key yet has the iterator of the one before.
    count = 0 if state["asked"] else state["drawn"]
    is_shared = generator is not None and generator_of(index_sampler) is generator

    def behind(begin: torch.Tensor) -> torch.Tensor:
        """Return the generator's state behind the keys of the epoch before."""
        drawing = torch.Generator().set_state(begin)
        keys = iter(with_generator(inner, drawing))
        deque(keys if count >= len(inner) else islice(keys, count), maxlen=0)
        return drawing.get_state()

    if not is_shared:
        begin = behind(given) if count else given
    elif state["base_seed"] is not None:
        begin = _with_seed(given, state["base_seed"], behind if count else None)
    else:
        assert generator is not None
        # Without workers each epoch draws a seed. A BatchSampler made its first iterator with the
        # loader, before that: the generator had been seeded, and not been drawn from.
        is_first = "samples" not in state or _is_fresh(given, generator)
        begin = _behind_seed(given)[1] if is_first else given
        if count:
            begin = _behind_seed(behind(begin))[1]
    found = {"skip": state["skip"], "generator": begin}
    if state.get("iterator") is not None:  # of the sampler itself: it may be torchdata's here, too
        found["iterator"] = {"generator": begin, "yielded": state["drawn"]}
    return found


def _with_seed(
    given: torch.Tensor, seed: int, behind: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """Find where the keys begin, by the seed that the loader drew from the same generator.

    Persistent workers drew that in their first epoch only; the others in front of each one's keys.
    """
    shifted = _behind_seed(given)
    if behind is None:
        return shifted[1] if shifted[0] == seed else given
    for begin in (given, shifted[1]):
        drawn, begins = _behind_seed(behind(begin))
        if drawn == seed:
            return begins
    return behind(shifted[1] if shifted[0] == seed else given)


def _behind_seed(state: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Draw a loader's seed; return it, and the generator's state behind it."""
    generator = torch.Generator().set_state(state)
    seed = draw_seed(generator)
    return seed, generator.get_state()


def _is_fresh(state: torch.Tensor, generator: torch.Generator) -> bool:
    """Whether a state is that of a generator from which nothing was drawn since it was seeded.

    Or that of the loader's, which may have been drawn from before it was given to a loader.
    """
    seed = torch.Generator().set_state(state).initial_seed()
    fresh = torch.Generator().manual_seed(seed).get_state()
    return torch.equal(state, fresh) or torch.equal(state, generator.get_state())
