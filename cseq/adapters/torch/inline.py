"""The iterator over batches that the trainer makes itself: torch's, with a state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cseq._core import check_depth, is_deep
from cseq.adapters.torch import names, worker
from cseq.adapters.torch.seeds import BatchSeeds
from cseq.adapters.torch.stateful import DatasetState
from cseq.adapters.torch.taking import Taking
from cseq.encoding import failure
from cseq.indexing import context
from cseq.indexing.leaving import Partial, indices_of
from cseq.indexing.seeding import call_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.adapters.torch.state import Resume

__all__ = ["InlineIterator"]


class InlineIterator(Taking, names.Inline):  # type: ignore[misc]
    """Batches that the trainer makes itself.

    Parameters are those of `WorkersIterator`.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rng: str,
        on_error: str,
        resume: Resume | None = None,
        snapshot_every: int | None = None,
    ) -> None:
        state = (resume.states[0] if resume and resume.states else None) or {}
        # A finished epoch: the data set is as it was left, before anything is drawn for the next.
        if resume is not None and resume.base_seed is None and state.get("dataset") is not None:
            loader.dataset.load_state_dict(state["dataset"])
            state = {}
        keeps_state = snapshot_every is not None
        Taking.__init__(
            self, loader, names.Inline, rng=rng, on_error=on_error, keeps_state=keeps_state
        )
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._in_order, self._asks_dataset = True, bool(snapshot_every)
        self._drawn: list[Any] = []  # the key whose batch is being made
        self._begin(resume)
        self._batch_context = context.BatchContext(0, 0)
        is_seeded = rng == "batch"
        self._seeds = BatchSeeds(self._batch_context, self._base_seed) if is_seeded else None
        self._open(resume, state)

    def _open(self, resume: Resume | None, state: dict[str, Any]) -> None:
        """Make the fetcher, and the keys, where the epoch begins."""
        progress = self.progress
        fetching = worker.Fetching.of(self)
        self._dataset_fetcher = self._seeded(0, lambda: fetching.open(state))  # as in a worker
        if self._asks_dataset:
            progress.inline = DatasetState(self._dataset, self._dataset_fetcher)
        if self._is_iterable:
            for number in range(state.get("made", 0), progress.yielded):
                key = next(self._sampler_iter)
                try:
                    self._seeded(number, partial(self._dataset_fetcher.fetch, key))
                except StopIteration:
                    return
                except Exception:  # noqa: BLE001 - it was raised in the loop then
                    continue
            return
        self._sampler_iter = self._keys(resume)

    # -- the next batch

    def _next_data(self) -> Any:
        """Return the batch that `__next__` takes out, or raise `_error`, which it takes out too."""
        check_depth()
        if not self._drawn:
            self._drawn.append(self._draw())
        key, self._left, self._place = self._drawn[0], (), None
        fetch = self._dataset_fetcher.fetch if self._is_iterable else self._fetch
        try:
            batch = self._seeded(self.progress.yielded, partial(fetch, key))
        except StopIteration:
            self.progress.finished = True
            raise
        except Exception as error:
            if isinstance(error, RecursionError) and is_deep():
                raise  # the next call makes the batch of this key
            self._place, self._error = self._name(key), error
            self._indices = [] if self._is_iterable else indices_of(key)
            self._drawn.clear()
            raise
        self._drawn.clear()
        if type(batch) is Partial:
            batch, self._left = batch
        if not self._pin_memory:
            return batch
        try:
            return names.pin(batch, self._pin_memory_device)
        except Exception as error:
            self._error = error
            raise

    def _draw(self) -> Any:
        """Draw the next key."""
        try:
            return next(self._sampler_iter)
        except StopIteration:
            self.progress.finished = True
            raise

    def _fetch(self, key: Any) -> Any:
        """Fetch the batch of a key of map-style data, which has no end."""
        try:
            return self._dataset_fetcher.fetch(key)
        except StopIteration as stop:
            raise RuntimeError("the data set raised StopIteration") from stop

    def _name(self, key: Any) -> str:
        """Name a batch."""
        if self._is_iterable:
            return f"batch {self.progress.yielded}"
        return f"the batch of {failure.listed(key)}"

    def _seeded(self, number: int, make: Callable[[], Any]) -> Any:
        """Call a function; with rng="batch", with the generators as they are for a batch."""
        seeds = self._seeds
        if seeds is None:
            return make()

        def seed_and_make() -> Any:
            seeds.seed_for(number)
            return make()

        return call_here(seed_and_make, self._batch_context, seeds)
