"""A batch of a `DataLoader`'s latest epoch once more, in the calling thread."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cseq.adapters.torch.batches import BatchSampler
from cseq.adapters.torch.inline import InlineIterator
from cseq.adapters.torch.order import GLOBAL, StatefulOrder, look, put, sources_of
from cseq.adapters.torch.state import Kept, Resume
from cseq.adapters.torch.stateful import is_stateful
from cseq.check import count
from cseq.remake import Remade, Timed

if TYPE_CHECKING:
    from cseq.adapters.torch.state import Progress

__all__ = ["remake"]


def remake(loader: Any, progress: Progress | None, batch: int, *, samples: bool) -> Remade:
    """Make a batch of a loader's latest epoch once more; see `DataLoader.remake`."""
    batch = count("batch", batch, least=0)
    if progress is not None:
        refuse(loader, progress, samples=samples)
    if progress is None or progress.order is None or isinstance(progress.order, Kept):
        raise RuntimeError("no epoch has begun of which to make a batch again: call iter() first")
    state = progress.order.state(progress.yielded)
    twin, timed = copy.copy(loader), Timed(loader.dataset) if samples else None
    twin.__dict__.update(num_workers=0, timeout=0)  # torch's refuses some by `setattr`
    if timed is not None:
        twin.__dict__["dataset"] = timed
    if isinstance(loader.batch_sampler, BatchSampler):
        twin.__dict__["batch_sampler"] = sampler = copy.copy(loader.batch_sampler)
        state = {"sampler": sampler.state_before(state["sampler"]["epoch"], batch)}
    resume = Resume(
        yielded=batch,
        base_seed=progress.base_seed,
        sampler=state,
        counts=[],
        ended=[],
        turn=0,
        states=[],
    )
    # All that the iterator, the keys and the batch draw from is the loop's.
    sources = {**GLOBAL, **sources_of(loader._index_sampler)}
    generator = loader.generator or torch.default_generator
    before, drawn = look(sources), generator.get_state()
    try:
        iterator = InlineIterator(
            twin, rng="batch", on_error="raise", resume=resume, snapshot_every=1
        )
        try:
            iterator._draw()
        except StopIteration:
            raise IndexError(f"batch={batch} is not in this epoch: it has fewer") from None
        key = iterator._received[0]
        if timed is not None:
            timed.seconds.clear()
        start = time.perf_counter()
        made = next(iterator)
        seconds = time.perf_counter() - start
    finally:
        put(before, sources)
        generator.set_state(drawn)
    each = None if timed is None else np.array(timed.seconds)
    return Remade(made, np.atleast_1d(np.asarray(key)), seconds, each)


def refuse(loader: Any, progress: Progress, *, samples: bool) -> None:
    """Raise ValueError for batches that depend on more than the epoch and their number."""
    what = None
    is_ordered = isinstance(loader.batch_sampler, BatchSampler)
    if progress.iterable:
        what = "an IterableDataset makes them one after another"
    elif progress.rng != "batch":
        what = "with rng='worker' they depend on what their worker drew before; give rng='batch'"
    elif is_stateful(loader.dataset):
        what = "the data set has a state of its own"
    elif isinstance(progress.order, StatefulOrder) and not is_ordered:
        what = "the sampler has a state of its own"
    if what is not None:
        raise ValueError(f"single batches of this loader cannot be made again: {what}")
    if samples and hasattr(loader.dataset, "__getitems__"):
        raise ValueError(
            "samples=True times what the data set is asked for one by one, and this one has "
            "__getitems__; leave it out"
        )
