"""A loader's batches from a fleet: what can be asked for, and the iterator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._feed import FeedIterator
from cseq.adapters.torch import names, worker
from cseq.adapters.torch.iterator import WorkersIterator
from cseq.adapters.torch.stateful import is_stateful
from cseq.arguments import MAX_RESTARTS
from cseq.encoding.unpicklable import UnpicklableError
from cseq.fleet.pool import KeyPool
from cseq.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cseq.adapters.torch.state import Resume

__all__ = ["FleetIterator", "check"]


def check(loader: Any, fleet: Any, rng: str | None) -> None:
    """Refuse a loader whose batches a fleet cannot make.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, its value, and the remedy.
    """
    dataset = loader.dataset
    if not hasattr(fleet, "attach") or not hasattr(fleet, "waits_for"):
        raise TypeError(f"fleet={fleet!r} is no cseq.RayFleet; give one")
    if loader._dataset_kind == names.ITERABLE:
        raise TypeError(
            f"fleet= beside the IterableDataset dataset={dataset!r}, whose samples have no index "
            "that an agent could be asked for; use num_workers=, or a data set with "
            "__getitem__(index)"
        )
    if loader.num_workers:
        raise ValueError(
            f"num_workers={loader.num_workers!r} beside fleet=, whose workers make the batches; "
            "leave it out, and give it to RayFleet"
        )
    if loader.max_restarts != MAX_RESTARTS:
        raise ValueError(
            f"max_restarts={loader.max_restarts!r} beside fleet=, whose workers it concerns; give "
            "it to RayFleet"
        )
    if rng == "worker":
        raise ValueError(
            f"rng={rng!r} beside fleet=: which worker makes a batch is a matter of time; give "
            "rng='batch', or leave it out"
        )
    if is_stateful(dataset) and loader.snapshot_every_n_steps:
        raise ValueError(
            f"fleet= beside dataset={dataset!r}, which has state_dict(): each of the workers would "
            "have a state of its own; give snapshot_every_n_steps=0 to leave it out of states"
        )


def employ(fleet: Any, made: worker.Worker) -> None:
    """Give a fleet what makes a loader's batches, unless it has it.

    Raises
    ------
    ValueError
        It has another worker.
    """
    own = fleet.worker
    if own is None and not fleet.over:
        fleet.worker = partial(worker.KeyIndexer, made)
    elif own is not None and not (
        getattr(own, "func", None) is worker.KeyIndexer and own.args[0].is_like(made)
    ):
        raise ValueError(
            f"fleet={fleet!r} has another worker: it serves one DataLoader, in the process that "
            "has made it, or more with the same dataset, collate_fn and worker_init_fn; make a "
            "RayFleet without a worker for each"
        )


class KeyStream:
    """An epoch of batches that a fleet makes of keys, ahead of the loop: as `Streams`."""

    def __init__(self, fleet: Any, *, ordered: bool, timeout: float | None) -> None:
        self._pool = pool = KeyPool(fleet, ordered=ordered, timeout=timeout)
        self._run = Run(pool)
        self._feed = pool.give_feed()
        self._run.close_with(self)
        self.glance, self.stats, self.close = self._feed.glance, pool.stats, self._run.close
        try:
            pool.open()
        except BaseException:
            self.close()
            raise

    def begin(self, keys: Iterator[Any], *, seed: int, first: int) -> None:
        """Begin the epoch; see `KeyPool.begin_keys`."""
        with self._run.lock.hold():
            self._pool.begin_keys(keys, seed=seed, first=first)

    def __iter__(self) -> Iterator[Any]:
        return FeedIterator(self._feed, self._feed.generation, self)


class FleetIterator(WorkersIterator):
    """Batches from a fleet, which depend on their key, their number and the epoch's seed alone.

    Parameters are those of `WorkersIterator`.
    """

    def _open(self, loader: Any, _: int) -> KeyStream:
        """Start the fleet, if it is not started."""
        self._workers: list[Any] = []
        fetching = worker.Fetching.of(self)
        made = worker.Worker(fetching, loader.worker_init_fn, batch_seeds=True, modes=None)
        employ(loader.fleet, made)
        timeout = float(self._timeout) or None
        try:
            return KeyStream(loader.fleet, ordered=self._in_order, timeout=timeout)
        except UnpicklableError as error:
            loader.fleet.worker = None
            told = str(error).replace("worker.args[0].fetching.", "")
            inline = "use no fleet: num_workers=0 copies nothing"
            error.args = (told.replace("use MTSequence, whose threads copy nothing", inline),)
            raise

    def _begin_keys(self, resume: Resume | None) -> None:
        """Begin an epoch."""
        keys = self._keys(resume)
        self._streams.begin(keys, seed=self._base_seed, first=self.progress.yielded)
