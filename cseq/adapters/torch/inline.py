"""The iterator over batches that the trainer makes itself: torch's, with a state."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from cseq import context
from cseq.adapters.torch import names, worker
from cseq.adapters.torch.order import order_of
from cseq.adapters.torch.seeds import BatchSeeds
from cseq.adapters.torch.state import Progress
from cseq.adapters.torch.stateful import DatasetState

if TYPE_CHECKING:
    from collections.abc import Callable

    from cseq.adapters.torch.state import Resume

__all__ = ["InlineIterator"]


LEFT_OUT = object()


class InlineIterator(names.Inline):  # type: ignore[misc]
    """Batches that the trainer makes itself.

    Parameters and attributes are those of `WorkersIterator`.
    """

    def __init__(
        self, loader: Any, *, rng: str, on_error: str, resume: Resume | None = None
    ) -> None:
        state = (resume.states[0] if resume and resume.states else None) or {}
        # A finished epoch: the data set is as it was left, before anything is drawn for the next.
        if resume is not None and resume.base_seed is None and state.get("dataset") is not None:
            loader.dataset.load_state_dict(state["dataset"])
            state = {}
        names.init(self, loader, names.Inline)
        self._base_seed: int
        self._sampler_iter: Any
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._is_iterable = self._dataset_kind == names.ITERABLE
        self._is_making = False
        self._skips_errors = on_error == "skip"
        self._batch_context = context.BatchContext(0, 0, 0)
        self._seeds = (
            BatchSeeds(self._batch_context, lambda: self._is_making) if rng == "batch" else None
        )
        if resume is not None:
            self._num_yielded = resume.yielded
            if resume.base_seed is not None:
                self._base_seed = resume.base_seed
        self.progress = Progress(iterable=self._is_iterable, num_workers=0, rng=rng)
        self.progress.begin(self._base_seed, resume)
        if self._seeds is not None:
            self._seeds.begin(self._base_seed)
        self._open(resume, state)

    def _open(self, resume: Resume | None, state: dict[str, Any]) -> None:
        """Make the fetcher, and the keys, where the epoch begins."""
        progress = self.progress
        fetching = worker.Fetching(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
        )
        self._dataset_fetcher = self._seeded(0, lambda: fetching.open(state))  # as in a worker
        progress.inline = DatasetState(self._dataset, self._dataset_fetcher)
        if self._is_iterable:
            for number in range(state.get("made", 0), progress.yielded):
                try:
                    self._fetch(next(self._sampler_iter), number)
                except StopIteration:
                    return
                except Exception:  # noqa: BLE001 - it was raised in the loop then
                    continue
            return
        progress.order = order_of(self._index_sampler, self._sampler_iter, 0)
        keys = progress.order.keys(progress.yielded, resume.sampler if resume else None)
        self._sampler_iter = keys

    def _next_data(self) -> Any:
        """Return the next batch."""
        progress = self.progress
        try:
            batch = LEFT_OUT
            while batch is LEFT_OUT:
                batch = self._make(self._next_index())
        except StopIteration:
            progress.finished = True
            self._close()
            raise
        if self._pin_memory:
            return names.pin(batch, self._pin_memory_device)
        return batch

    def _make(self, index: Any) -> Any:
        """Make a batch; one that raises counts as well. LEFT_OUT: it is left out."""
        progress = self.progress
        try:
            try:
                batch = self._fetch(index, progress.yielded)
            except StopIteration as stop:
                if self._is_iterable:
                    raise
                raise RuntimeError("the data set raised StopIteration") from stop
        except StopIteration:
            raise
        except Exception as error:
            place = f"batch {progress.yielded}"
            if not self._is_iterable:
                place = f"the batch of {reprlib.repr(index)}"
            is_left_out = self._skips_errors and progress.skip(error, place)
            progress.yielded += 1
            if is_left_out:
                return LEFT_OUT
            raise
        progress.yielded += 1
        return batch

    def _fetch(self, index: Any, number: int) -> Any:
        """Fetch a batch; with rng="batch", from generators of its own."""
        return self._seeded(number, lambda: self._dataset_fetcher.fetch(index))

    def _seeded(self, number: int, make: Callable[[], Any]) -> Any:
        """Call a function; with rng="batch", with the generators as they are for a batch."""
        seeds = self._seeds
        if seeds is None:
            return make()
        left = context.enter(self._batch_context)
        self._is_making = True
        try:
            seeds.borrow(number)
            return make()
        finally:
            self._is_making = False
            seeds.restore()
            context.leave(left)

    def _close(self) -> None:
        """Watch no more for generators that are imported later."""
        if self._seeds is not None:
            self._seeds.close()
